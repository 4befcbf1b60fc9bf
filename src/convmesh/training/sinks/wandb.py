"""Weights & Biases. ``WANDB_MODE``, ``WANDB_ENTITY`` and its other environment variables count."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import wandb

from convmesh.training.sinks.tracker import RunAbout

_LOGIN_SECONDS = 5


class WeightsAndBiases:
    """A run of Weights & Biases; its files are in ``sinks/wandb`` of the run folder.

    Args:
        about: The run.
    """

    def __init__(self, about: RunAbout) -> None:
        number = about.number("wandb") or secrets.token_hex(8)
        self._run = wandb.init(
            project=about.project,
            name=about.name,
            id=number,
            resume="allow",
            dir=str(about.folder),
            config=dict(about.config),
            # A resumed run may differ in how it is computed.
            allow_val_change=True,
            # Nobody may sit at the terminal; and it belongs to the display of the run.
            settings=wandb.Settings(login_timeout=_LOGIN_SECONDS, silent=True, console="off"),
        )
        about.keep_number("wandb", number)
        # Its own steps may only rise, and a resumed run does some updates over again.
        self._run.define_metric("*", step_metric="update")
        folder = str(Path(self._run.dir).parent)
        self.place = folder if self._run.offline else self._run.url or folder

    def log(self, scalars: Mapping[str, float], *, update: int) -> None:
        """Adds points."""
        self._run.log({**scalars, "update": update})

    def close(self) -> None:
        """Uploads what is left and ends the run."""
        self._run.finish()

"""SwanLab. ``SWANLAB_MODE``, ``SWANLAB_API_KEY`` and its other environment variables count."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping

import swanlab

from convmesh.training.sinks.tracker import RunAbout


class SwanLab:
    """A run of SwanLab; its files are in ``sinks/swanlab`` of the run folder.

    Args:
        about: The run.
    """

    def __init__(self, about: RunAbout) -> None:
        number = about.number("swanlab") or secrets.token_hex(8)
        folder = about.folder / "swanlab"
        # Names of arguments that old versions know too; new ones need a protobuf that MindSpore is too new for.
        run = swanlab.init(
            project=about.project,
            experiment_name=about.name,
            id=number,
            resume="allow",
            logdir=str(folder),
            config=dict(about.config),
        )
        about.keep_number("swanlab", number)
        self.place = str(folder)
        with contextlib.suppress(Exception):  # It refuses to tell an address where it sends nothing.
            self.place = run.url or self.place

    def log(self, scalars: Mapping[str, float], *, update: int) -> None:
        """Adds points."""
        swanlab.log(dict(scalars), step=update)

    def close(self) -> None:
        """Uploads what is left and ends the run."""
        swanlab.finish()

"""TensorBoard: event files, written by tensorboardX."""

from __future__ import annotations

from collections.abc import Mapping

from tensorboardX import SummaryWriter

from convmesh.config.load import dotted
from convmesh.training.sinks.tracker import RunAbout


class TensorBoard:
    """Event files in ``sinks/tensorboard`` of the run folder; ``tensorboard --logdir runs`` shows those of all runs.

    Args:
        about: The run.
    """

    def __init__(self, about: RunAbout) -> None:
        folder = about.folder / "tensorboard"
        # What an interrupted run wrote after its last checkpoint is done over again; this hides the earlier points.
        purge = {"purge_step": about.update + 1} if about.update else {}
        self._writer = SummaryWriter(str(folder), **purge)
        self.place = str(folder)
        rows = "".join(f"| {name} | `{value}` |\n" for name, value in dotted(about.config).items())
        self._writer.add_text("config", f"| setting | value |\n| --- | --- |\n{rows}", about.update)

    def log(self, scalars: Mapping[str, float], *, update: int) -> None:
        """Adds points."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

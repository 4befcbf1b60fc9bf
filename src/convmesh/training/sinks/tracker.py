"""What another tool's tracker of runs must do, and what of a run's records it is told."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

FOLDER = "sinks"
"""Folder of a run folder that keeps under which number each tracker knows the run, and what trackers write here."""


class Tracker(Protocol):
    """A run in another tool.

    Its constructor takes a ``RunAbout`` and opens the run, or goes on with it. It may raise whatever it likes, here and
    in every method: `convmesh.training.sinks.background` sees to it that training goes on.

    Attributes:
        place: Where a person finds the run: an address or a folder.
    """

    place: str

    def log(self, scalars: Mapping[str, float], *, update: int) -> None:
        """Takes finite numbers by name, as they were after an update; a resumed run may do updates over again."""
        ...

    def close(self) -> None:
        """Flushes, and ends the run."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunAbout:
    """A run, as a tracker sees it.

    Args:
        run_dir: The run folder.
        project: What the run is filed under.
        update: Updates that were done before; above 0 for a resumed run.
        config: The run file, as nested plain values.
    """

    run_dir: Path
    project: str
    update: int
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the run: that of its folder."""
        return self.run_dir.name

    @property
    def folder(self) -> Path:
        """Where trackers may write files; made on first use."""
        folder = self.run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        return folder

    def number(self, tracker: str) -> str | None:
        """Under which number a tracker knows the run; None if it never did."""
        path = self.run_dir / FOLDER / f"{tracker}.id"
        return path.read_text("utf-8").strip() if path.exists() else None

    def keep_number(self, tracker: str, number: str) -> None:
        """Keeps under which number a tracker knows the run, so that a resumed run goes on there."""
        (self.folder / f"{tracker}.id").write_text(f"{number}\n", "utf-8")


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """What trackers are told of a record of ``metrics.jsonl``.

    Args:
        record: Any record.

    Returns:
        Finite numbers by ``group/name``; of what each rank has measured the mean over ranks. Empty for a record that
        is about no update.
    """
    group = {"step": "train", "epoch": "epoch", "eval": "eval", "profile": "profile", "end": "run"}.get(record["kind"])
    if group is None:
        return {}
    return dict(_scalars(group, record))


_NOT_TOLD = {"kind", "update", "epoch", "num_updates", "eta_seconds"}


def _scalars(group: str, record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, found in record.items():
        if name in _NOT_TOLD or isinstance(found, bool):
            continue
        of_ranks = isinstance(found, list) and found and all(isinstance(entry, int | float) for entry in found)
        value = fmean(found) if of_ranks else found
        if isinstance(value, int | float) and math.isfinite(value):
            yield f"{group}/{name}", float(value)

"""What a search has found: candidates, and what became of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from convmesh.mesh import Mesh
from convmesh.planner.candidates import Outline
from convmesh.planner.prediction import Prediction

NUM_MISSES = 3
"""Candidates that come nearest to fitting of which all is predicted where nothing fits."""

REFUSED = "can't be run"
"""Begins the reason of a candidate that the engine refuses."""

Verdict = Literal["chosen", "slower", "too large", "not tried", "refused"]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One candidate.

    Args:
        outline: What it is.
        floor_seconds: What it would take at least, if memory had no limit.
        floor_bytes: What a rank would hold at least, however slow it were; 0 if not known.
        verdict: What became of it.
        reason: Why, in words.
        prediction: Of its best plan; of the one that needs least memory, if it is too large; None if not tried, or if
            the floor of its bytes told that it is too large.
        is_proved: Whether its splits are the optimum of the cost model, and not only of its floor.
    """

    outline: Outline
    floor_seconds: float
    floor_bytes: int = 0
    verdict: Verdict = "not tried"
    reason: str = ""
    prediction: Prediction | None = None
    is_proved: bool = False

    @property
    def fits(self) -> bool:
        """Whether there is a plan of it within the limit."""
        return self.verdict in {"chosen", "slower"}

    @property
    def seconds(self) -> float:
        """Of its plan; its floor if it has none."""
        return self.floor_seconds if self.prediction is None else self.prediction.seconds.total


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search has found.

    Args:
        num_ranks: The ranks there are.
        memory_bytes: What each may fill.
        candidates: All candidates, the chosen one first, then from fast to slow, those that are too large last.
        refused: Meshes that can't be, and why.
    """

    num_ranks: int
    memory_bytes: int
    candidates: tuple[Judged, ...]
    refused: tuple[tuple[Mesh, str], ...] = ()

    @property
    def chosen(self) -> Judged | None:
        """The fastest that fits; None if nothing does."""
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and first.verdict == "chosen" else None

    @property
    def refusals(self) -> tuple[Judged, ...]:
        """Candidates that would be faster than the chosen one but that the engine can't run, from fast to slow."""
        return tuple(entry for entry in self.candidates if entry.verdict == "refused")

    @property
    def plain(self) -> Judged | None:
        """Plain data parallelism, if samples can be dealt so."""
        return next((entry for entry in self.candidates if entry.outline.is_plain and self._is_full(entry)), None)

    def _is_full(self, entry: Judged) -> bool:
        return entry.outline.mesh.num_ranks == self.num_ranks


def nearest_misses(found: Found, number: int = NUM_MISSES) -> Iterator[Judged]:
    """The candidates that come nearest to fitting, where nothing fits."""
    large = [entry for entry in found.candidates if entry.verdict == "too large" and entry.prediction is not None]
    yield from sorted(large, key=lambda entry: entry.prediction.memory.total if entry.prediction else 0)[:number]

"""Scaling on paper: the best plan and plain data parallelism for more and more devices of a cluster.

*Strong* scaling keeps the global batch, *weak* scaling the samples per rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from convmesh.planner.candidates import Outline, Wishes
from convmesh.planner.found import Found
from convmesh.planner.pricing import Pricer
from convmesh.planner.search import search

NUM_RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Devices for which curves are drawn."""

Kind = Literal["strong", "weak"]


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """One number of devices.

    Args:
        kind: Whether the global batch or the samples per rank are kept.
        num_ranks: The devices.
        global_batch: Samples per update.
        outline: The best plan's mesh and micro-batches; None if nothing fits.
        seconds: Of an update with it.
        plain_seconds: With plain data parallelism; None if samples can't be dealt so, or it does not fit.
    """

    kind: Kind
    num_ranks: int
    global_batch: int
    outline: Outline | None
    seconds: float | None
    plain_seconds: float | None

    @property
    def samples_per_second(self) -> float | None:
        """Of the best plan."""
        return None if self.seconds is None else self.global_batch / self.seconds

    @property
    def plain_samples_per_second(self) -> float | None:
        """Of plain data parallelism."""
        return None if self.plain_seconds is None else self.global_batch / self.plain_seconds


def scaling_points(
    pricer: Pricer, *, samples_per_rank: int, memory_bytes: int | None = None, num_ranks: Iterable[int] = NUM_RANKS
) -> Iterator[ScalingPoint]:
    """Plans for each number of devices, with the same global batch and with as many samples for each.

    Args:
        pricer: Network, training and devices; its global batch is that of strong scaling.
        samples_per_rank: Samples of each rank, for weak scaling.
        memory_bytes: What a rank may fill; what a device of the cluster has, if left out.
        num_ranks: Numbers of devices.

    Yields:
        Both points of each number.

    Raises:
        ConfigError: If the cluster says nothing of the links between so many ranks.
    """
    for number in num_ranks:
        batches: dict[Kind, int] = {"strong": pricer.training.global_batch, "weak": samples_per_rank * number}
        for kind, global_batch in batches.items():
            yield _point(kind, pricer.for_batch(global_batch), number, memory_bytes)


def _point(kind: Kind, pricer: Pricer, num_ranks: int, memory_bytes: int | None) -> ScalingPoint:
    found = search(pricer, num_ranks=num_ranks, memory_bytes=memory_bytes, wishes=Wishes(uses_all=True))
    chosen = found.chosen
    return ScalingPoint(
        kind=kind,
        num_ranks=num_ranks,
        global_batch=pricer.training.global_batch,
        outline=None if chosen is None else chosen.outline,
        seconds=None if chosen is None else chosen.seconds,
        plain_seconds=_plain_seconds(found),
    )


def _plain_seconds(found: Found) -> float | None:
    return found.plain.seconds if found.plain is not None and found.plain.fits else None


def efficiency(point: ScalingPoint, first: ScalingPoint) -> float | None:
    """Samples per second and rank, as a share of those at the first point."""
    if point.samples_per_second is None or first.samples_per_second is None:
        return None
    return point.samples_per_second * first.num_ranks / (first.samples_per_second * point.num_ranks)

"""How an axis communicates: in few large or many small collectives, and what of their time is for being many.

A collective takes ``fixed + bytes / rate``. Where sizes differ enough, a straight line through the times of a run tells
the two apart; the fixed parts together are what fewer, larger collectives would save.

Legend: R ranks of a group, C collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convmesh.profiling.breakdown import Breakdown
from convmesh.profiling.events import Floats
from convmesh.profiling.matching import Matched

_MIN_SIZE_RATIO = 4.0
"""Sizes that differ by less don't tell a fixed cost from a rate."""

_MIN_EXPOSED_SHARE = 0.05
"""Below this share of a step that an axis is waited for, nobody gains from fewer collectives."""

_MIN_NUMBER = 4
"""So few collectives a step are not many."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The collectives of one axis, in an average steady step of a group.

    Args:
        axis: Mesh axis; empty if not known.
        num_ranks: Ranks of a group.
        num_per_step: Collectives.
        median_bytes: Half of them carry no more; 0 if not known.
        bytes_per_step: All of them together, input bytes on a rank.
        busy_seconds: All of them together, each from when all ranks had come and the one before was through.
        fixed_seconds: Of each, what it would take without any bytes; None where their sizes are too much alike to tell.
        exposed_share: Share of the step in which a rank waits for this axis, from 0 to 1.
    """

    axis: str
    num_ranks: int
    num_per_step: float
    median_bytes: float
    bytes_per_step: float
    busy_seconds: float
    fixed_seconds: float | None
    exposed_share: float

    @property
    def latency_share(self) -> float:
        """Share of ``busy_seconds`` that is fixed cost, from 0 to 1; 0 if not known."""
        if not self.fixed_seconds or not self.busy_seconds:
            return 0.0
        return min(1.0, self.num_per_step * self.fixed_seconds / self.busy_seconds)

    @property
    def is_latency_bound(self) -> bool:
        """Whether many small collectives cost more for being many than for what they carry, and it is felt."""
        many = self.num_per_step >= _MIN_NUMBER and self.exposed_share >= _MIN_EXPOSED_SHARE
        return many and self.latency_share > 0.5


def traffic_of(breakdown: Breakdown, matched: list[Matched]) -> list[Traffic]:
    """Sums up the collectives of each axis.

    Args:
        breakdown: Of the steady steps.
        matched: The collectives of all groups, on one clock.

    Returns:
        One entry per axis, the one that takes longest first.
    """
    found = []
    for axis in sorted({group.axis for group in matched}):
        groups = [group for group in matched if group.axis == axis]
        kept = [np.isin(group.step_C, breakdown.step_S) for group in groups]
        seconds_C = np.concatenate([group.service_seconds[keep] for group, keep in zip(groups, kept, strict=True)])
        bytes_C = np.concatenate([group.num_bytes_C[keep] for group, keep in zip(groups, kept, strict=True)])
        if not len(seconds_C):
            continue
        times = len(groups) * len(breakdown.step_S)
        exposed_RS = breakdown.exposed_ARS[breakdown.axes.index(axis)]
        found.append(
            Traffic(
                axis=axis,
                num_ranks=len(groups[0].ranks),
                num_per_step=len(seconds_C) / times,
                median_bytes=float(np.median(bytes_C)),
                bytes_per_step=float(bytes_C.sum()) / times,
                busy_seconds=float(seconds_C.sum()) / times,
                fixed_seconds=fixed_seconds(bytes_C.astype(float), seconds_C),
                exposed_share=float(exposed_RS.sum() / breakdown.step_RS.sum()),
            )
        )
    return sorted(found, key=lambda entry: -entry.busy_seconds)


def fixed_seconds(bytes_C: Floats, seconds_C: Floats) -> float | None:
    """What a collective takes whatever it carries: ``seconds = fixed + bytes / rate``, neither part below zero.

    The line goes through the mean time of each size, since single ones wait for a core now and then; each counts by its
    relative error, since sizes span orders of magnitude.

    Returns:
        The fixed part; None if there is no size 4 times another, or a time is 0.
    """
    size_Z, place_C = np.unique(bytes_C, return_inverse=True)
    seconds_Z = np.bincount(place_C, seconds_C) / np.bincount(place_C)
    if size_Z[0] <= 0 or size_Z[-1] < _MIN_SIZE_RATIO * size_Z[0] or not (seconds_Z > 0).all():
        return None
    columns_Z2 = np.stack([1 / seconds_Z, size_Z / size_Z[-1] / seconds_Z], axis=1)
    (fixed, carried), *_ = np.linalg.lstsq(columns_Z2, np.ones(len(size_Z)), rcond=None)
    if fixed <= 0:
        return 0.0
    if carried < 0:  # The best of lines that don't fall is flat.
        return float(columns_Z2[:, 0].sum() / np.square(columns_Z2[:, 0]).sum())
    return float(fixed)

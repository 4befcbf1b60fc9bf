"""Which steps are typical, and how much they vary.

Legend: R ranks, S steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convmesh.profiling.events import Floats

WARMUP_FACTOR = 1.5
"""A step at the start that takes this many times the median is warm-up: compiling, allocating, filling caches."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How step times vary.

    Args:
        median_seconds: Half of the steps are quicker; of the slowest rank in each step.
        p5_seconds: One step in twenty is quicker.
        p95_seconds: One step in twenty is slower.
        between_ranks: Median over steps of the difference between the slowest and the quickest rank, as a share of
            the step.
        drift: How much longer the last third of the steps takes than the first, as a share.
    """

    median_seconds: float
    p5_seconds: float
    p95_seconds: float
    between_ranks: float
    drift: float


def steady_steps(step_RS: Floats) -> npt.NDArray[np.bool_]:
    """Which steps are past the warm-up, shape (S,).

    The first steps are set apart as long as they take at least ``WARMUP_FACTOR`` times the median of all. At most half
    of them are: where most steps are slow, slow is what is typical.
    """
    slowest_S = step_RS.max(axis=0)
    limit = WARMUP_FACTOR * float(np.median(slowest_S))
    steady_S = np.ones(len(slowest_S), bool)
    for step in range(len(slowest_S) // 2):
        if slowest_S[step] < limit:
            break
        steady_S[step] = False
    return steady_S


def spread_of(step_RS: Floats) -> Spread:
    """How step times vary over time and between ranks.

    Args:
        step_RS: Seconds of the steady steps.

    Returns:
        The spread.
    """
    slowest_S = step_RS.max(axis=0)
    p5, median, p95 = (float(value) for value in np.percentile(slowest_S, (5, 50, 95)))
    third = max(1, len(slowest_S) // 3)
    first, last = float(np.median(slowest_S[:third])), float(np.median(slowest_S[-third:]))
    return Spread(
        median_seconds=median,
        p5_seconds=p5,
        p95_seconds=p95,
        between_ranks=float(np.median(np.ptp(step_RS, axis=0))) / median if median else 0.0,
        drift=last / first - 1 if first else 0.0,
    )

"""Stretches of time: their union, and how much of it lies before a moment.

Everything else follows: the time covered by A or B is that of their union, the time covered by both is
``A + B - union``, and what A covers within a step is its cover at the step's end less that at its start. So any number
of steps costs one sort of the events.

Legend: E events, T moments.
"""

from __future__ import annotations

import numpy as np

from convmesh.profiling.events import Floats


class Cover:
    """The union of stretches of time.

    Args:
        start_E: Starts, in any order.
        end_E: Ends, none before its start.
    """

    def __init__(self, start_E: Floats, end_E: Floats) -> None:
        self.start_U, self.end_U = _merge(start_E, end_E)
        self._before_U = np.concatenate([[0.0], np.cumsum(self.end_U - self.start_U)])

    def before(self, time_T: Floats) -> Floats:
        """Seconds covered before each moment, shape (T,)."""
        if not len(self.start_U):
            return np.zeros(len(time_T))
        index_T = np.searchsorted(self.start_U, time_T, side="right")
        last_T = np.maximum(index_T - 1, 0)
        overshoot_T = np.where(index_T > 0, np.maximum(self.end_U[last_T] - time_T, 0.0), 0.0)
        covered_T: Floats = self._before_U[index_T] - overshoot_T
        return covered_T

    def within(self, start_T: Floats, end_T: Floats) -> Floats:
        """Seconds covered within each stretch, shape (T,)."""
        return self.before(end_T) - self.before(start_T)


def _merge(start_E: Floats, end_E: Floats) -> tuple[Floats, Floats]:
    if not len(start_E):
        return start_E, end_E
    order = np.argsort(start_E, kind="stable")
    start_E, reach_E = start_E[order], np.maximum.accumulate(end_E[order])
    opens = np.concatenate([[True], start_E[1:] > reach_E[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return start_E[opens], reach_E[closes]

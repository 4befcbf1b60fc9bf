"""What it takes a rank to get a micro-batch that a worker has read: a run without workers can't show it otherwise."""

from __future__ import annotations

import statistics
import time

from convmesh.engines.contract import Batch, Engine, Reader
from convmesh.engines.reading_ahead import UPDATES_AHEAD

HAND_OVER = "hand_over_seconds"
"""Name of the figure in a profile."""

_UPDATES = 5
_LEAST = 4
_PAUSE_SECONDS = 0.005
"""For each micro-batch, in which a worker that has nothing to read is sure to have the next one ready."""


def hand_over_seconds(engine: Engine, batch: Batch, *, accumulation: int) -> float:
    """Measures it, as an update takes them: one after the other, all read beforehand.

    Args:
        engine: A started engine; all ranks of a machine measure at once, so that they compete as in a run.
        batch: A micro-batch of the size of the run's.
        accumulation: Micro-batches of an update.

    Returns:
        Seconds of one micro-batch, median over updates.
    """
    number = max(accumulation, _LEAST)
    keys = [(0, update, micro) for update in range(_UPDATES + UPDATES_AHEAD) for micro in range(number)]
    batches = iter(engine.load(_Ready(batch), keys, num_workers=1))
    seconds = []
    for _ in range(_UPDATES + 1):
        time.sleep(number * _PAUSE_SECONDS)
        begun = time.perf_counter()
        for _ in range(number):
            next(batches)
        seconds.append((time.perf_counter() - begun) / number)
    return statistics.median(seconds[1:])  # At first the worker has to start.


class _Ready(Reader):
    """Has read everything already."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def read(self, key: tuple[int, int, int]) -> Batch:
        return self._batch

"""A network whose run has faults on purpose, one after the other: for tests of what a profile says of them.

Rank 1 computes longer in the first ``PHASE`` profiled updates and waits longer for its data in the next; then every
collective of the gradients takes longer, as over a slow link; in the last ones some of the samples of rank 1 cost more.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

PHASE = 12
START = 3
SECONDS = 0.15
SAMPLE_SECONDS = 0.2
COSTLY = 4
"""The class of samples that cost more: of eight samples, one or none."""

_update = -1


def network(engine: str) -> Any:
    """Builds cnn-small and plants the faults."""
    _plant(engine)
    networks = importlib.import_module(f"convmesh.models.{engine}.networks")
    return networks.NETWORKS["cnn-small"](num_classes=10, num_channels=1)


def _delay(phase: int, *, rank: int | None, seconds: float = SECONDS) -> None:
    from convmesh.training import profiling

    mine = rank is None or profiling.StepProfiler.rank == rank  # type: ignore[attr-defined]
    if mine and phase * PHASE <= _update - START < (phase + 1) * PHASE:
        time.sleep(seconds)


def _plant(engine: str) -> None:
    from convmesh.data.reader import TrainReader
    from convmesh.training.profiling import StepProfiler

    before_step = StepProfiler.before_step

    def count(self: Any, update: int) -> None:
        global _update
        _update, StepProfiler.rank = update, self._world.rank  # type: ignore[attr-defined]
        before_step(self, update)

    StepProfiler.before_step = count  # type: ignore[method-assign]
    _slow(TrainReader, "read", phase=1, rank=1)
    _make_samples_cost(TrainReader)
    step = importlib.import_module(f"convmesh.engines.{engine}.train_step")
    if engine == "torch":
        collectives = importlib.import_module("convmesh.engines.torch.collectives")
        _slow(step.Objective, "scores", phase=0, rank=1)
        _slow(collectives.dist, "all_reduce", phase=2, rank=None)
    else:
        _slow(step.MindSporeTrainStep, "_differentiate", phase=0, rank=1)
        shared_memory = importlib.import_module("convmesh.engines.mindspore.shared_memory")
        _slow(shared_memory.SharedSum, "__call__", phase=2, rank=None)


def _make_samples_cost(reader: Any) -> None:
    read = reader.read

    def read_slowly(self: Any, key: Any) -> Any:
        batch = read(self, key)
        _delay(3, rank=1, seconds=SAMPLE_SECONDS * int((batch.labels_N == COSTLY).sum()))
        return batch

    reader.read = read_slowly


def _slow(owner: Any, name: str, *, phase: int, rank: int | None) -> None:
    original = getattr(owner, name)

    def slowed(*arguments: Any, **keywords: Any) -> Any:
        _delay(phase, rank=rank)
        return original(*arguments, **keywords)

    setattr(owner, name, slowed)

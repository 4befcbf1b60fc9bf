"""ConvMesh's updates with the recorder off, always on, and keeping events: the three in turn on the same ranks.

Each update does what the training loop does around it, noting the waiting for data and the step itself.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from benchmarks.contenders.work import Work

from convmesh.engines.contract import Engine, World
from convmesh.profiling.recorder import RECORDER, Recorder

MODES = ("off", "on", "events")
"""Nothing is noted; sums by kind, as in every run; every event, as within ``train.profile``."""

_NUM_NOTES = 20_000


def prepare(engine: Engine, world: World, *, name: str, work: Work) -> None:
    """Builds a network on this rank under a name, and runs its first two updates."""
    _contender(engine).prepare(engine, world, contender="convmesh", name=name, work=work)


def run(engine: Engine, world: World, *, name: str, num_turns: int, num_updates: int) -> dict[str, list[float]]:
    """Runs a few updates in every mode, in an order that changes from turn to turn and is the same on all ranks.

    Returns:
        Seconds of an update of each mode on this rank, turn by turn; under ``"mode cpu"`` the processor's; and as
        ``"notes"`` how much each update noted.
    """
    update, shuffle = _contender(engine)._steps[name], np.random.default_rng(0)
    found: dict[str, list[float]] = {name: [] for name in (*MODES, *map(cpu_of, MODES), "notes")}
    for turn in range(num_turns):
        for mode in shuffle.permutation(MODES):
            engine.all_gather(None)
            with _off() if mode == "off" else contextlib.nullcontext():
                begun, begun_cpu = time.perf_counter(), time.process_time()
                if mode == "events":
                    RECORDER.start()
                for number in range(num_updates):
                    _one_update(engine, update, number=turn * num_updates + number)
                found[mode].append((time.perf_counter() - begun) / num_updates)
                found[cpu_of(mode)].append((time.process_time() - begun_cpu) / num_updates)
                if mode == "events":
                    found["notes"].append(RECORDER.stop(world.rank).num_events / num_updates)
    return found


def cpu_of(mode: str) -> str:
    """Name of the processor's seconds of a mode."""
    return f"{mode} cpu"


def note_seconds(engine: Engine, world: World) -> dict[str, float]:
    """Seconds of one note in the modes that note something: the time of many, with nothing within them."""
    found = {}
    for mode in MODES[1:]:
        if mode == "events":
            RECORDER.start()
        begun = time.perf_counter()
        for _ in range(_NUM_NOTES):
            with RECORDER.span("communication", "all-reduce gradients", axis="data", num_bytes=8):
                pass
        found[mode] = (time.perf_counter() - begun) / _NUM_NOTES
    RECORDER.stop(world.rank)
    return found


def _one_update(engine: Engine, update: Callable[[], None], *, number: int) -> None:
    """An update, with what the training loop notes around it."""
    step_begun = RECORDER.now()
    RECORDER.add("data", "micro-batches", start=step_begun, end=step_begun)
    RECORDER.take_totals()
    update()
    RECORDER.take_totals()
    if RECORDER.keeps_events:
        memory = engine.memory_bytes()
        RECORDER.add_step(number, start=step_begun, end=RECORDER.now(), num_samples=1, memory_bytes=memory)


def drop(engine: Engine, world: World, *, name: str) -> None:
    """Forgets a network."""
    _contender(engine).drop(engine, world, name=name)


def _contender(engine: Engine) -> Any:
    return importlib.import_module(f"benchmarks.contenders.{engine.name}_ranks")


@contextlib.contextmanager
def _off() -> Iterator[None]:
    """Makes the recorder note nothing."""
    with contextlib.ExitStack() as stack:
        for method in ("add", "add_beside", "count"):
            stack.enter_context(mock.patch.object(Recorder, method, _note_nothing))
        stack.enter_context(mock.patch.object(Recorder, "span", new=_span_nothing))
        yield


def _note_nothing(*_: object, **__: object) -> None:
    pass


def _span_nothing(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
    return _NOTHING


_NOTHING = contextlib.nullcontext()

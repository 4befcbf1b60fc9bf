"""What the channel parallel benchmark trains and what its ranks tell. Imports no framework."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders.channel_wire import Wire

NUM_CLASSES = 10


@dataclass(frozen=True)
class Network:
    """What is trained.

    Args:
        title: Its name.
        name: One of our networks, or "wide_field".
        image_size: Side in pixels.
        global_batch: Samples per step, of all ranks.
    """

    title: str
    name: str
    image_size: int
    global_batch: int


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Args:
        parameter_bytes: Parameters.
        optimizer_bytes: State of the optimizer.
        saved_bytes: What the forward keeps for the backward, parameters not counted; 0 where the engine does not tell.
        resident_bytes: Most that the process holds over what it held before it built anything.
        sent_bytes: Inputs of the step's collectives over the channel axis; 0 on other axes.
    """

    parameter_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    resident_bytes: int
    sent_bytes: int


def resident_bytes() -> int:
    """Memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@dataclass(frozen=True)
class Seconds:
    """Of one step on one rank.

    Args:
        step: All of it.
        compute: With collectives that do nothing; as the step where there are none.
        wire: Its collectives on their own, one after the other.
    """

    step: float
    compute: float
    wire: float


def timed(step: Callable[[], None], wire: Wire | None, meet: Callable[[], object], *, num_steps: int) -> Seconds:
    """Seconds of a step, of its computation and of its collectives.

    Args:
        step: Trains one step.
        wire: What it sends through; None if nothing.
        meet: Returns once all ranks have called it.
        num_steps: Steps of each kind.

    Returns:
        The mean of each.
    """

    def mean(action: Callable[[], object]) -> float:
        meet()
        begun = time.perf_counter()
        for _ in range(num_steps):
            action()
        return (time.perf_counter() - begun) / num_steps

    whole = mean(step)
    if wire is None:
        return Seconds(whole, whole, 0.0)
    wire.silent = True
    compute = mean(step)
    wire.silent = False
    meet()
    return Seconds(whole, compute, sum(wire.replay() for _ in range(num_steps)) / num_steps)

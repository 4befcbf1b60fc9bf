"""What an engine must be able to measure, so that a plan can be judged before it runs.

Each engine has a module ``calibrate`` whose ``create_calibrator`` makes one. All ranks call every method together, in
the same order: what ranks of one machine take from each other, cores, caches and memory, is in the figures then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from convmesh.engines.contract import World
from convmesh.engines.cores import ranks_per_core
from convmesh.graph import Graph
from convmesh.graph.graph import Shape
from convmesh.mesh import Mesh


@dataclass(frozen=True)
class OperatorTimes:
    """Seconds of one operator on this rank, round by round.

    Args:
        forward: Of each forward.
        backward: Of each backward; empty for an operator without one.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...] = ()


@dataclass(frozen=True)
class CollectiveTimes:
    """Seconds of one collective on this rank.

    Args:
        num_bytes: Its size, counted as `convmesh.plan.collectives` counts.
        seconds: Of each repetition.
    """

    num_bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which ranks communicate when a collective is measured: all groups of an axis at once.

    Args:
        axis: ``"data"`` or ``"channel"``: engines reduce gradients in another way than activations.
        mesh: A mesh of all ranks.
    """

    axis: str
    mesh: Mesh

    @property
    def size(self) -> int:
        """Ranks of each group."""
        return self.mesh.size(self.axis)


@dataclass(frozen=True, kw_only=True)
class FixedMemory:
    """What a rank holds beside tensors.

    Args:
        fixed_bytes: With a network of a few operators after some updates.
        bytes_per_operator: What each further operator adds.
        probe_bytes: What training each of ``PROBES``, one after the other, takes at most beside ``fixed_bytes``; empty
            where that can't be told.
    """

    fixed_bytes: int
    bytes_per_operator: int = 0
    probe_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A network whose tensors are known: convolutions, norms and activations, a global pool and a classifier.

    Args:
        num_layers: Convolutions.
        num_channels: Channels of each.
        num_samples: Samples that it is trained with.
        side: Pixels of an image's side.
    """

    num_layers: int
    num_channels: int
    num_samples: int
    side: int


PROBES = (
    Probe(num_layers=4, num_channels=32, num_samples=8, side=32),
    Probe(num_layers=24, num_channels=160, num_samples=2, side=4),
    Probe(num_layers=12, num_channels=32, num_samples=8, side=64),
)
"""Next to nothing, many parameters, large activations: by these is found what is held beside tensors of either kind.

Each is larger than the one before, since the most that a process held may only grow. They have many layers, as real
networks have: scratch memory is that of one layer.
"""


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Seconds that updates cost beside what is measured apart.

    Args:
        update_seconds: Of each update.
        micro_batch_seconds: Of each micro-batch.
    """

    update_seconds: float
    micro_batch_seconds: float


@dataclass(frozen=True)
class Measurement:
    """Everything that one rank measured.

    Args:
        memory: What it holds beside tensors.
        overhead: What updates cost beside operators.
        operators: Of each graph that was measured, its place in the list; None where the engine can't make it.
        updates: Of each number of bytes, the seconds of the optimizer, the gradient's norm included.
        collectives: What was measured of each kind, way and set of ranks.
        overlap: Share of gradient reduction that costs no time while the backward runs; None on one rank.
        data_seconds: Seconds per sample of reading the run's data; None where there are none.
        phases: How long each part of the calibration took.
    """

    memory: FixedMemory
    overhead: Overhead
    operators: dict[int, OperatorTimes | None] = field(default_factory=dict)
    updates: dict[int, tuple[float, ...]] = field(default_factory=dict)
    collectives: list[tuple[str, str, Ranks, tuple[CollectiveTimes, ...]]] = field(default_factory=list)
    overlap: float | None = None
    data_seconds: float | None = None
    phases: dict[str, float] = field(default_factory=dict)


TURNS = 3
"""How often work and a collective take turns for one figure."""

Clock = Callable[[], float]
"""Seconds since any moment."""


def clock_of(world: World) -> Clock:
    """What a rank's own work is timed with.

    Where ranks share cores, a short piece of work either runs through or waits for its turn, and its wall clock tells
    which. What it takes while all ranks compute is the processor time that it needs, times the ranks of each core.

    Args:
        world: Where this rank stands.

    Returns:
        The wall clock where each thread has a core, else that of the processor, which goes as much faster as ranks have
        to share.
    """
    share = ranks_per_core(world)
    return time.perf_counter if share == 1 else lambda: share * time.process_time()


def repeat(
    run: Callable[[], Any],
    repeats: int,
    *,
    gather: Callable[[Any], Any],
    synchronize: Callable[[], None] = lambda: None,
    in_step: bool = True,
    clock: Clock = time.perf_counter,
) -> tuple[float, ...]:
    """Runs something repeatedly, after one run to warm up.

    Where ranks share cores, a short piece of work that all begin together often has a core to itself while the others
    still wait for theirs; only work that follows on work takes what it takes in training.

    Args:
        run: What is timed.
        repeats: How often.
        gather: The engine's ``all_gather``, at which ranks meet.
        synchronize: Waits until the device has done what it was given.
        in_step: Whether ranks begin each repetition together; else only the first.
        clock: What it is timed with.

    Returns:
        Seconds of each repetition.
    """
    run()
    seconds = []
    for number in range(repeats):
        if in_step or number == 0:
            gather(None)
        synchronize()
        begun = clock()
        run()
        synchronize()
        seconds.append(clock() - begun)
    return tuple(seconds)


def repeat_after_work(
    run: Callable[[], Any],
    work: Callable[[], Any],
    repeats: int,
    *,
    gather: Callable[[Any], Any],
    now: Clock,
) -> tuple[float, ...]:
    """Runs a collective after some work, over and over, as training does.

    Ranks meet in the collective alone. What one waits for another counts, unless a rank of another group computes on
    its core meanwhile; what both waited for before a common start would count in no update.

    Args:
        run: The collective.
        work: Something that takes about as long as operators between two collectives.
        repeats: How many figures are wanted, each of ``TURNS`` runs.
        gather: The engine's ``all_gather``, at which ranks meet before each figure.
        now: The rank's clock (``clock_of``), once the device has done what it was given.

    Returns:
        Seconds of the collective by which each turn took longer than its work, at least its own by the clock.
    """
    run()
    found = []
    for _ in range(repeats):
        gather(None)
        # Ranks leave it one after the other, by more than many a collective takes: they set out from one of these.
        run()
        worked = ran = 0.0
        begun = time.perf_counter()
        for _ in range(TURNS):
            first = now()
            work()
            between = now()
            run()
            worked, ran = worked + between - first, ran + now() - between
        found.append(max(ran, time.perf_counter() - begun - worked) / TURNS)
    return tuple(found)


class Calibrator(Protocol):
    """Measures on one rank, with the settings that training has."""

    def operators(self, graphs: Sequence[Graph], *, num_rounds: int) -> list[OperatorTimes | None]:
        """Runs operators one after the other as a training step does: all forwards, then all backwards.

        Args:
            graphs: Each with a single operator, as `convmesh.planner.signature.Signature.graph` makes them.
            num_rounds: How often, after one round to warm up.

        Returns:
            Their seconds; None for an operator that this engine can't make.
        """
        ...

    def collective(self, kind: str, ranks: Ranks, *, sizes: Sequence[int], repeats: int) -> list[CollectiveTimes]:
        """Runs one kind of collective of the channel axis, or the gradient reduction of the data axis.

        Args:
            kind: As `convmesh.plan.collectives` names it.
            ranks: Who communicates.
            sizes: Bytes, counted as `convmesh.plan.collectives` counts.
            repeats: How often each.

        Returns:
            One entry per size.
        """
        ...

    def ways(self, kind: str, axis: str) -> tuple[str, ...]:
        """How training sends a kind of collective on an axis: ways that a cluster file knows; none if it never does."""
        ...

    def optimizer(self, shapes: Sequence[Shape], *, repeats: int) -> tuple[float, ...]:
        """Seconds of judging and applying gradients of parameters of these shapes, with the run's optimizer."""
        ...

    def memory(self) -> FixedMemory:
        """What this rank holds beside tensors; called before anything else."""
        ...

    def overhead(self) -> Overhead:
        """What updates cost beside operators, seen in the updates of a network that computes next to nothing."""
        ...

    def overlap(self, ranks: Ranks) -> float:
        """Share of gradient reduction that costs no time while the backward runs."""
        ...

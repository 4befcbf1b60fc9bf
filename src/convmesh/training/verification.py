"""Verifying a parallel run: it trains a few updates on ranks and on one device from the same state, and is compared.

Two sets of processes run one after the other, each in a folder of its own: the ranks, and one device, which trains
three times, twice with sums in other orders: they show how much of a difference is rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from convmesh.config import RunConfig
from convmesh.engines.contract import Arrays, Observation
from convmesh.errors import ConfigError
from convmesh.mesh import Mesh
from convmesh.training.collectives import expected_collectives
from convmesh.training.compare import Worst, by_kind, compare, smallest_changes
from convmesh.training.launch import launch, plan_launch
from convmesh.training.planning import RunPlan
from convmesh.training.run_folder import RunFolder
from convmesh.training.verify_worker import VARIANTS, Task, load_observation

_RANDOM = ("dropout", "opaque")

NORM_SHIFT = 3.0
"""Of normal values, 1 in 700 is negative after such a shift; ReLU6's upper kink is as far away."""
_LARGEST_RATES = {"sgd": 0.01, "adamw": 0.001}
_SMALLEST_EPSILON = 1e-3
"""AdamW divides by the gradient's size: with a smaller epsilon it makes whole steps of gradients that are rounding."""


@dataclass(frozen=True)
class Subject:
    """What is verified.

    Args:
        run: The run, its plan readable by all ranks.
        mesh: Its mesh.
        device: Its device, resolved.
        plan: How its network is split, or None.
        num_updates: Updates to train.
        dtype: ``"float32"`` or ``"float64"``.
    """

    run: RunConfig
    mesh: Mesh
    device: str
    plan: RunPlan | None
    num_updates: int = 3
    dtype: str = "float32"


@dataclass(frozen=True)
class CollectiveCheck:
    """Collectives of one kind over one axis in one update, as counted on rank 0 and as told beforehand."""

    axis: str
    kind: str
    number: int
    num_bytes: int
    expected_number: int
    expected_bytes: int

    @property
    def passed(self) -> bool:
        """Whether both are equal."""
        return (self.number, self.num_bytes) == (self.expected_number, self.expected_bytes)


@dataclass(frozen=True)
class Memory:
    """Bytes on each rank, and on one device with all micro-batches one after the other."""

    peak_bytes: tuple[int, ...]
    one_device_peak_bytes: int
    saved_bytes: tuple[int | None, ...]
    one_device_saved_bytes: int | None


@dataclass(frozen=True)
class Conditions:
    """What an exercise changes of its run, so that rounding stays small.

    Args:
        learning_rate: Of the exercise.
        norm_shift: What the shifts of norms start at; None where they stay as they are.
    """

    learning_rate: float
    norm_shift: float | None = None


@dataclass(frozen=True)
class Verification:
    """The outcome.

    Args:
        worst: The worst tensor of each kind.
        collectives: Counted and expected, by axis and kind.
        memory: Per rank and on one device; ``saved`` is what one update keeps for the backward, None where the engine
            doesn't tell.
        engine: The engine of the run.
        dtype: ``"float32"`` or ``"float64"``.
        conditions: Of the exercise.
    """

    worst: tuple[Worst, ...]
    collectives: tuple[CollectiveCheck, ...]
    memory: Memory
    engine: str = "torch"
    dtype: str = "float32"
    conditions: Conditions | None = None

    @property
    def passed(self) -> bool:
        """Whether everything is as near as is allowed, and communication as told."""
        return all(entry.passed for entry in self.worst) and all(entry.passed for entry in self.collectives)

    @property
    def inconclusive(self) -> bool:
        """Whether nothing is wrong that rounding could not explain, but not everything was proved either."""
        explained = all(entry.passed or entry.inconclusive for entry in self.worst)
        return not self.passed and explained and all(entry.passed for entry in self.collectives)


def verify_run(subject: Subject, *, root: Path) -> Verification:
    """Trains on ranks and on one device, and compares.

    Args:
        subject: What is verified.
        root: An empty folder.

    Returns:
        The outcome.

    Raises:
        ConvMeshError: If ranks can't be started, or one fails.
    """
    subject, conditions = condition(subject)
    task = Task(
        num_shards=subject.mesh.size("data"),
        num_updates=subject.num_updates,
        dtype=subject.dtype,
        norm_shift=conditions.norm_shift,
        reverses=not _is_random(subject.plan),
    )
    _run(subject, task, root / "ranks", mesh=subject.mesh)
    ranks = [load_observation(root / "ranks", rank=rank) for rank in range(subject.mesh.num_ranks)]
    _run(subject, replace(task, one_device=True), root / "one_device", mesh=Mesh({"data": 1}))
    alone = [load_observation(root / "one_device" / name, rank=0) for name in VARIANTS]
    return replace(judge(subject, ranks, alone, reverses=task.reverses), conditions=conditions)


def condition(subject: Subject) -> tuple[Subject, Conditions]:
    """Chooses an exercise in which rounding stays small.

    Half types would hide everything else. In float32 each activation that rounding brings from one side of a kink (of
    ReLU, of pooling) to the other turns a part of the gradient on or off: whole gradients of ResNet-50 then differ by
    some hundredths between two one-device runs. Norms that shift their values by three standard deviations keep nearly
    all activations away from kinks, and small steps keep what is left from growing. In float64 nothing is changed.

    Args:
        subject: What is verified.

    Returns:
        The subject with the run that is exercised, and what was changed.
    """
    run = subject.run
    precision = replace(run.precision, compute="float32", gradient_reduction="float32")
    if subject.dtype == "float64":
        return replace(subject, run=replace(run, precision=precision)), Conditions(run.optimizer.learning_rate)
    rate = min(run.optimizer.learning_rate, _LARGEST_RATES[run.optimizer.name])
    epsilon = max(run.optimizer.epsilon, _SMALLEST_EPSILON)
    optimizer = replace(run.optimizer, learning_rate=rate, epsilon=epsilon)
    return replace(subject, run=replace(run, precision=precision, optimizer=optimizer)), Conditions(rate, NORM_SHIFT)


def judge(
    subject: Subject, ranks: Sequence[Observation], alone: Sequence[Observation], *, reverses: bool
) -> Verification:
    """Compares what ranks saw with what one device saw.

    Args:
        subject: What was exercised.
        ranks: Of each rank; whole tensors are those of the first.
        alone: Of one device, in the order of ``VARIANTS``.
        reverses: Whether the second of them reversed the samples of each micro-batch.

    Returns:
        The outcome.
    """
    places = [subject.mesh.coordinate(rank).get("data", 0) for rank in range(subject.mesh.num_ranks)]
    num_forwards = subject.run.strategy.accumulation
    leaders = subject.mesh.groups("data")[0]
    expected, start = alone[0], alone[0].start
    losses = [sum(ranks[rank].losses[index] for rank in leaders) for index in range(subject.num_updates)]
    tensors = [
        by_kind(
            seen,
            _outputs(seen, places, num_forwards, flip=reverses and name == "reordered"),
            losses=seen.losses,
            start=start,
        )
        for name, seen in zip(VARIANTS, alone, strict=True)
    ]
    worst = compare(
        by_kind(ranks[0], _outputs_of_ranks(ranks, places, num_forwards), losses=losses, start=start),
        tensors[0],
        tensors[1:],
        dtype=subject.dtype,
        smallest=smallest_changes(start, dtype=subject.dtype),
    )
    return Verification(
        worst,
        _check_collectives(subject, ranks[0]),
        _memory(ranks, expected),
        engine=subject.run.engine,
        dtype=subject.dtype,
    )


def _run(subject: Subject, task: Task, path: Path, *, mesh: Mesh) -> None:
    folder = RunFolder(path)
    try:
        folder.prepare(subject.run, resume=False)
        task.write(folder)
        plan = plan_launch(
            subject.run, folder=folder, mesh=mesh, device=subject.device, worker="convmesh.training.verify_worker"
        )
        launch(plan, folder=folder, lasts=False)
    finally:
        folder.release()


def _is_random(plan: RunPlan | None) -> bool:
    """Whether the network may draw numbers that depend on the order of samples; unknown is yes."""
    return plan is None or any(node.kind in _RANDOM for node in plan.resolved.graph)


def _outputs_of_ranks(ranks: Sequence[Observation], places: Sequence[int], num_forwards: int) -> list[Arrays]:
    num_updates = len(ranks[0].outputs) // num_forwards
    return [
        {
            f"rank {rank} micro-batch {micro}": ranks[rank].outputs[update * num_forwards + micro]
            for rank in range(len(places))
            for micro in range(num_forwards)
        }
        for update in range(num_updates)
    ]


def _outputs(seen: Observation, places: Sequence[int], num_forwards: int, *, flip: bool = False) -> list[Arrays]:
    """The outputs of one device under the names of the ranks that should have the same."""
    per_update = (max(places) + 1) * num_forwards
    return [
        {
            f"rank {rank} micro-batch {micro}": np.ascontiguousarray(output[::-1]) if flip else output
            for rank, place in enumerate(places)
            for micro in range(num_forwards)
            for output in [seen.outputs[update * per_update + place * num_forwards + micro]]
        }
        for update in range(len(seen.outputs) // per_update)
    ]


def _check_collectives(subject: Subject, first: Observation) -> tuple[CollectiveCheck, ...]:
    counted: dict[tuple[str, str], tuple[int, int]] = {}
    for count in first.collectives:
        number, num_bytes = counted.get((count.axis, count.kind), (0, 0))
        counted[count.axis, count.kind] = number + count.number, num_bytes + count.num_bytes
    told = {
        (axis, entry.kind): (entry.number, entry.num_bytes)
        for axis, entries in expected_collectives(subject, first).items()
        for entry in entries
    }
    return tuple(
        CollectiveCheck(*key, *counted.get(key, (0, 0)), *told.get(key, (0, 0))) for key in sorted({**told, **counted})
    )


def _memory(ranks: Sequence[Observation], alone: Observation) -> Memory:
    return Memory(
        peak_bytes=tuple(seen.peak_memory_bytes for seen in ranks),
        one_device_peak_bytes=alone.peak_memory_bytes,
        saved_bytes=tuple(seen.saved_bytes for seen in ranks),
        one_device_saved_bytes=alone.saved_bytes,
    )


def check_length(num_updates: int, *, num_full: int) -> None:
    """Refuses more updates than the first epoch has with a full global batch.

    Args:
        num_updates: Updates asked for.
        num_full: Updates of an epoch with a full batch.

    Raises:
        ConfigError: If there are not as many.
    """
    if num_updates > num_full:
        raise ConfigError(
            "there are not so many full batches in an epoch", got=f"{num_updates} steps", expected=f"up to {num_full}"
        )


def check_dtype(dtype: str, *, engine: str) -> None:
    """Refuses a data type in which an engine can't compute.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        engine: ``"torch"`` or ``"mindspore"``.

    Raises:
        ConfigError: If it can't.
    """
    if engine == "mindspore" and dtype != "float32":
        raise ConfigError(
            "MindSpore can be verified in float32 only: its convolutions know no larger type",
            got=dtype,
            fix="Leave out --dtype, or use --engine torch",
        )

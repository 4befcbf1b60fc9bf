"""Verifying a parallel run: it trains a few updates on ranks and on one device from the same state, and is compared.

Three sets of processes run one after the other, each in a folder of its own: the ranks, one device, and one device that
adds up in another order, which shows how much of a difference is rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convmesh.config import RunConfig
from convmesh.engines.contract import Arrays, Observation
from convmesh.errors import ConfigError
from convmesh.mesh import Mesh
from convmesh.plan import CHANNEL
from convmesh.plan.collectives import Expected, data_collectives, update_collectives
from convmesh.training.compare import Worst, by_kind, compare
from convmesh.training.launch import launch, plan_launch
from convmesh.training.planning import RunPlan
from convmesh.training.run_folder import RunFolder
from convmesh.training.verify_worker import Task, load_observation

_BYTES = {"float32": 4, "float64": 8}
_RANDOM = ("dropout", "opaque")


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
    saved_bytes: tuple[int, ...]
    one_device_saved_bytes: int


@dataclass(frozen=True)
class Verification:
    """The outcome.

    Args:
        worst: The worst tensor of each kind.
        collectives: Counted and expected, by axis and kind.
        memory: Per rank and on one device; ``saved`` is what one update keeps for the backward.
    """

    worst: tuple[Worst, ...]
    collectives: tuple[CollectiveCheck, ...]
    memory: Memory

    @property
    def passed(self) -> bool:
        """Whether everything is as near as is allowed, and communication as told."""
        return all(entry.passed for entry in self.worst) and all(entry.passed for entry in self.collectives)


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
    subject = dataclasses.replace(subject, run=_exact(subject.run))
    num_shards, num_ranks = subject.mesh.size("data"), subject.mesh.num_ranks
    task = Task(num_shards=num_shards, num_updates=subject.num_updates, dtype=subject.dtype)
    alone = dataclasses.replace(task, one_device=True)
    other = dataclasses.replace(alone, reordered=True, reverses=not _is_random(subject.plan))
    one = Mesh({"data": 1})
    ranks = _run(subject, task, root / "ranks", mesh=subject.mesh)
    (expected,) = _run(subject, alone, root / "one_device", mesh=one)
    (reordered,) = _run(subject, other, root / "reordered", mesh=one)
    places = [subject.mesh.coordinate(rank).get("data", 0) for rank in range(num_ranks)]
    num_forwards = subject.run.strategy.accumulation
    leaders = subject.mesh.groups("data")[0]
    worst = compare(
        by_kind(
            ranks[0],
            _outputs_of_ranks(ranks, places, num_forwards),
            losses=[sum(ranks[rank].losses[index] for rank in leaders) for index in range(subject.num_updates)],
        ),
        by_kind(expected, _outputs(expected, places, num_forwards), losses=expected.losses),
        by_kind(reordered, _outputs(reordered, places, num_forwards, flip=other.reverses), losses=reordered.losses),
        dtype=subject.dtype,
    )
    return Verification(worst, _check_collectives(subject, ranks[0]), _memory(ranks, expected))


def _run(subject: Subject, task: Task, path: Path, *, mesh: Mesh) -> list[Observation]:
    folder = RunFolder(path)
    try:
        folder.prepare(subject.run, resume=False)
        task.write(folder)
        plan = plan_launch(
            subject.run, folder=folder, mesh=mesh, device=subject.device, worker="convmesh.training.verify_worker"
        )
        launch(plan, folder=folder)
    finally:
        folder.release()
    return [load_observation(folder.root, rank=rank) for rank in range(mesh.num_ranks)]


def _exact(run: RunConfig) -> RunConfig:
    """The run without half types, whose rounding would hide everything else, and with full batches."""
    precision = dataclasses.replace(run.precision, compute="float32", gradient_reduction="float32")
    return dataclasses.replace(run, precision=precision)


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
        for axis, entries in _expected(subject, first).items()
        for entry in entries
    }
    return tuple(
        CollectiveCheck(*key, *counted.get(key, (0, 0)), *told.get(key, (0, 0))) for key in sorted({**told, **counted})
    )


def _expected(subject: Subject, first: Observation) -> Mapping[str, Sequence[Expected]]:
    num_shards = subject.mesh.size("data")
    strategy = subject.run.strategy
    found: dict[str, Sequence[Expected]] = {}
    if subject.run.engine == "mindspore":
        return _expected_of_mindspore(subject, first)
    slice_bytes = 0
    if strategy.optimizer_sharding:
        size = _BYTES[subject.dtype]
        slice_bytes = -(-sum(first.parameter_bytes) // size // num_shards) * size
    found["data"] = data_collectives(
        first.parameter_bytes,
        first.buffer_bytes,
        num_ranks=num_shards,
        bucket_bytes=strategy.bucket_bytes,
        shared_bytes=slice_bytes,
        broadcasts=subject.device == "cpu",
    )
    if subject.plan is not None:
        found[CHANNEL] = update_collectives(
            subject.plan.resolved,
            position=0,
            num_micro_batches=strategy.accumulation,
            element_bytes=_BYTES[subject.dtype],
            deterministic=subject.device == "cpu",
        )
    return found


def _expected_of_mindspore(subject: Subject, first: Observation) -> Mapping[str, Sequence[Expected]]:
    from convmesh.engines.mindspore import partition, shared_memory

    strategy = subject.run.strategy
    only_samples = subject.mesh.size("data") == subject.mesh.num_ranks
    found: dict[str, Sequence[Expected]] = {
        "data": partition.data_collectives(
            first.parameter_bytes,
            first.buffer_bytes,
            num_ranks=subject.mesh.size("data"),
            bucket_bytes=strategy.bucket_bytes,
            shares=strategy.optimizer_sharding,
            in_shared_memory=subject.device == "cpu" and only_samples and shared_memory.is_wanted(),
        )
    }
    if subject.plan is not None:
        found[CHANNEL] = update_collectives(
            subject.plan.resolved,
            position=0,
            num_micro_batches=strategy.accumulation,
            element_bytes=_BYTES[subject.dtype],
            deterministic=subject.device == "cpu",
            norm_bytes=partition.NORM_BYTES,
        )
    return found


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

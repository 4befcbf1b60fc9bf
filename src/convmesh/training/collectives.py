"""The collectives of one update of a run, told beforehand: what ``convmesh verify`` goes by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from convmesh.engines.contract import Observation
from convmesh.plan.collectives import (
    NORM_BYTES,
    SAMPLES_TOLD,
    Expected,
    data_collectives,
    together,
    update_collectives,
)

if TYPE_CHECKING:
    from convmesh.training.verification import Subject

_BYTES = {"float32": 4, "float64": 8}


def expected_collectives(subject: Subject, first: Observation) -> Mapping[str, Sequence[Expected]]:
    """The closed form of what one update communicates.

    Args:
        subject: What is verified.
        first: What was noted on rank 0, for the sizes of its parameters and buffers.

    Returns:
        By axis, one entry per kind of collective.
    """
    engine = subject.run.engine
    data, norm_bytes = _mindspore_data(subject, first) if engine == "mindspore" else _torch_data(subject, first)
    found: dict[str, Sequence[Expected]] = {"data": data}
    for resolved in subject.plan.resolved.split_axes if subject.plan is not None else ():
        told = update_collectives(
            resolved,
            position=0,
            num_micro_batches=subject.run.strategy.accumulation,
            element_bytes=_BYTES[subject.dtype],
            deterministic=subject.device == "cpu",
            norm_bytes=norm_bytes,
            samples=SAMPLES_TOLD[engine],
        )
        found[resolved.axis] = together(found.get(resolved.axis, ()), told)
    return found


def _torch_data(subject: Subject, first: Observation) -> tuple[Sequence[Expected], int]:
    """What is sent over the data axis where nothing is split along it, and the bytes of the norm."""
    strategy, num_shards = subject.run.strategy, subject.mesh.size("data")
    slice_bytes = 0
    if strategy.optimizer_sharding and first.parameter_bytes:
        size = _BYTES[subject.dtype]
        slice_bytes = -(-sum(first.parameter_bytes) // size // num_shards) * size
    found = data_collectives(
        first.parameter_bytes,
        first.buffer_bytes,
        num_ranks=num_shards,
        bucket_bytes=strategy.bucket_bytes,
        shared_bytes=slice_bytes,
        broadcasts=subject.device == "cpu",
    )
    return found, NORM_BYTES


def _mindspore_data(subject: Subject, first: Observation) -> tuple[Sequence[Expected], int]:
    from convmesh.engines import shared_exchange
    from convmesh.engines.mindspore import partition

    strategy, num_shards = subject.run.strategy, subject.mesh.size("data")
    only_samples = num_shards == subject.mesh.num_ranks
    found = partition.data_collectives(
        first.parameter_bytes,
        first.buffer_bytes,
        num_ranks=num_shards,
        bucket_bytes=strategy.bucket_bytes,
        shares=strategy.optimizer_sharding,
        in_shared_memory=subject.device == "cpu" and only_samples and shared_exchange.is_wanted(),
    )
    return found, partition.NORM_BYTES

"""The collectives of one update of a run, told beforehand: what ``convmesh check`` and ``convmesh verify`` go by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from convmesh.config import RunConfig
from convmesh.engines.contract import Observation
from convmesh.mesh import Mesh
from convmesh.plan.collectives import SAMPLES_TOLD, Expected, data_collectives, together, update_collectives
from convmesh.training.planning import RunPlan

_BYTES = {"float32": 4, "float64": 8}


class Subject(Protocol):
    """A run on its mesh; `convmesh.training.verification.Subject` is one."""

    @property
    def run(self) -> RunConfig:
        """The run."""

    @property
    def mesh(self) -> Mesh:
        """Its mesh."""

    @property
    def device(self) -> str:
        """Its device, resolved."""

    @property
    def plan(self) -> RunPlan | None:
        """How its network is split, or None."""

    @property
    def dtype(self) -> str:
        """``"float32"`` or ``"float64"``."""


def expected_collectives(subject: Subject, first: Observation) -> Mapping[str, Sequence[Expected]]:
    """The closed form of what one update communicates.

    Args:
        subject: What is verified.
        first: What was noted on rank 0, for the sizes of its parameters and buffers.

    Returns:
        By axis, one entry per kind of collective.
    """
    num_shards = subject.mesh.size("data")
    strategy = subject.run.strategy
    found: dict[str, Sequence[Expected]] = {}
    if subject.run.engine == "mindspore":
        return _expected_of_mindspore(subject, first)
    slice_bytes = 0
    if strategy.optimizer_sharding and first.parameter_bytes:
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
    for resolved in subject.plan.resolved.split_axes if subject.plan is not None else ():
        told = update_collectives(
            resolved,
            position=0,
            num_micro_batches=strategy.accumulation,
            element_bytes=_BYTES[subject.dtype],
            deterministic=subject.device == "cpu",
        )
        found[resolved.axis] = together(found.get(resolved.axis, ()), told)
    return found


def _expected_of_mindspore(subject: Subject, first: Observation) -> Mapping[str, Sequence[Expected]]:
    from convmesh.engines import shared_exchange
    from convmesh.engines.mindspore import partition

    strategy = subject.run.strategy
    only_samples = subject.mesh.size("data") == subject.mesh.num_ranks
    found: dict[str, Sequence[Expected]] = {
        "data": partition.data_collectives(
            first.parameter_bytes,
            first.buffer_bytes,
            num_ranks=subject.mesh.size("data"),
            bucket_bytes=strategy.bucket_bytes,
            shares=strategy.optimizer_sharding,
            in_shared_memory=subject.device == "cpu" and only_samples and shared_exchange.is_wanted(),
        )
    }
    for resolved in subject.plan.resolved.split_axes if subject.plan is not None else ():
        told = update_collectives(
            resolved,
            position=0,
            num_micro_batches=strategy.accumulation,
            element_bytes=_BYTES[subject.dtype],
            deterministic=subject.device == "cpu",
            norm_bytes=partition.NORM_BYTES,
            samples=SAMPLES_TOLD[subject.run.engine],
        )
        found[resolved.axis] = together(found.get(resolved.axis, ()), told)
    return found

"""What is predicted: a plan to judge, and what it would cost in seconds and in memory, with where figures come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from convmesh.config import RunConfig
from convmesh.plan import Execution, ResolvedPlan
from convmesh.planner.signature import Signature

MIB = 2**20

Origin = Literal["measured", "curve", "nothing"]
"""Where seconds of an operator come from: exactly measured, read from a curve, or it costs nothing."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What all candidates of a run have in common.

    Args:
        engine: ``"torch"`` or ``"mindspore"``: each does some things in its own way.
        global_batch: Samples per update.
        compute_dtype: Type of convolutions and dense layers.
        reduction_dtype: Type in which gradients travel over the data axis.
        optimizer: ``"sgd"`` or ``"adamw"``.
        num_slots: Tensors of optimizer state per parameter.
        averages_weights: Whether a moving average of the weights is kept.
        prefetches: Whether data is prepared by workers of its own while the rank computes.
    """

    engine: Literal["torch", "mindspore"] = "torch"
    global_batch: int
    compute_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    reduction_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    num_slots: int = 1
    averages_weights: bool = False
    prefetches: bool = False

    @classmethod
    def of(cls, run: RunConfig) -> Training:
        """What a run file says of it."""
        is_sgd = run.optimizer.name == "sgd"
        return cls(
            engine=run.engine,
            global_batch=run.train.global_batch,
            compute_dtype=run.precision.compute,
            reduction_dtype=run.precision.gradient_reduction,
            optimizer=run.optimizer.name,
            num_slots=int(run.optimizer.momentum > 0) if is_sgd else 2,
            averages_weights=run.train.weight_average > 0,
            prefetches=run.data.num_workers > 0,
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan in full: everything that decides what it costs.

    Args:
        resolved: The plan applied to the network's graph, with the blocks that it recomputes; the graph may have any
            number of samples.
        training: What it trains.
        accumulation: Micro-batches per update.
        optimizer_sharding: Whether each rank of the data axis keeps its part of the optimizer's state only.
        bucket_bytes: Gradients are reduced in buckets of about this size.
    """

    resolved: ResolvedPlan
    training: Training
    accumulation: int = 1
    optimizer_sharding: bool = False
    bucket_bytes: int = 25 * MIB

    @property
    def num_shards(self) -> int:
        """Ranks that the samples of a global batch are dealt to."""
        return self.resolved.plan.mesh.size("data")

    @classmethod
    def of(cls, resolved: ResolvedPlan, run: RunConfig) -> Candidate:
        """The plan of a run: what its plan file says about running an update, and else what its run file says."""
        said = resolved.plan.execution.over(
            Execution(
                accumulation=run.strategy.accumulation,
                optimizer_sharding=run.strategy.optimizer_sharding,
                bucket_bytes=run.strategy.bucket_bytes,
            )
        )
        return cls(
            resolved=resolved,
            training=Training.of(run),
            accumulation=said.accumulation or 1,
            optimizer_sharding=bool(said.optimizer_sharding),
            bucket_bytes=said.bucket_bytes or 25 * MIB,
        )

    @property
    def recompute(self) -> tuple[str, ...]:
        """Names of the blocks whose activations are computed again in the backward."""
        return tuple(block.name for block in self.resolved.recomputed)

    @property
    def micro_batch(self) -> int:
        """Samples of the largest micro-batch of a rank."""
        return math.ceil(self.training.global_batch / (self.num_shards * self.accumulation))


@dataclass(frozen=True, kw_only=True)
class OperatorCost:
    """What one operator costs a rank per micro-batch.

    Args:
        node: Its name.
        signature: What it computes; None for inputs and parameters.
        forward_seconds: Of its forward.
        backward_seconds: Of its backward.
        communication_seconds: Of the changes of placement at its border, forward and backward, over the channel axis.
        exchange_seconds: The same over the data axis, where ranks exchange samples for channels.
        origin: Where its seconds come from.
        recomputed: Whether its forward runs again before the backward.
        kept_bytes: What it adds to what is kept from the forward to the backward.
    """

    node: str
    signature: Signature | None
    forward_seconds: float
    backward_seconds: float
    communication_seconds: float
    origin: Origin
    exchange_seconds: float = 0.0
    recomputed: bool = False
    kept_bytes: int = 0

    @property
    def seconds(self) -> float:
        """All of it together."""
        again = self.forward_seconds if self.recomputed else 0.0
        talking = self.communication_seconds + self.exchange_seconds
        return self.forward_seconds + self.backward_seconds + again + talking


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one update of the slowest rank, by kind; they add up to ``total``.

    Args:
        forward: Operators, forward.
        backward: Operators, backward.
        recomputation: Forwards that run again before the backward.
        exposed: Communication that the rank waits for, by axis.
        optimizer: Judging and applying gradients.
        overhead: What an update and its micro-batches cost beside all that.
        data: What the rank waits for data.
        hidden: Communication that runs while the rank computes, by axis; no part of the total.
    """

    forward: float = 0.0
    backward: float = 0.0
    recomputation: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    optimizer: float = 0.0
    overhead: float = 0.0
    data: float = 0.0
    hidden: Mapping[str, float] = field(default_factory=dict)

    @property
    def communication(self) -> float:
        """Communication that the rank waits for, over all axes."""
        return sum(self.exposed.values())

    @property
    def total(self) -> float:
        """Of one update, which is one global batch."""
        computing = self.forward + self.backward + self.recomputation
        return computing + self.communication + self.optimizer + self.overhead + self.data


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank at the moment of an update at which it holds most; they add up to ``total``.

    Args:
        fixed: The engine itself, and what it holds for each operator.
        parameters: Parameters and buffers.
        gradients: Gradients, and the buckets in which they travel.
        optimizer: Optimizer state, and a moving average of the weights.
        activations: What forwards keep for backwards.
        passing: Tensors that operators just take and make, among them gathered ones and gradients of activations.
        workspace: Scratch memory of the operator at that moment.
        spare: What the allocator holds beyond all that.
        moment: Which moment that is, in words.
    """

    fixed: int = 0
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    passing: int = 0
    workspace: int = 0
    spare: int = 0
    moment: str = ""

    @property
    def parts(self) -> dict[str, int]:
        """Kind to bytes, in order."""
        return {name: value for name, value in vars(self).items() if name != "moment"}

    @property
    def total(self) -> int:
        """All of it together."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a candidate would cost.

    Args:
        candidate: The plan.
        seconds: Of one update, by kind.
        memory: Of the rank that needs most.
        operators: What each operator costs the slowest rank, per micro-batch, in order.
        origins: Each kind of figure to where it comes from, in words.
    """

    candidate: Candidate
    seconds: Seconds
    memory: MemoryUse
    operators: tuple[OperatorCost, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """Samples of the global batch per second."""
        return self.candidate.training.global_batch / self.seconds.total if self.seconds.total else math.inf

    @property
    def communication_share(self) -> float:
        """Share of an update that the rank waits for communication."""
        return self.seconds.communication / self.seconds.total if self.seconds.total else 0.0

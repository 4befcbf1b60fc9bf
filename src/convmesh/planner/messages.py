"""What a rank sends besides its activations in one update: gradients, buffers, shared parameters, the norm.

The same collectives as the closed forms of `convmesh.plan.collectives` and `convmesh.engines.mindspore.partition`
count, one by one, with the way that each takes and when it may start.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from convmesh.graph import Parameter
from convmesh.graph.graph import BUFFERS, DTYPE_BYTES
from convmesh.plan import CHANNEL
from convmesh.plan.buckets import fill_buckets, pack_buckets
from convmesh.plan.collectives import NORM_BYTES
from convmesh.plan.plan import DATA
from convmesh.planner.cluster import Cluster, Way
from convmesh.planner.links import activations_way
from convmesh.planner.prediction import Candidate


@dataclass(frozen=True, kw_only=True)
class Message:
    """One collective of an update.

    Args:
        axis: Over which axis.
        kind: As `convmesh.plan.collectives` names it.
        num_bytes: Of its input on one rank.
        purpose: ``"gradients"``, ``"buffers"``, ``"parameters"`` or ``"norm"``.
        way: How it travels.
        carries: Names of the parameters whose gradients it carries, if it may start as soon as they are there.
    """

    axis: str
    kind: str
    num_bytes: int
    purpose: str
    way: Way = "collective"
    carries: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalParameters:
    """A rank's parameters and buffers.

    Args:
        trainable: Name and bytes of each trainable parameter, in order.
        frozen_bytes: Of the other parameters.
        buffer_bytes: Of the buffers.
        element_bytes: Of one element.
        exchanged: Names of those that are split along the data axis, over which their gradients are not summed.
    """

    trainable: tuple[tuple[str, int], ...]
    frozen_bytes: int
    buffer_bytes: int
    element_bytes: int = 4
    exchanged: frozenset[str] = frozenset()

    @property
    def trainable_bytes(self) -> int:
        """Of all trainable parameters together; their gradients have as many."""
        return sum(size for _, size in self.trainable)

    @property
    def reduced(self) -> tuple[tuple[str, int], ...]:
        """Those whose gradients are summed over the data axis, in order."""
        return tuple(entry for entry in self.trainable if entry[0] not in self.exchanged)

    @property
    def reduced_bytes(self) -> int:
        """Of these together."""
        return sum(size for _, size in self.reduced)


def local_parameters(candidate: Candidate, *, position: int = 0) -> LocalParameters:
    """The parameters that a rank holds.

    Args:
        candidate: The plan.
        position: Of the rank on the channel axis.

    Returns:
        Their bytes; parameters keep the type of the traced network, whatever convolutions compute in.
    """
    resolved, width = candidate.resolved, _width(candidate)
    exchanged = {} if resolved.region is None else resolved.region.parameters
    places = {name: (shard, position) for name, shard in resolved.parameters.items()}
    places |= {name: (shard, resolved.data_position) for name, shard in exchanged.items()}

    def num_bytes(entry: Parameter) -> int:
        if entry.name not in places:
            return entry.num_elements * width
        shard, place = places[entry.name]
        return shard.num_elements(entry.shape, position=place) * width

    trained = [entry for entry in resolved.graph.parameters if entry.role not in BUFFERS and entry.trainable]
    frozen = [entry for entry in resolved.graph.parameters if entry.role not in BUFFERS and not entry.trainable]
    buffers = [entry for entry in resolved.graph.parameters if entry.role in BUFFERS]
    return LocalParameters(
        trainable=tuple((entry.name, num_bytes(entry)) for entry in trained),
        frozen_bytes=sum(map(num_bytes, frozen)),
        buffer_bytes=sum(map(num_bytes, buffers)),
        element_bytes=width,
        exchanged=frozenset(exchanged),
    )


def update_messages(candidate: Candidate, cluster: Cluster, own: LocalParameters) -> tuple[Message, ...]:
    """The collectives of one update beside those of activations, in the order in which they are sent.

    Args:
        candidate: The plan.
        cluster: Says which collectives the device has, and whether the ranks share memory.
        own: Parameters of the rank.

    Returns:
        The messages; none on one rank.
    """
    found: list[Message] = []
    if candidate.num_shards > 1:
        build = _torch_messages if candidate.training.engine == "torch" else _mindspore_messages
        found += build(candidate, cluster, own)
    if candidate.resolved.num_ranks > 1:
        found += _channel_messages(candidate, cluster, own)
    if candidate.resolved.region is not None:
        found.append(_norm_message(candidate, DATA))
    return tuple(found)


def sums_in_shared_memory(candidate: Candidate, cluster: Cluster) -> bool:
    """Whether MindSpore's ranks add up in shared memory: float32 on the CPU of one machine, on the data axis alone."""
    mesh, training = candidate.resolved.plan.mesh, candidate.training
    alone = mesh.size("data") == mesh.num_ranks <= cluster.devices_per_node
    return (
        training.engine == "mindspore"
        and cluster.device.kind == "cpu"
        and alone
        and training.reduction_dtype == "float32"
    )


def way_of(candidate: Candidate, cluster: Cluster, *, axis: str, kind: str) -> Way:
    """How what a run sends over an axis travels: gradients over the data axis, activations over the others.

    Args:
        candidate: The run.
        cluster: The devices.
        axis: Mesh axis.
        kind: As `convmesh.plan.collectives` names it.

    Returns:
        The way.
    """
    if axis != DATA:
        return activations_way(cluster, kind)
    return "shared_memory" if sums_in_shared_memory(candidate, cluster) else "collective"


def slice_bytes(own: LocalParameters, num_shards: int) -> int:
    """Bytes of one rank's even part of all trainable parameters that the ranks of the data axis have alike."""
    num_elements = own.reduced_bytes // own.element_bytes
    return math.ceil(num_elements / num_shards) * own.element_bytes


def updated_bytes(own: LocalParameters, num_shards: int) -> int:
    """Bytes of the parameters that a rank updates: its even part, and what it alone has of the data axis."""
    return slice_bytes(own, num_shards) + own.trainable_bytes - own.reduced_bytes


def _torch_messages(candidate: Candidate, cluster: Cluster, own: LocalParameters) -> Iterator[Message]:
    sizes = [size for _, size in own.reduced]
    buckets = fill_buckets(sizes, candidate.bucket_bytes)
    share = DTYPE_BYTES[candidate.training.reduction_dtype] / own.element_bytes
    yield from _buckets(own, buckets, share if own.element_bytes == 4 else 1.0)
    # By which DDP agrees on the parameters in use.
    yield Message(axis="data", kind="all-reduce", num_bytes=4 * len(sizes), purpose="gradients")
    if candidate.optimizer_sharding:
        part = slice_bytes(own, candidate.num_shards)
        gathers = cluster.device.kind != "cpu"
        for _ in range(1 if gathers else candidate.num_shards):
            kind = "all-gather" if gathers else "broadcast"
            yield Message(axis="data", kind=kind, num_bytes=part, purpose="parameters")
    if own.buffer_bytes:
        yield Message(axis="data", kind="all-reduce", num_bytes=own.buffer_bytes, purpose="buffers")


def _mindspore_messages(candidate: Candidate, cluster: Cluster, own: LocalParameters) -> Iterator[Message]:
    shared = sums_in_shared_memory(candidate, cluster)
    way = way_of(candidate, cluster, axis=DATA, kind="all-reduce")
    width = DTYPE_BYTES[candidate.training.reduction_dtype]
    sizes = [size * width // 4 for _, size in own.reduced]
    buckets = (0,) * len(sizes) if shared else pack_buckets(sizes, candidate.bucket_bytes)
    yield from _buckets(own, buckets, width / 4, way=way)
    if candidate.optimizer_sharding:
        for message in _buckets(own, buckets, 1.0, way=way):
            yield Message(axis="data", kind="all-reduce", num_bytes=message.num_bytes, purpose="parameters", way=way)
    # To MindSpore a parameter that is not trained is a buffer too.
    if buffer_bytes := own.buffer_bytes + own.frozen_bytes:
        yield Message(axis="data", kind="all-reduce", num_bytes=buffer_bytes, purpose="buffers", way=way)


def _buckets(
    own: LocalParameters, buckets: Sequence[int], share: float, *, way: Way = "collective"
) -> Iterator[Message]:
    members = [
        [entry for entry, _ in group]
        for _, group in itertools.groupby(zip(own.reduced, buckets, strict=True), key=lambda pair: pair[1])
    ]
    for group in reversed(members):
        yield Message(
            axis="data",
            kind="all-reduce",
            num_bytes=round(share * sum(size for _, size in group)),
            purpose="gradients",
            way=way,
            carries=tuple(name for name, _ in group),
        )


def _channel_messages(candidate: Candidate, cluster: Cluster, own: LocalParameters) -> Iterator[Message]:
    resolved = candidate.resolved
    deterministic = cluster.device.kind == "cpu"
    if resolved.num_whole_trainable and resolved.replicas_may_differ(deterministic=deterministic):
        num_bytes = own.element_bytes * resolved.num_whole_trainable
        yield Message(axis=CHANNEL, kind="broadcast", num_bytes=num_bytes, purpose="gradients")
    yield _norm_message(candidate, CHANNEL)


def _norm_message(candidate: Candidate, axis: str) -> Message:
    """By which the ranks of an axis agree on overflow and the gradient's norm."""
    num_bytes = NORM_BYTES if candidate.training.engine == "torch" else NORM_BYTES // 2
    way: Way = "shared_memory" if candidate.training.engine == "torch" else "collective"
    return Message(axis=axis, kind="all-reduce", num_bytes=num_bytes, purpose="norm", way=way)


def _width(candidate: Candidate) -> int:
    return next((node.element_bytes for node in candidate.resolved.graph.inputs), 4)

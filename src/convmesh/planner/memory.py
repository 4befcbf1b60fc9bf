"""Memory: what one rank holds along an update, moment by moment; the largest moment counts.

The walk goes through one forward and its backward, operator by operator, then the update of the parameters:

| kind | what is counted |
|---|---|
| fixed | the engine before there is a network, and what it holds for each operator (from the cluster) |
| parameters | parameters, in float32; buffers twice, since a skipped update brings them back; half copies of weights |
| gradients | PyTorch with a data axis: all buckets, all the time; and, accumulating, what is not in them yet. On one |
| | rank, and on MindSpore: as the backward makes them; accumulating, all the time. MindSpore's sums besides: |
| | in shared memory own gradients and this rank's part of the others', else a copy of all. On the CPU its graphs |
| | also hold the gradients that they were given in the update before, until they are given the next |
| optimizer | state per parameter, or per own part of all; a moving average of the weights |
| activations | what forwards keep (`convmesh.plan.activations`), up to the operator; again within a recomputed block |
| passing | what an operator takes and makes and nobody keeps; gradients of activations until they are used; |
| | gathered tensors, and what collectives need to take tensors apart and put them together |
| workspace | a share of a convolution's or dense layer's tensors (from the cluster); with MindSpore on the CPU what |
| | all convolutions keep: `convmesh.planner.scratch` |
| spare | shares of these that engine and allocator hold besides (from the cluster) |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from convmesh.graph import Activations, Edge, Node
from convmesh.graph.graph import DTYPE_BYTES
from convmesh.plan import ResolvedPlan
from convmesh.plan.weighted import WEIGHTED
from convmesh.planner.cluster import Cluster
from convmesh.planner.messages import LocalParameters, sums_in_shared_memory, updated_bytes
from convmesh.planner.prediction import Candidate, MemoryUse
from convmesh.planner.scratch import scratch_bytes
from convmesh.planner.signature import FREE, Signature

# Copies of the whole tensor that a change needs at the operator's border, beside its input and its result.
_EXCHANGES = {"to_channels": 2, "to_samples": 2}
_BEFORE_FORWARD = {
    "gather_sum": 2, "gather": 2, "permute": 2, "slice": 0, "copy": 0, "gather_samples": 2, **_EXCHANGES
}  # fmt: skip
_BEFORE_BACKWARD = {
    "gather_sum": 2, "gather": 0, "permute": 2, "slice": 2, "copy": 1, "gather_samples": 2, **_EXCHANGES
}  # fmt: skip
_AFTER = {
    "reduce_scatter": 2, "all_reduce": 1, "gather": 1, "permute": 2, "slice": 0, "scatter_samples": 2, **_EXCHANGES
}  # fmt: skip

SLOTS_BYTES = 2 * 2**21
"""Of one rank in the memory through which channels are exchanged: `convmesh.engines.shared_exchange`."""


@dataclass(frozen=True)
class _Moment:
    """What changes from one moment to another."""

    activations: int = 0
    passing: int = 0
    workspace: int = 0
    gradients: int = 0
    words: str = ""

    @property
    def total(self) -> int:
        return self.activations + self.passing + self.workspace + self.gradients


def memory_use(
    candidate: Candidate,
    cluster: Cluster,
    *,
    own: LocalParameters,
    signatures: Mapping[str, Signature | None],
    activations: Activations,
) -> MemoryUse:
    """The most that a rank holds.

    Args:
        candidate: The plan, its graph that of one micro-batch, in the types in which it computes.
        cluster: What the engine and allocator hold besides.
        own: Parameters of the rank.
        signatures: Operator to its signature on the rank.
        activations: What each operator of the rank keeps.

    Returns:
        Bytes by kind at the largest moment.
    """
    resolved, device = candidate.resolved, cluster.device
    holding = _Holding(candidate, cluster, own)
    walk = _Walk(resolved, signatures, activations, share=device.workspace_share)
    grows = not holding.all_gradients_at_once
    scratch = scratch_bytes(signatures.values(), num_threads=device.num_threads) if holding.on_mindspore_cpu else 0
    peak = max((*walk.moments(own.trainable if grows else ()), holding.updating()), key=lambda moment: moment.total)
    parameters, optimizer = holding.parameters(), holding.optimizer()
    gradients = holding.lasting_gradients() + peak.gradients
    spare = device.spare_share * (peak.activations + peak.passing + peak.workspace)
    spare += device.parameter_share * (parameters + optimizer + gradients)
    return MemoryUse(
        fixed=device.fixed_bytes + device.bytes_per_operator * len(resolved.graph) + _exchange_bytes(resolved, cluster),
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=peak.activations,
        passing=peak.passing,
        workspace=peak.workspace + scratch,
        spare=math.ceil(spare),
        moment=peak.words,
    )


def _exchange_bytes(resolved: ResolvedPlan, cluster: Cluster) -> int:
    """Of the memory through which ranks of one machine exchange channels."""
    num_ranks = resolved.num_ranks
    shares = cluster.device.kind == "cpu" and 1 < num_ranks <= cluster.devices_per_node
    return SLOTS_BYTES * num_ranks if shares else 0


def lasting_bytes(candidate: Candidate, cluster: Cluster, own: LocalParameters) -> int:
    """What a rank holds from one update to the next: parameters, optimizer state, gradients as far as they last.

    Args:
        candidate: The plan.
        cluster: Says how ranks add up.
        own: Parameters of the rank.

    Returns:
        The bytes, which no moment undercuts.
    """
    holding = _Holding(candidate, cluster, own)
    return holding.parameters() + holding.optimizer() + holding.lasting_gradients()


class _Holding:
    """What a rank holds whatever operator runs."""

    def __init__(self, candidate: Candidate, cluster: Cluster, own: LocalParameters) -> None:
        self._candidate = candidate
        self._own = own
        self._gradients = own.trainable_bytes
        self._is_torch = candidate.training.engine == "torch"
        self._shared = candidate.num_shards > 1 and sums_in_shared_memory(candidate, cluster)
        self._accumulates = candidate.accumulation > 1
        self.on_mindspore_cpu = not self._is_torch and cluster.device.kind == "cpu"

    @property
    def all_gradients_at_once(self) -> bool:
        """Whether there is memory for all gradients before the backward makes them."""
        if self.on_mindspore_cpu:
            return False  # Those of a micro-batch are added to the sums when the graph is through.
        return self._accumulates or (self._is_torch and self._candidate.num_shards > 1)

    def parameters(self) -> int:
        own = self._own
        halves = DTYPE_BYTES[self._candidate.training.compute_dtype] < own.element_bytes
        copies = own.trainable_bytes * DTYPE_BYTES[self._candidate.training.compute_dtype] // own.element_bytes
        return own.trainable_bytes + own.frozen_bytes + 2 * own.buffer_bytes + (copies if halves else 0)

    def optimizer(self) -> int:
        candidate, own = self._candidate, self._own
        shards = candidate.num_shards if candidate.optimizer_sharding else 1
        state = candidate.training.num_slots * updated_bytes(own, shards)
        averages = own.trainable_bytes + own.buffer_bytes if candidate.training.averages_weights else 0
        return state + averages

    def lasting_gradients(self) -> int:
        """From one update to the next."""
        candidate, gradients = self._candidate, self._gradients
        reduces = candidate.num_shards > 1
        if self._is_torch:
            half = DTYPE_BYTES[candidate.training.reduction_dtype] < self._own.element_bytes
            sent = min(candidate.bucket_bytes, gradients) // 2 if reduces and half else 0
            return gradients * (int(reduces) + int(self._accumulates)) + sent
        sums = gradients * int(self._accumulates)
        if self._shared:
            # Own gradients, and this rank's part of all the others'.
            sums += gradients + gradients * (candidate.num_shards - 1) // candidate.num_shards
        elif self.on_mindspore_cpu:
            # By the graph that sums them over the data axis, and by those of the optimizer.
            sums += gradients * (1 + int(reduces))
        return sums

    def updating(self) -> _Moment:
        """After the last backward: what the update itself needs of gradients beyond what lasts."""
        if self._is_torch:
            return _Moment(gradients=0 if self.all_gradients_at_once else self._gradients, words="update")
        copies = 1 + (self._candidate.num_shards > 1 and not self.on_mindspore_cpu)
        return _Moment(gradients=copies * self._gradients, words="update")


class _Walk:
    """One forward and its backward."""

    def __init__(
        self,
        resolved: ResolvedPlan,
        signatures: Mapping[str, Signature | None],
        activations: Activations,
        *,
        share: float,
    ) -> None:
        self._resolved = resolved
        self._graph = resolved.graph
        self._signatures = signatures
        self._activations = activations
        self._share = share
        self._block_of = {name: block.name for block in resolved.recomputed for name in block.nodes}

    def moments(self, growing: Sequence[tuple[str, int]]) -> Iterator[_Moment]:
        """All moments, in order.

        Args:
            growing: Name and bytes of the gradients that the backward makes memory for.
        """
        kept = 0
        for node in self._graph:
            kept += self._activations.kept[node.name]
            yield _Moment(
                activations=kept,
                passing=self._passing_forward(node),
                workspace=self._workspace(node),
                words=f"forward of {node.name}",
            )
        yield from self._backward(kept, dict(growing))

    def _backward(self, kept: int, sizes: dict[str, int]) -> Iterator[_Moment]:
        again, block, gradients = 0, None, 0
        flowing = _Flowing((edge, self._bytes_of(edge)) for edge in self._graph.outputs)
        for node in reversed(self._graph.nodes):
            if node.name not in self._graph.needs_gradient:
                kept -= self._activations.kept[node.name]
                continue
            if self._block_of.get(node.name) != block:
                block = self._block_of.get(node.name)
                again = self._again(block) if block is not None else 0
            gradients += sum(sizes.pop(entry.name, 0) for entry in node.parameters)
            yield _Moment(
                activations=kept + again,
                passing=flowing.through(node, self._gradients_in(node)) + self._changes(node, backward=True),
                workspace=self._workspace(node),
                gradients=gradients,
                words=f"backward of {node.name}",
            )
            flowing.settle(node)
            kept -= self._activations.kept[node.name]
            again -= self._activations.again[node.name]

    def _again(self, block: str) -> int:
        return sum(self._activations.again[name] for name, other in self._block_of.items() if other == block)

    def _passing_forward(self, node: Node) -> int:
        signature = self._signatures[node.name]
        if signature is None or node.kind in FREE:
            return 0
        made, taken = signature.made_bytes, signature.taken_bytes
        # In a block that is recomputed nobody keeps anything; elsewhere an activation keeps what it makes, and what
        # others take is kept but for sums.
        if node.name in self._block_of or node.kind in ("add", "multiply", "concat"):
            passing = made + sum(taken)
        else:
            passing = taken[0] if node.kind in ("elementwise", "softmax") else made
        return passing + self._changes(node, backward=False)

    def _gradients_in(self, node: Node) -> dict[Edge, int]:
        """The gradients of its inputs that an operator makes; 0 bytes where it hands on the one that it got."""
        signature = self._signatures[node.name]
        if signature is None:
            return {}
        found = {}
        for edge, size, wanted, shape in zip(
            node.inputs, signature.taken_bytes, signature.gradients, signature.input_shapes, strict=True
        ):
            if wanted:
                hands_on = node.kind in FREE or (node.kind == "add" and shape == signature.output_shapes[0])
                found[edge] = 0 if hands_on else size
        return found

    def _changes(self, node: Node, *, backward: bool) -> int:
        signature = self._signatures[node.name]
        if signature is None:
            return 0
        table = _BEFORE_BACKWARD if backward else _BEFORE_FORWARD
        return max(
            max(
                table[entry.before.kind] * signature.taken_bytes[0] if entry.before.kind != "none" else 0,
                _AFTER.get(entry.after.kind, 0) * signature.made_bytes,
            )
            for entry in self._resolved.entries(node.name)
        )

    def _workspace(self, node: Node) -> int:
        signature = self._signatures[node.name]
        if signature is None or node.kind not in WEIGHTED or not self._share:
            return 0
        tensors = signature.made_bytes + sum(signature.taken_bytes) + signature.weight_bytes
        return int(self._share * tensors)

    def _bytes_of(self, edge: Edge) -> int:
        signature = self._signatures[edge.node]
        if signature is None:
            return 0
        return math.prod(signature.output_shapes[edge.output]) * DTYPE_BYTES[signature.dtype]


class _Flowing:
    """Gradients of activations that were made and are not used up: each memory once, however many tensors share it."""

    def __init__(self, outputs: Iterable[tuple[Edge, int]]) -> None:
        self._memories: dict[Edge, int] = {}
        self._sizes: dict[int, int] = {}
        self._users: dict[int, int] = {}
        self._next = 0
        self._total = 0
        for edge, size in outputs:
            self._put(edge, size)

    def through(self, node: Node, made: Mapping[Edge, int]) -> int:
        """Bytes while an operator makes the gradients of its inputs from that of its output."""
        own = self._memories.get(Edge(node.name))
        before = self._total
        for edge, size in made.items():
            if size:
                self._drop(edge)
                self._put(edge, size)
            elif own is not None and edge not in self._memories:
                self._memories[edge] = own
                self._users[own] += 1
        return before + sum(made.values())

    def settle(self, node: Node) -> None:
        """Forgets the gradients of an operator's outputs."""
        for output in range(len(node.output_shapes)):
            self._drop(Edge(node.name, output))

    def _put(self, edge: Edge, size: int) -> None:
        self._next += 1
        self._memories[edge] = self._next
        self._sizes[self._next] = size
        self._total += size
        self._users[self._next] = 1

    def _drop(self, edge: Edge) -> None:
        memory = self._memories.pop(edge, None)
        if memory is None:
            return
        self._users[memory] -= 1
        if not self._users[memory]:
            self._total -= self._sizes.pop(memory)
            del self._users[memory]

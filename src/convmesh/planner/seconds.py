"""Seconds: of one operator, of one collective, and of a whole update.

| kind | how it is found |
|---|---|
| an operator, forward and backward | measured at exactly its shapes, else on the curve of its class (`curves`) |
| gradients of a tensor with several users | added up: two reads and a write for each user beyond the first |
| the channel axis, exchanges | the closed form (`convmesh.plan.collectives`) at alpha-beta (`links`); waited for |
| gradient reduction | bucket by bucket as it gets ready; PyTorch hides ``overlap`` of what could be hidden |
| the rest of the data axis | buffers, parameters of a sharded optimizer, at alpha-beta; waited for |
| optimizer | its curve over the bytes of the parameters that the rank updates, and one pass over gradients |
| data | per sample; a floor where workers prepare it, else added |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from convmesh.graph import Edge, Node
from convmesh.graph.graph import SOURCES
from convmesh.plan import CHANNEL, ResolvedPlan
from convmesh.plan.collectives import SAMPLES_TOLD, SamplesTold, operator_collectives
from convmesh.plan.plan import DATA
from convmesh.planner.cluster import Cluster, Direction
from convmesh.planner.curves import Curves, Floats
from convmesh.planner.links import CollectiveSeconds, GroupShape, group_shape
from convmesh.planner.messages import LocalParameters, Message
from convmesh.planner.prediction import Candidate, OperatorCost, Origin, Training
from convmesh.planner.signature import Piece, Signature, signature_of

INPUT_BYTES_PER_ELEMENT = 13
"""Memory traffic of making a pixel the network's input: read a byte, write and read a float, write the scaled one."""

PASSES = {"sgd": 3, "momentum": 5, "adamw": 7}
"""Reads and writes of each parameter's bytes in an update: parameter, gradient and each tensor of state."""

_WORDS = {"measured": "measured at exactly these shapes", "nothing": "computes nothing"}


@dataclass(frozen=True)
class Work:
    """Seconds of one operator.

    Args:
        forward_seconds: Of one forward.
        backward_seconds: Of one backward.
        origin: Where they come from.
    """

    forward_seconds: float
    backward_seconds: float
    origin: Origin


NOTHING = Work(0.0, 0.0, "nothing")
"""No work."""


def moving_piece(num_bytes: int, *, dtype: str = "float32", times: int = 1) -> Piece:
    """The work of passing so many bytes through memory."""
    return Piece("elementwise", dtype, "forward", num_bytes=num_bytes, times=times)


class CostModel:
    """What things cost on a cluster. Making one takes well below a millisecond; it remembers what it was asked.

    Args:
        cluster: The cluster.

    Attributes:
        cluster: The cluster.
        collectives: Seconds of collectives.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.collectives = CollectiveSeconds(cluster)
        self._curves = Curves(cluster)
        self._measured = {entry.signature: entry for entry in cluster.measured}
        self._work: dict[Signature, Work] = {}

    def work(self, signature: Signature) -> Work:
        """Seconds of one operator at its local shapes."""
        found = self._work.get(signature)
        if found is None:
            found = self._work[signature] = self._look_up(signature)
        return found

    def group(self, resolved: ResolvedPlan, axis: str) -> GroupShape:
        """Where the groups of an axis are."""
        return group_shape(resolved.plan.mesh, axis, devices_per_node=self.cluster.devices_per_node)

    def operators(
        self,
        resolved: ResolvedPlan,
        nodes: Iterable[Node] | None = None,
        *,
        position: int = 0,
        samples: SamplesTold = SAMPLES_TOLD["torch"],
    ) -> tuple[OperatorCost, ...]:
        """What operators cost a rank per micro-batch.

        Args:
            resolved: The plan, applied to the graph of one micro-batch; only the entries of these operators and of
                those that make their inputs are looked at.
            nodes: The operators; all of them if left out.
            position: Of the rank on the channel axis.
            samples: What the engine sends besides, where samples are exchanged for channels.

        Returns:
            Their seconds and communication; without what they keep, which depends on others.
        """
        wanted = tuple(resolved.graph if nodes is None else nodes)
        places = {CHANNEL: position, DATA: resolved.data_position}
        talking = [self._talking(part, wanted, places[part.axis], samples) for part in resolved.split_axes]
        return tuple(
            self._operator(resolved, node, position, {axis: seconds[node.name] for axis, seconds in talking})
            for node in wanted
        )

    def _talking(
        self, resolved: ResolvedPlan, nodes: Sequence[Node], position: int, samples: SamplesTold
    ) -> tuple[str, dict[str, float]]:
        """An axis, and the seconds of each operator's changes of placement on it."""
        group = self.group(resolved, resolved.axis)
        found = operator_collectives(resolved, nodes, position=position, samples=samples)
        return resolved.axis, {
            name: sum(self.collectives.seconds(kind, num_bytes, group) for kind, num_bytes in messages)
            for name, messages in found.items()
        }

    def message_seconds(self, resolved: ResolvedPlan, message: Message) -> float:
        """Seconds of one collective of an update."""
        group = self.group(resolved, message.axis)
        return self.collectives.seconds(message.kind, message.num_bytes, group, way=message.way)

    def optimizer_seconds(self, training: Training, *, updated_bytes: int, gradient_bytes: int) -> float:
        """Seconds of judging and applying gradients.

        Args:
            training: Which optimizer.
            updated_bytes: Of the parameters that the rank updates.
            gradient_bytes: Of all gradients that it holds: their norm takes one pass.

        Returns:
            The seconds.
        """
        name = training.optimizer
        passes = PASSES["momentum" if name == "sgd" and training.num_slots else name]
        if self._curves.find(name, "float32", "forward") is None:
            updating = self.moving(passes * updated_bytes)
        else:
            updating = self._curves.seconds(name, "float32", "forward", flops=0, num_bytes=updated_bytes)
        averaging = self.moving(3 * gradient_bytes) if training.averages_weights else 0.0
        return updating + self.moving(gradient_bytes) + averaging

    def moving(self, num_bytes: float, *, dtype: str = "float32") -> float:
        """Seconds of passing so many bytes through memory."""
        return self._curves.seconds("elementwise", dtype, "forward", flops=0, num_bytes=num_bytes)

    def explain(self, signature: Signature) -> str:
        """Where the seconds of an operator come from, in words."""
        origin = self.work(signature).origin
        if origin != "curve":
            return _WORDS[origin]
        told = []
        directions: tuple[Direction, ...] = ("forward", "backward")
        for direction in directions:
            curve = self._curves.find(signature.operator_class, signature.dtype, direction)
            if curve is not None:
                source = self.cluster.source_of(curve.source)
                told.append(f"{direction} on the curve of {curve.operator}, {curve.dtype}, {curve.direction}: {source}")
        return "; ".join(told)

    def _operator(
        self,
        resolved: ResolvedPlan,
        node: Node,
        position: int,
        talking: Mapping[str, float],
    ) -> OperatorCost:
        signature = signature_of(resolved, node, position=position)
        work = self.work(signature) if signature is not None else self._source(resolved, node, position)
        return OperatorCost(
            node=node.name,
            signature=signature,
            forward_seconds=work.forward_seconds,
            backward_seconds=work.backward_seconds + self._fork_seconds(resolved, node, position),
            communication_seconds=talking.get(CHANNEL, 0.0),
            exchange_seconds=talking.get(DATA, 0.0),
            origin=work.origin,
        )

    def _look_up(self, signature: Signature) -> Work:
        exact = self._measured.get(signature.text)
        if exact is not None:
            return Work(exact.forward_seconds, exact.backward_seconds, "measured")
        pieces = signature.pieces
        if not pieces:
            return NOTHING
        forward, backward = map(self.piece_seconds, pieces)
        return Work(forward, backward, "curve")

    def piece_seconds(self, piece: Piece) -> float:
        """Seconds of one piece of work."""
        once = self._curves.seconds(
            piece.operator, piece.dtype, piece.direction, flops=piece.flops, num_bytes=piece.num_bytes
        )
        return piece.times * once

    def many_seconds(self, like: Piece, *, flops: Floats, num_bytes: Floats) -> Floats:
        """Seconds of many pieces of work of one kind at once, each done once.

        Args:
            like: Names their class, type and direction.
            flops: Of each piece.
            num_bytes: Of each piece.

        Returns:
            The seconds of each, as ``piece_seconds`` gives them but for rounding.
        """
        return self._curves.many(like.operator, like.dtype, like.direction, flops=flops, num_bytes=num_bytes)

    def measured(self, signature: Signature) -> bool:
        """Whether an operator was measured at exactly its shapes."""
        return bool(self._measured) and signature.text in self._measured

    def _source(self, resolved: ResolvedPlan, node: Node, position: int) -> Work:
        if node.kind != "input":
            return NOTHING
        return Work(self.piece_seconds(input_piece(resolved, node, position)), 0.0, "curve")

    def _fork_seconds(self, resolved: ResolvedPlan, node: Node, position: int) -> float:
        return sum(map(self.piece_seconds, fork_pieces(resolved, node, position)))


def input_piece(resolved: ResolvedPlan, node: Node, position: int) -> Piece:
    """The work of making pixels the network's input."""
    num_elements = math.prod(resolved.rank_shape(Edge(node.name), position))
    return moving_piece(INPUT_BYTES_PER_ELEMENT * num_elements)


def fork_pieces(resolved: ResolvedPlan, node: Node, position: int) -> Iterator[Piece]:
    """The work of adding up the gradients that several users give to what an operator makes."""
    graph = resolved.graph
    if node.name not in graph.needs_gradient or node.kind in SOURCES:
        return
    for output in range(len(node.output_shapes)):
        edge = Edge(node.name, output)
        num_users = len(graph.consumers(edge))
        if num_users > 1:
            num_bytes = math.prod(resolved.rank_shape(edge, position)) * node.element_bytes
            yield moving_piece(3 * num_bytes, dtype=node.dtype, times=num_users - 1)


@dataclass(frozen=True)
class Reduction:
    """Communication of one update over the data axis, by whether the rank waits for it.

    Args:
        exposed: Seconds that it waits.
        hidden: Seconds that run while it computes.
    """

    exposed: float
    hidden: float


def reduction_seconds(
    model: CostModel,
    candidate: Candidate,
    messages: Sequence[Message],
    *,
    backward: Mapping[str, float],
    made_by: Mapping[str, str],
) -> Reduction:
    """What the data axis costs, gradients being sent as the last backward of an update finishes them.

    Args:
        model: The cluster.
        candidate: The plan.
        messages: The collectives of an update; only those of the data axis count.
        backward: Operator to the seconds of its backward, recomputation and communication with it, in the order of the
            graph.
        made_by: Parameter to the first operator that uses it, whose backward finishes its gradient.

    Returns:
        The seconds. What could be hidden at best is simulated: each bucket starts when its last gradient is there and
        the one before is through. Of that, the cluster's ``overlap`` really is.
    """
    resolved = candidate.resolved
    own = [(message, model.message_seconds(resolved, message)) for message in messages if message.axis == "data"]
    total = sum(seconds for _, seconds in own)
    if candidate.training.engine != "torch":
        return Reduction(total, 0.0)
    finished, now = {}, 0.0
    for name in reversed(list(backward)):
        now += backward[name]
        finished[name] = now
    end, buckets = 0.0, 0.0
    for message, seconds in own:
        if message.carries:
            ready = max(finished.get(made_by[name], now) for name in message.carries)
            end = max(end, ready) + seconds
            buckets += seconds
    hideable = buckets - max(0.0, end - now)
    hidden = model.cluster.overlap * hideable
    return Reduction(total - hidden, hidden)


def gradient_passes(candidate: Candidate, own: LocalParameters) -> int:
    """Bytes that gradients pass through memory between the backward and the update, beside what operators count.

    PyTorch copies each into its bucket, and adds up those of later micro-batches; MindSpore adds those of all
    micro-batches to sums, takes them and clears them.
    """
    later, gradients = candidate.accumulation - 1, own.trainable_bytes
    if candidate.training.engine == "torch":
        return 3 * later * gradients + 2 * (candidate.num_shards > 1) * own.reduced_bytes
    return gradients * (3 * candidate.accumulation + 3) if later else 0

"""What follows from a plan for a graph: what every operator, tensor and parameter is on an axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from convmesh.graph import Block, Edge, Graph, Node
from convmesh.graph.graph import BUFFERS
from convmesh.plan.partitions import Lists
from convmesh.plan.placement import Change, ParameterShard, Placement, Shard
from convmesh.plan.plan import CHANNEL, DATA, Plan


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """One operator on one axis.

    Args:
        node: Its name.
        split: How it is split: a weighted operator ``out_channels``, ``in_channels``, ``groups`` or ``whole``, another
            one ``channels`` or ``whole``; on the data axis ``samples`` stands for ``whole``.
        output: Where its first output is.
        more_outputs: Where its other outputs are.
        before: Change of its input at the border of its module.
        after: Change of its output at the border of its module.
        keep_input: Whether a gathered input is kept for the backward.
        shards: Name of each of its split parameters to its split.
        along: The channels of each rank, where it works along own channels and exchanges sums and statistics, or cuts
            them into pieces (`convmesh.plan.along`).
        summed: Names of its whole parameters that every rank uses for its own channels only, so that their gradients
            are summed over the channel axis.
    """

    node: str
    split: str
    output: Placement
    more_outputs: tuple[Placement, ...] = ()
    before: Change = field(default_factory=Change)
    after: Change = field(default_factory=Change)
    keep_input: bool = False
    shards: Mapping[str, ParameterShard] = field(default_factory=dict)
    summed: tuple[str, ...] = ()
    along: Lists = ()

    @property
    def outputs(self) -> tuple[Placement, ...]:
        """Where its outputs are."""
        return (self.output, *self.more_outputs)

    @property
    def taken(self) -> Placement | None:
        """Where an operator without mixing weights works on own channels; None for others, and where it has all."""
        if self.split != "channels":
            return None
        if self.along:
            return Shard(self.along)
        if self.after.kind == "none":
            return self.output
        return Shard(self.after.source) if self.after.source else None

    @property
    def changes_nothing(self) -> bool:
        """Whether its module can stay as it is: no change at its border and nothing of its own split."""
        changed = self.shards or self.summed or self.along
        return self.before.kind == "none" and self.after.kind == "none" and not changed


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """A plan applied to a graph.

    Args:
        graph: The network.
        plan: The plan.
        operators: Node name to what becomes of it, in the order of the graph.
        recomputed: Blocks that the backward computes again, in the order of the graph.
        axis: The axis that this tells of.
        region: What is split by channels along the data axis, and where; None if nothing is.
        data_position: Of the rank of the data axis whose shapes ``rank_shape`` and the like tell; 0 unless parts of the
            region are unequal.
    """

    graph: Graph
    plan: Plan
    operators: Mapping[str, Resolved]
    recomputed: tuple[Block, ...] = ()
    axis: str = CHANNEL
    region: ResolvedPlan | None = None
    data_position: int = 0

    @property
    def num_ranks(self) -> int:
        """Ranks on the axis."""
        return self.plan.mesh.size(self.axis)

    @property
    def split_axes(self) -> tuple[ResolvedPlan, ...]:
        """What it tells of each axis along which something may be split by channels."""
        own = (self,) if self.num_ranks > 1 else ()
        return own if self.region is None else (*own, self.region)

    def entries(self, name: str) -> tuple[Resolved, ...]:
        """What becomes of an operator on this axis, and on the data axis if something is split there."""
        own = self.operators[name]
        return (own,) if self.region is None else (own, self.region.operators[name])

    @property
    def parameters(self) -> dict[str, ParameterShard]:
        """Name of each split parameter and buffer to its split."""
        return {name: shard for entry in self.operators.values() for name, shard in entry.shards.items()}

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold equally much of every parameter."""
        return all(len({len(own) for own in shard.lists}) == 1 for shard in self.parameters.values())

    def replicas_may_differ(self, *, deterministic: bool) -> bool:
        """Whether gradients of whole parameters, equal but for rounding, may differ in bits between ranks.

        They do where equal work gives unequal bits, as some CUDA kernels do, and where more than two ranks of the data
        axis add up buckets that are laid out differently, since ranks hold unequal parts.

        Args:
            deterministic: Whether equal work gives equal bits.
        """
        if self.axis == DATA:
            return False  # What the ranks of the data axis have alike, they have summed together.
        return not deterministic or (self.plan.mesh.size("data") > 2 and not self.is_even)

    @property
    def num_whole_trainable(self) -> int:
        """Elements of trainable parameters of which all ranks of the axis hold the same; as many as on rank 0."""
        shards, others = self.parameters, self.region.parameters if self.region is not None else {}
        return sum(
            others[entry.name].num_elements(entry.shape, position=0) if entry.name in others else entry.num_elements
            for entry in self.graph.parameters
            if entry.trainable and entry.role not in BUFFERS and entry.name not in shards
        )

    def placement(self, edge: Edge) -> Placement:
        """Where a tensor is."""
        return self.operators[edge.node].outputs[edge.output]

    def local_shape(self, edge: Edge, position: int) -> tuple[int, ...]:
        """The shape of a rank's part of a tensor.

        Args:
            edge: The tensor.
            position: Of the rank on the axis.

        Returns:
            The shape; own channels on the data axis are of the samples of all ranks, as many on each.
        """
        shape, placement = self.graph.shape(edge), self.placement(edge)
        if isinstance(placement, Shard):
            num_samples = shape[0] * (self.num_ranks if self.axis == DATA else 1)
            return (num_samples, len(placement.lists[position]), *shape[2:])
        return shape

    def rank_shape(self, edge: Edge, position: int) -> tuple[int, ...]:
        """The shape of a rank's part of a tensor, on both axes.

        Args:
            edge: The tensor.
            position: Of the rank on the channel axis.

        Returns:
            The shape; of what is split by channels along the data axis, that of own channels of all samples.
        """
        if self.region is not None and isinstance(self.region.placement(edge), Shard):
            return self.region.local_shape(edge, self.data_position)
        return self.local_shape(edge, position)

    def taken_shape(self, node: Node, place: int, position: int) -> tuple[int, ...]:
        """The shape of an operator's input as a rank computes with it, after the changes at its border.

        Args:
            node: The operator.
            place: Which of its inputs.
            position: Of the rank on the channel axis.

        Returns:
            The shape.
        """
        edge = node.inputs[place]
        if place == 0 and self.region is not None:
            change = self.region.operators[node.name].before
            if change.kind != "none":
                return self._exchanged(edge, change.target, change.kind == "to_samples")
        change = self.operators[node.name].before if place == 0 else Change()
        if change.kind == "none":
            return self.rank_shape(edge, position)
        return _with_channels(self.graph.shape(edge), change.target, position)

    def made_shape(self, node: Node, place: int, position: int) -> tuple[int, ...]:
        """The shape of an operator's output as a rank computes it, before the changes at its border.

        Args:
            node: The operator.
            place: Which of its outputs.
            position: Of the rank on the channel axis.

        Returns:
            The shape.
        """
        edge = Edge(node.name, place)
        if place == 0 and self.region is not None:
            change = self.region.operators[node.name].after
            if change.kind != "none":
                return self._exchanged(edge, change.source, change.kind == "to_channels")
        change = self.operators[node.name].after if place == 0 else Change()
        if change.kind == "none":
            return self.rank_shape(edge, position)
        return _with_channels(self.graph.shape(edge), change.source, position)

    def _exchanged(self, edge: Edge, lists: Sequence[Sequence[int]], own_samples: bool) -> tuple[int, ...]:
        """All channels of own samples, or own or all channels of the samples of all ranks of the data axis."""
        shape = self.graph.shape(edge)
        if own_samples:
            return shape
        return _with_channels((shape[0] * self.plan.mesh.size(DATA), *shape[1:]), lists, self.data_position)


def _with_channels(shape: tuple[int, ...], lists: Sequence[Sequence[int]], position: int) -> tuple[int, ...]:
    return (shape[0], len(lists[position]), *shape[2:]) if lists else shape

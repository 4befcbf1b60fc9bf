"""What follows from a plan for a graph: what every operator, tensor and parameter is on the channel axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from convmesh.graph import Block, Edge, Graph
from convmesh.graph.graph import BUFFERS
from convmesh.plan.placement import Change, ParameterShard, Placement, Shard
from convmesh.plan.plan import CHANNEL, Plan


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """One operator on the channel axis.

    Args:
        node: Its name.
        split: How it is split: a weighted operator ``out_channels``, ``in_channels``, ``groups`` or ``whole``, another
            one ``channels`` or ``whole``.
        output: Where its first output is.
        more_outputs: Where its other outputs are.
        before: Change of its input at the border of its module.
        after: Change of its output at the border of its module.
        keep_input: Whether a gathered input is kept for the backward.
        shards: Name of each of its split parameters to its split.
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

    @property
    def outputs(self) -> tuple[Placement, ...]:
        """Where its outputs are."""
        return (self.output, *self.more_outputs)

    @property
    def changes_nothing(self) -> bool:
        """Whether its module can stay as it is: no change at its border and nothing of its own split."""
        return self.before.kind == "none" and self.after.kind == "none" and not self.shards and not self.summed


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """A plan applied to a graph.

    Args:
        graph: The network.
        plan: The plan.
        operators: Node name to what becomes of it, in the order of the graph.
        recomputed: Blocks that the backward computes again, in the order of the graph.
    """

    graph: Graph
    plan: Plan
    operators: Mapping[str, Resolved]
    recomputed: tuple[Block, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks on the channel axis."""
        return self.plan.mesh.size(CHANNEL)

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
        return not deterministic or (self.plan.mesh.size("data") > 2 and not self.is_even)

    @property
    def num_whole_trainable(self) -> int:
        """Elements of trainable parameters that every rank holds whole."""
        shards = self.parameters
        return sum(
            entry.num_elements
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
            position: Of the rank on the channel axis.

        Returns:
            The shape.
        """
        shape, placement = self.graph.shape(edge), self.placement(edge)
        if isinstance(placement, Shard):
            return (shape[0], len(placement.lists[position]), *shape[2:])
        return shape

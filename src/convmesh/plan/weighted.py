"""Convolutions and dense layers on one axis: the first rows of the table in `convmesh.plan.resolve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convmesh.errors import ConfigError, ConvMeshError
from convmesh.geometry.channel_partition import ChannelPartition
from convmesh.graph import Graph, Node, node_splits
from convmesh.plan import partitions
from convmesh.plan.partitions import Lists
from convmesh.plan.placement import Change, ParameterShard, Placement, Replicate, Samples, Shard, change_between
from convmesh.plan.plan import CHANNEL, CHANNEL_SPLITS, DATA, DATA_SPLITS, Choice, Split
from convmesh.plan.resolved import Resolved
from convmesh.plan.ways_out import regrouping_ways

WEIGHTED = ("convolution", "dense")
"""Kinds whose weight mixes channels."""


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """A convolution or dense layer, seen through its channels.

    Args:
        node: The operator.
    """

    node: Node

    @property
    def num_in(self) -> int:
        """Channels or features that enter."""
        return int(self.node.attributes["in_channels" if self.node.kind == "convolution" else "in_features"])

    @property
    def num_out(self) -> int:
        """Channels or features that leave."""
        return int(self.node.attributes["out_channels" if self.node.kind == "convolution" else "out_features"])

    @property
    def groups(self) -> int:
        """Independent groups of channels."""
        return int(self.node.attributes.get("groups", 1))

    @property
    def out_dim(self) -> int:
        """The dim of the weight that makes outputs; the other one of the first two takes inputs."""
        return 1 if self.node.attributes.get("transposed") else 0

    def shards(self, *, weight: ParameterShard, bias: Lists | None) -> dict[str, ParameterShard]:
        """The splits of weight and bias by name; a bias that is None stays whole."""
        found = {}
        for parameter in self.node.parameters:
            if parameter.role == "weight":
                found[parameter.name] = weight
            elif bias is not None:
                found[parameter.name] = ParameterShard(0, bias)
        return found


UNSPLIT = ("whole", "samples")
"""Splits of an operator whose weight, on this axis, is whole."""


def refusals(graph: Graph, node: Node, choice: Choice, *, num_ranks: int, axis: str = CHANNEL) -> list[ConvMeshError]:
    """Why an operator can't be split as it is asked for, whatever its input.

    Args:
        graph: The network.
        node: The operator.
        choice: What is asked for.
        num_ranks: Ranks on the axis.
        axis: Along which axis.

    Returns:
        The reasons; none if it can.
    """
    if choice.split in UNSPLIT:
        return []
    splits = node_splits(graph, node)
    if choice.split in splits.refused:
        allowed = [name for name in (DATA_SPLITS if axis == DATA else CHANNEL_SPLITS) if name in splits.allowed]
        return [
            ConfigError(
                f"{node.name} can't be split by '{choice.split}': {splits.refused[choice.split]}",
                fix=f"Use one of {', '.join(allowed)}",
            )
        ]
    if node.kind == "dense" and len(node.shape) != 2:
        return [
            ConfigError(
                f"{node.name} can't be split by '{choice.split}': its features are not dim 1 of its input",
                got=f"output {node.shape}",
                fix=f"Set '{node.name}: {{{axis}: {unsplit(axis)}}}'",
            )
        ]
    numbers = _numbers(graph, node)
    needed = [choice.split]
    if choice.split == "in_channels" and choice.output == "sharded":
        needed.append("out_channels")
    short = next((name for name in needed if numbers[name] < num_ranks), None)
    if short is not None:
        more = regrouping_ways(graph, node, num_ranks) if short == "in_channels" else []
        return [_too_few(node, numbers, _Shortage(short, axis, num_ranks), more)]
    made = "out_channels" if node.kind in WEIGHTED else "channels"
    return [] if choice.split == "groups" else _wrong_partition(node, choice, numbers[made], num_ranks)


def unsplit(axis: str) -> Split:
    """What an operator is split by on an axis where its weight is whole."""
    return "samples" if axis == DATA else "whole"


def _numbers(graph: Graph, node: Node) -> dict[str, int]:
    if node.kind not in WEIGHTED:
        return {"channels": graph.input_shapes(node)[0][1]}
    layer = Weighted(node=node)
    return {"out_channels": layer.num_out, "in_channels": layer.num_in, "groups": layer.groups}


@dataclass(frozen=True, kw_only=True)
class _Room:
    """Where an operator stands, as ``place`` is told."""

    source: Placement
    home: Placement
    num_ranks: int
    wanted: Placement | None


def place(
    node: Node,
    source: Placement,
    choice: Choice,
    *,
    num_ranks: int,
    wanted: Placement | None,
    home: Placement = Replicate(),  # noqa: B008 - a value
) -> Resolved:
    """Decides what becomes of a convolution or dense layer.

    Args:
        node: The operator; ``refusals`` has found nothing.
        source: Where its input is.
        choice: How it is split.
        num_ranks: Ranks on the axis.
        wanted: Where its output must be, or None.
        home: Where tensors are that are not split along channels.

    Returns:
        The operator with its changes at both borders.
    """
    layer = Weighted(node=node)
    room = _Room(source=source, home=home, num_ranks=num_ranks, wanted=wanted)
    if choice.split == "out_channels":
        return _by_outputs(layer, choice, room)
    if choice.split == "in_channels":
        return _by_inputs(layer, choice, room)
    if choice.split == "groups":
        return _by_groups(layer, room)
    output = room.wanted or room.home
    return Resolved(
        node=node.name,
        split=choice.split,
        before=change_between(room.source, room.home),
        after=change_between(room.home, output),
        output=output,
    )


def lists_of(choice: Choice, num_channels: int, num_ranks: int) -> Lists:
    """The channels of each rank that a choice asks for."""
    rule = choice.partition
    if rule == "contiguous":
        return partitions.contiguous(num_channels, num_ranks)
    if rule == "round_robin":
        return ChannelPartition.round_robin(num_channels, num_ranks).owned
    sizes = [entry for entry in rule if isinstance(entry, int)]
    return (
        ChannelPartition.of_sizes(sizes).owned
        if sizes
        else tuple(entry for entry in rule if not isinstance(entry, int))
    )


def _by_outputs(layer: Weighted, choice: Choice, room: _Room) -> Resolved:
    source, wanted = room.source, room.wanted
    own = wanted if isinstance(wanted, Shard) else Shard(lists_of(choice, layer.num_out, room.num_ranks))
    if isinstance(source, Shard):
        before = Change("gather_sum", source.lists)
    else:
        before = Change("gather_samples" if isinstance(source, Samples) else "copy")
    return Resolved(
        node=layer.node.name,
        split="out_channels",
        before=before,
        after=change_between(own, wanted or own),
        output=wanted or own,
        keep_input=choice.keep_input,
        shards=layer.shards(weight=ParameterShard(layer.out_dim, own.lists), bias=own.lists),
    )


def _by_inputs(layer: Weighted, choice: Choice, room: _Room) -> Resolved:
    source = room.source
    own = source if isinstance(source, Shard) else Shard(partitions.contiguous(layer.num_in, room.num_ranks))
    output = room.home
    if choice.output == "sharded":
        output = Shard(lists_of(choice, layer.num_out, room.num_ranks))
    output = room.wanted or output
    if isinstance(output, Shard):
        after = Change("reduce_scatter", (), output.lists)
    else:
        after = Change("scatter_samples" if isinstance(output, Samples) else "all_reduce")
    return Resolved(
        node=layer.node.name,
        split="in_channels",
        before=change_between(source, own),
        after=after,
        output=output,
        shards=layer.shards(
            weight=ParameterShard(1 - layer.out_dim, own.lists),
            bias=output.lists if isinstance(output, Shard) else None,
        ),
    )


def _by_groups(layer: Weighted, room: _Room) -> Resolved:
    source, wanted = room.source, room.wanted
    size_in, size_out = layer.num_in // layer.groups, layer.num_out // layer.groups
    groups = partitions.whole_groups(source.lists, size_in) if isinstance(source, Shard) else None
    if groups is None:
        groups = partitions.contiguous(layer.groups, room.num_ranks)
    own = Shard(partitions.expanded(groups, size_in))
    made = Shard(partitions.expanded(groups, size_out))
    # PyTorch keeps the weight of a transposed convolution by inputs: (in, out / groups, ...).
    weight = own if layer.out_dim else made
    return Resolved(
        node=layer.node.name,
        split="groups",
        before=change_between(source, own),
        after=change_between(made, wanted or made),
        output=wanted or made,
        shards=layer.shards(weight=ParameterShard(0, weight.lists), bias=made.lists),
    )


@dataclass(frozen=True)
class _Shortage:
    """Of what there are too few, for how many ranks of which axis."""

    split: str
    axis: str
    num_ranks: int


def _too_few(node: Node, numbers: dict[str, int], short: _Shortage, regroupings: Sequence[str]) -> ConfigError:
    split, axis, num_ranks, home = short.split, short.axis, short.num_ranks, unsplit(short.axis)
    ways = [f"keep it whole with '{node.name}: {{{axis}: {home}}}'"]
    other = next((name for name in ("out_channels", "in_channels") if numbers.get(name, 0) >= num_ranks), None)
    if other == "in_channels":
        ways.insert(0, f"split it with '{node.name}: {{{axis}: {{split: in_channels, output: {home}}}}}'")
    elif other:
        ways.insert(0, f"split it with '{node.name}: {{{axis}: {other}}}'")
    if numbers[split] > 1:
        ways.append(f"use {numbers[split]} ranks on the axis '{axis}'")
    ways = [*regroupings, *ways]
    text = ", or ".join(ways)
    return ConfigError(
        f"{node.name} has too few channels to be split by '{split}'",
        got=f"{numbers[split]} for {num_ranks} ranks",
        expected=f"at least {num_ranks}",
        fix=text[0].upper() + text[1:],
    )


def _wrong_partition(node: Node, choice: Choice, num_channels: int, num_ranks: int) -> list[ConvMeshError]:
    rule = choice.partition
    if isinstance(rule, str):
        return []
    named = f"the partition of {node.name}"
    if len(rule) != num_ranks:
        return [ConfigError(f"{named} is not for this mesh", got=f"{len(rule)} parts", expected=f"{num_ranks}")]
    if any(isinstance(size, int) and size < 1 for size in rule):
        return [ConfigError(f"{named} leaves a rank without channels", got=list(rule))]
    lists = lists_of(choice, num_channels, num_ranks)
    if not all(lists):
        return [ConfigError(f"{named} leaves a rank without channels", got=[len(own) for own in lists])]
    if not partitions.is_partition(lists, num_channels):
        error = ConfigError(
            f"{named} does not hold every channel once",
            got=f"{sum(map(len, lists))} numbers, {len(set().union(*lists))} of them different",
            expected=f"0 to {num_channels - 1}, each once",
        )
        return [error]
    return []

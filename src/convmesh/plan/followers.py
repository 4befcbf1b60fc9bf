"""Operators without mixing weights: they follow their inputs, or need them whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from convmesh.graph import Graph, Node, node_splits
from convmesh.graph.graph import BUFFERS, SOURCES
from convmesh.plan import partitions
from convmesh.plan.along import (
    NORMALISING,
    REDUCTIONS,
    across_pieces,
    can_share,
    cuts_channels,
    pieces_of,
    works_along,
)
from convmesh.plan.partitions import Lists
from convmesh.plan.placement import Lent, ParameterShard, Placement, Replicate, Samples, Shard

MERGING = ("add", "multiply", "concat", "elementwise")
"""Kinds that may have several inputs, which must agree."""

PASSING = (
    "add", "multiply", "elementwise", "batch_norm", "instance_norm", "dropout", "max_pool", "avg_pool",
    "adaptive_pool", "upsample",
)  # fmt: skip
"""Kinds whose output has the channels of its inputs, each in its place."""


@dataclass(frozen=True)
class Way:
    """How an operator can take its input.

    Args:
        source: Where its input must be.
        output: Where its first output is then.
        more_outputs: Where its other outputs are; like the first if left out.
        along: The channels of each rank, where it works along them or cuts them.
    """

    source: Placement
    output: Placement
    more_outputs: tuple[Placement, ...] | None = None
    along: Lists = ()


LOCAL_WITH_MODULE = ("dropout", "group_norm")
"""Kinds that can work on own channels only where their module can be replaced: what a function call is given, the
number of groups or the random numbers, is for all channels."""


def follow(
    graph: Graph,
    node: Node,
    source: Placement,
    *,
    num_ranks: int,
    replaceable: bool,
    home: Placement = Replicate(),  # noqa: B008 - a value
) -> Way:
    """How an operator with one input takes it.

    Args:
        graph: The network.
        node: The operator.
        source: Where its input is.
        num_ranks: Ranks on the axis.
        replaceable: Whether its module can be replaced.
        home: Where tensors are that are not split along channels.

    Returns:
        The input as it is if the operator can work on it; else another partition, or at home.
    """
    if isinstance(source, Lent):
        return Way(source, source) if lends_on(node) else Way(home, home)
    if not isinstance(source, Shard):
        return Way(source, source)
    if needs_home(graph, node, home, replaceable=replaceable) is not None:
        return Way(home, home)
    if works_along(graph, node):
        return Way(source, home if node.kind in REDUCTIONS else source, along=source.lists)
    if node.kind == "group_norm":
        return _group_norm(graph, node, source, home, num_ranks)
    return _moved(graph, node, source, home, num_ranks)


def _moved(graph: Graph, node: Node, source: Shard, home: Placement, num_ranks: int) -> Way:
    """What operators make that give channels other numbers; others leave them."""
    if cuts_channels(node):
        return _cut(node, source, home, num_ranks)
    if node.kind == "channel_shuffle":
        lists = partitions.shuffled(source.lists, node.attributes["groups"])
        return Way(home, home) if lists is None else Way(source, Shard(lists))
    if node.kind == "flatten" and node.attributes["start_dim"] == 1:
        num_pixels = math.prod(graph.input_shapes(node)[0][2 : node.attributes["end_dim"] + 1])
        return Way(source, Shard(partitions.flattened(source.lists, num_pixels)))
    return Way(source, source)


def lends_on(node: Node) -> bool:
    """Whether what an operator makes of what is whole for own channels is so, too: it learns nothing by itself."""
    return node.kind != "opaque" and node.kind not in SOURCES and not node.parameters


def needs_home(graph: Graph, node: Node, home: Placement, *, replaceable: bool = True) -> str | None:
    """Why an operator can't work on own channels, or on the samples of all ranks of the data axis.

    Args:
        graph: The network.
        node: The operator.
        home: Where tensors are that are not split along channels.
        replaceable: Whether its module can be replaced, or its call.

    Returns:
        The reason, or None if it can.
    """
    if isinstance(home, Samples):
        if works_along(graph, node) or cuts_channels(node):
            return "it works along all channels"
        if node.kind == "batch_norm" or any(parameter.role in BUFFERS for parameter in node.parameters):
            return "its statistics are those of own samples"
        if reason := node_splits(graph, node).refused.get("samples"):
            return reason
    return needs_whole(graph, node, replaceable=replaceable)


def needs_whole(graph: Graph, node: Node, *, replaceable: bool = True) -> str | None:
    """Why an operator needs all channels at once.

    Args:
        graph: The network.
        node: The operator.
        replaceable: Whether its module can be replaced, or its call.

    Returns:
        The reason, or None if it does not.
    """
    if works_along(graph, node) or cuts_channels(node):
        return None if can_share(node, replaceable=replaceable) else _why_not_shared(node)
    if node.kind in LOCAL_WITH_MODULE and not replaceable:
        return "what it is given is for all channels"
    if node.kind == "slice" and node.attributes["dim"] == 1:
        return "it counts channels from the first of all"
    # Of several inputs some may be spread over the channels of the others.
    shapes = node.output_shapes if len(node.inputs) > 1 else (*graph.input_shapes(node), *node.output_shapes)
    if not shapes or min(map(len, shapes)) < 2:
        return "its tensors have no channels"
    moves = node.kind in REDUCTIONS and not node.attributes["keep_dims"] and 0 in node.attributes["dims"]
    return "it moves the channels to another dim" if moves else node_splits(graph, node).refused.get("channels")


def _why_not_shared(node: Node) -> str:
    told = "is no module of its own" if node.kind in NORMALISING else "this engine can't replace the function"
    return f"it works along all channels, and {told}"


def parameter_shards(node: Node, placement: Placement) -> dict[str, ParameterShard]:
    """The splits of an operator's parameters and statistics that hold one value per channel.

    Args:
        node: The operator.
        placement: Where its input is.

    Returns:
        Name to split; empty on whole channels.
    """
    if not isinstance(placement, Shard):
        return {}
    if node.kind == "layer_norm":
        # Its weights have the normalised dims: channels first where they are among them.
        dim = 1 - (len(node.shape) - int(node.attributes["num_dims"]))
        return {entry.name: ParameterShard(dim, placement.lists) for entry in node.parameters} if dim >= 0 else {}
    num_channels = sum(map(len, placement.lists))
    return {
        parameter.name: ParameterShard(0, placement.lists)
        for parameter in node.parameters
        if parameter.shape == (num_channels,)
    }


def summed_parameters(node: Node, placement: Placement, shards: Mapping[str, ParameterShard]) -> tuple[str, ...]:
    """Whole parameters of which every rank sees the part of the gradient that its own channels give.

    Args:
        node: The operator.
        placement: Where its input is.
        shards: Its split parameters.

    Returns:
        Their names: a slope for all channels, or a layer norm's weights over pixels.
    """
    if not isinstance(placement, Shard):
        return ()
    return tuple(entry.name for entry in node.parameters if entry.trainable and entry.name not in shards)


def channel_extent(graph: Graph, node: Node, position: int) -> tuple[int, int]:
    """Where an input of a merging operator has its channels.

    Args:
        graph: The network.
        node: The operator.
        position: Which of its inputs.

    Returns:
        Its dim that is aligned with dim 1 of the result, below 0 if there is none, and the size of that dim.
    """
    shape = graph.input_shapes(node)[position]
    dim = 1 - (len(node.shape) - len(shape))
    return dim, shape[dim] if dim >= 0 else 1


def _cut(node: Node, source: Shard, home: Placement, num_ranks: int) -> Way:
    sizes = node.attributes["sizes"]
    pieces = pieces_of(source.lists, sizes)
    if pieces is None:
        lists = across_pieces(sizes, num_ranks)
        if lists is None:
            return Way(home, home)
        source, pieces = Shard(lists), pieces_of(lists, sizes) or ()
    first, *more = (Shard(own) for own in pieces)
    return Way(source, first, more_outputs=tuple(more), along=source.lists)


def _group_norm(graph: Graph, node: Node, source: Shard, home: Placement, num_ranks: int) -> Way:
    groups = int(node.attributes["groups"])
    num_channels = graph.input_shapes(node)[0][1]
    if partitions.whole_groups(source.lists, num_channels // groups) is not None:
        return Way(source, source)
    if groups < num_ranks:
        return Way(home, home)
    whole = Shard(partitions.by_groups(num_channels, groups, num_ranks))
    return Way(whole, whole)

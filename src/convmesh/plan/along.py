"""Operators that work along channels, on own ones: what they need for it, what they make, and what is exchanged.

| operator | taken | made | forward, per row | backward, per row |
|---|---|---|---|---|
| softmax over channels | sharded | the same | all-gather of a maximum and a sum | all-reduce of a sum |
| layer norm of channels | sharded | the same | all-gather of a mean and a sum of squares | all-reduce of two sums |
| mean, sum of channels | sharded | whole | all-reduce of a sum | none |
| maximum of channels | sharded | whole | all-gather of a maximum, and how often or where | none |
| split of channels | sharded, own ones of every piece | sharded | none | none |

A row is what one result, or one statistic, is taken of: the channels of a pixel, or channels and pixels of a sample.
Sums and statistics travel in float32 at least.

A split whose pieces would leave a rank without channels takes them otherwise: each piece is divided over all ranks.
``across_pieces`` is the partition with which a layer before it makes its channels so, and nothing has to be sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from convmesh.graph import Graph, Node
from convmesh.graph.graph import Shape
from convmesh.plan import partitions
from convmesh.plan.partitions import Lists

REDUCTIONS = ("mean", "sum", "amax")
"""Kinds whose result, over channels, is whole on every rank."""

NORMALISING = ("softmax", "layer_norm")
"""Kinds that keep the channels that they work along."""

STATISTIC_BYTES = 4
"""Least bytes of a sum or statistic that travels."""


def works_along(graph: Graph, node: Node) -> bool:
    """Whether an operator with one input takes something of all channels together."""
    attributes = node.attributes
    if node.kind == "softmax":
        return bool(attributes["dim"] == 1)
    if node.kind == "layer_norm":
        return bool(len(node.shape) - attributes["num_dims"] <= 1)
    return node.kind in REDUCTIONS and 1 in attributes["dims"] and len(graph.input_shapes(node)[0]) > 1


def cuts_channels(node: Node) -> bool:
    """Whether it is a split of channels into pieces."""
    return bool(node.kind == "split" and node.attributes["dim"] == 1)


def can_share(node: Node, *, replaceable: bool) -> bool:
    """Whether an engine can put something in the place of an operator along channels that works on own ones.

    Args:
        node: The operator.
        replaceable: Whether its module can be replaced, or its call.

    Returns:
        Norms and softmax can be replaced as modules of their own by both engines, the others as calls.
    """
    return replaceable and (node.kind in NORMALISING or node.call is not None)


def num_rows(node: Node, shape: Shape) -> int:
    """Of how many rows an operator along channels takes something.

    Args:
        node: The operator.
        shape: Of its input.

    Returns:
        Results, or statistics, of one rank.
    """
    if node.kind == "softmax":
        return math.prod(shape) // shape[1]
    if node.kind == "layer_norm":
        return math.prod(shape[: len(shape) - node.attributes["num_dims"]])
    return math.prod(size for dim, size in enumerate(shape) if dim not in node.attributes["dims"])


def exchanges(node: Node) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
    """What an operator along channels sends, in numbers per row.

    Args:
        node: The operator.

    Returns:
        Kind and numbers of each collective of the forward, and of the backward.
    """
    return {
        "softmax": ((("all-gather", 2),), (("all-reduce", 1),)),
        "layer_norm": ((("all-gather", 2),), (("all-reduce", 2),)),
        "amax": ((("all-gather", 2),), ()),
    }.get(node.kind, ((("all-reduce", 1),), ()))


def pieces_of(lists: Lists, sizes: Sequence[int]) -> tuple[Lists, ...] | None:
    """What every rank holds of each piece when it cuts its own channels.

    Args:
        lists: Channels of each rank.
        sizes: Channels of each piece.

    Returns:
        Per piece the channels of each rank, counted from the first of the piece; None if a rank would have none of
        one.
    """
    found = []
    for start, stop in _spans(sizes):
        piece = tuple(tuple(channel - start for channel in own if start <= channel < stop) for own in lists)
        if not all(piece):
            return None
        found.append(piece)
    return tuple(found)


def across_pieces(sizes: Sequence[int], num_ranks: int) -> Lists | None:
    """The partition in which every rank has neighbouring channels of every piece, as evenly as possible.

    Args:
        sizes: Channels of each piece.
        num_ranks: Ranks on the axis.

    Returns:
        The channels of each rank; None if a piece has too few for all.
    """
    if min(sizes) < num_ranks:
        return None
    parts = [partitions.contiguous(size, num_ranks) for size in sizes]
    starts = [start for start, _ in _spans(sizes)]
    return tuple(
        tuple(start + channel for start, part in zip(starts, parts, strict=True) for channel in part[rank])
        for rank in range(num_ranks)
    )


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for size in sizes:
        yield start, start + size
        start += size

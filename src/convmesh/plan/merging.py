"""Operators with several inputs: what they make of them, and what has to be changed before they can."""

from __future__ import annotations

from collections.abc import Sequence

from convmesh.errors import ConvMeshError, ModelError
from convmesh.graph import Edge, Graph, Node
from convmesh.plan import partitions
from convmesh.plan.followers import MERGING, channel_extent, lends_on, needs_home
from convmesh.plan.placement import Lent, Placement, Replicate, Samples, Shard

Alternative = list[tuple[Edge, Placement]]
"""Tensors and where they must be, all together."""


class Conflict(Exception):
    """Tensors that an operator needs elsewhere.

    Args:
        alternatives: What would suit, the best first.
        error: What to tell the user if none is possible.
    """

    def __init__(self, alternatives: Sequence[Alternative], error: ConvMeshError) -> None:
        super().__init__(str(error))
        self.alternatives = alternatives
        self.error = error


def merge(
    graph: Graph,
    node: Node,
    sources: Sequence[Placement],
    *,
    num_ranks: int,
    home: Placement = Replicate(),  # noqa: B008 - a value
) -> tuple[Placement, tuple[str, ...]]:
    """What an operator makes of several inputs.

    Args:
        graph: The network.
        node: The operator.
        sources: Where each input is.
        num_ranks: Ranks on the axis.
        home: Where tensors are that are not split along channels.

    Returns:
        Where its output is, and the names of whole parameters of which every rank uses own channels only.

    Raises:
        Conflict: If inputs have to be changed first.
    """
    if all(source == home for source in sources):
        return home, ()
    reason = needs_home(graph, node, home) if node.kind in MERGING else "it is no built-in"
    if reason is not None:
        raise Conflict([_all(node, home)], _error(node, sources, reason))
    if not any(isinstance(source, Shard) for source in sources):
        return _lend_on(graph, node, sources, home)
    if node.kind == "concat" and node.attributes["dim"] == 1:
        return _concatenate(graph, node, sources, home, num_ranks), ()
    return _align(graph, node, sources, home)


def _concatenate(graph: Graph, node: Node, sources: Sequence[Placement], home: Placement, num_ranks: int) -> Placement:
    sizes = [shape[1] for shape in graph.input_shapes(node)]
    lists = [source.lists for source in sources if isinstance(source, Shard)]
    if len(lists) == len(sizes):
        return Shard(partitions.concatenated(lists))
    sharded: Alternative = [
        (edge, Shard(partitions.contiguous(size, num_ranks)))
        for edge, size, source in zip(node.inputs, sizes, sources, strict=True)
        if source == home
    ]
    whole = _all(node, home)
    alternatives = [sharded, whole] if min(sizes) >= num_ranks else [whole]
    raise Conflict(alternatives, _error(node, sources, "some are split and some are whole"))


def _lend_on(
    graph: Graph, node: Node, sources: Sequence[Placement], home: Placement
) -> tuple[Placement, tuple[str, ...]]:
    """What becomes of whole tensors of which some are for work on own channels: the result is so, too."""
    summed: list[str] = []
    others: Alternative = []
    for edge, source in zip(node.inputs, sources, strict=True):
        maker = graph.node(edge.node)
        if maker.kind == "parameter":
            summed += [parameter.name for parameter in maker.parameters if parameter.trainable]
        elif maker.kind != "constant" and not isinstance(source, Lent):
            others.append((edge, Lent()))
    if others or not lends_on(node):
        error = _error(node, sources, "some are for own channels and some for all")
        raise Conflict([others, _all(node, home)] if others and lends_on(node) else [_all(node, home)], error)
    return Lent(), tuple(summed)


def _align(
    graph: Graph, node: Node, sources: Sequence[Placement], home: Placement
) -> tuple[Placement, tuple[str, ...]]:
    partial, summed = False, []
    lent: Alternative = []
    wide: list[tuple[Edge, Placement]] = []
    for position, (edge, source) in enumerate(zip(node.inputs, sources, strict=True)):
        if channel_extent(graph, node, position)[1] > 1:
            wide.append((edge, source))
            continue
        maker = graph.node(edge.node)
        if edge.node in graph.needs_gradient:
            summed += [parameter.name for parameter in maker.parameters if maker.kind == "parameter"]
            if maker.kind != "parameter" and not isinstance(source, Lent):
                lent.append((edge, Lent()))
        # Of other samples than those that own channels are of.
        partial = partial or (isinstance(home, Samples) and maker.kind not in ("parameter", "constant"))
    targets = list(dict.fromkeys(source for _, source in wide if isinstance(source, Shard)))
    if partial:
        raise Conflict([_all(node, home)], _error(node, sources, "one is spread over the channels of the other"))
    if lent:
        error = _error(node, sources, "one is spread over the channels of the other")
        raise Conflict([lent, _all(node, home)], error)
    if len(targets) == 1 and all(source == targets[0] for _, source in wide):
        return targets[0], tuple(summed)
    alternatives: list[Alternative] = [
        [(edge, target) for edge, source in wide if source != target] for target in targets
    ]
    alternatives.append(_all(node, home))
    raise Conflict(alternatives, _error(node, sources, "their channels are split differently"))


def _all(node: Node, target: Placement) -> Alternative:
    return [(edge, target) for edge in dict.fromkeys(node.inputs)]


def _error(node: Node, sources: Sequence[Placement], reason: str) -> ModelError:
    inputs = ", ".join(f"{edge} {source}" for edge, source in zip(node.inputs, sources, strict=True))
    return ModelError(
        f"the inputs of {node.name} ({node.kind}) can't be brought together: {reason}",
        got=inputs,
        fix="Split the layers that make them alike, keep them whole, or put a module of its own before it",
    )

"""Which operators can make what is spread over split channels, as `convmesh.plan.resolve` finds them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from convmesh.graph import Edge, Graph, Node
from convmesh.graph.graph import SOURCES
from convmesh.plan.followers import MERGING, channel_extent, lends_on


def lenders(graph: Graph, hosts: Collection[str]) -> frozenset[str]:
    """Operators whose results are spread over the channels of others, or make such by functions alone.

    Args:
        graph: The network.
        hosts: Names of the operators at which something can be changed.

    Returns:
        Their names; at each of them gradients of what is spread can be summed.
    """
    found: set[str] = set()
    for node in graph:
        for edge in _spread(graph, node):
            makers = _makers(graph, edge, hosts)
            found |= makers or set()
    return frozenset(found)


def _spread(graph: Graph, node: Node) -> Iterator[Edge]:
    """The inputs of an operator that have one channel where others have several."""
    if node.kind not in MERGING or node.kind == "concat" or len(node.inputs) < 2:
        return
    extents = [channel_extent(graph, node, position)[1] for position in range(len(node.inputs))]
    for edge, extent in zip(node.inputs, extents, strict=True):
        if extent == 1 < max(extents) and edge.node in graph.needs_gradient:
            yield edge


def _makers(graph: Graph, edge: Edge, hosts: Collection[str]) -> set[str] | None:
    """The nearest operators that make a tensor at which it can be changed; None if there are not such everywhere."""
    node = graph.node(edge.node)
    if node.kind in SOURCES:
        return None
    if node.name in hosts and len(node.output_shapes) == 1:
        return {node.name}
    if not lends_on(node):
        return None
    found: set[str] = set()
    for source in node.inputs:
        if graph.node(source.node).kind not in ("parameter", "constant"):
            makers = _makers(graph, source, hosts)
            if makers is None:
                return None
            found |= makers
    return found

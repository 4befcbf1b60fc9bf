"""With what partition layers make channels that are split into pieces later, so that nothing has to be sent for it."""

from __future__ import annotations

from collections.abc import Iterator

from convmesh.graph import Edge, Graph, Node
from convmesh.plan.along import across_pieces, cuts_channels, pieces_of
from convmesh.plan.followers import PASSING
from convmesh.plan.partitions import Lists, contiguous
from convmesh.plan.weighted import WEIGHTED


def partitions_for_pieces(graph: Graph, num_ranks: int) -> dict[str, Lists]:
    """The partitions that suit later splits of channels, where contiguous ones don't.

    Tensors that are added up, multiplied or passed on channel by channel need one partition. Of several splits of such
    tensors the first counts.

    Args:
        graph: The network.
        num_ranks: Ranks on the channel axis.

    Returns:
        Name of a convolution or dense layer to the channels that each rank should make.
    """
    streams = _Streams(graph)
    wanted: dict[Edge, Lists] = {}
    for node in graph:
        if not cuts_channels(node) or node.call is None:
            continue
        sizes = node.attributes["sizes"]
        lists = across_pieces(sizes, num_ranks)
        if lists is not None and pieces_of(contiguous(sum(sizes), num_ranks), sizes) is None:
            wanted.setdefault(streams.root(node.inputs[0]), lists)
    layers = [node for node in graph if node.kind in WEIGHTED]
    return {
        node.name: wanted[root]
        for node in layers
        for root in [streams.root(Edge(node.name))]
        if root in wanted and node.shape[1] == sum(map(len, wanted[root]))
    }


class _Streams:
    """Tensors whose channels must be divided alike, as sets with one of them as its root."""

    def __init__(self, graph: Graph) -> None:
        self._parents: dict[Edge, Edge] = {}
        for node in graph:
            for edge in _alike(graph, node):
                self._parents[self.root(edge)] = self.root(Edge(node.name))

    def root(self, edge: Edge) -> Edge:
        while edge in self._parents and self._parents[edge] != edge:
            edge = self._parents[edge]
        return edge


def _alike(graph: Graph, node: Node) -> Iterator[Edge]:
    """The inputs of an operator that need the partition of its output."""
    depthwise = node.kind == "convolution" and node.attributes["groups"] == node.shape[1]
    for edge in node.inputs if node.kind in PASSING or depthwise else ():
        if graph.node(edge.node).kind != "parameter" and graph.shape(edge)[1:2] == node.shape[1:2]:
            yield edge

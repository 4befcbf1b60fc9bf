"""What can be done where the channels of the images are too few for the ranks."""

from __future__ import annotations

from convmesh.graph import Edge, Graph, Node

_LARGEST_BLOCK = 16


def regrouping_ways(graph: Graph, node: Node, num_ranks: int) -> list[str]:
    """Ways to give a convolution that takes the images a channel for every rank, as clauses with their YAML.

    Args:
        graph: The network.
        node: An operator.
        num_ranks: Ranks on the channel axis.

    Returns:
        What works for it exactly; nothing for an operator that does not take the images, or not alone.
    """
    sources = [edge for edge in node.inputs if graph.node(edge.node).kind == "input"]
    alone = [graph.consumers(Edge(edge.node)) == (node,) for edge in sources]
    if node.kind != "convolution" or node.attributes["transposed"] or alone != [True]:
        return []
    num_channels, *sizes = graph.shape(sources[0])[1:]
    ways = [f"add zero channels in the run file with 'data: {{channels: {{pad_to: {num_ranks}}}}}'"]
    multiples = [*sizes, *node.attributes["stride"]]
    for block in range(2, _LARGEST_BLOCK + 1):
        if num_channels * block ** len(sizes) >= num_ranks and not any(number % block for number in multiples):
            ways.append(
                f"make {num_channels * block ** len(sizes)} channels of blocks of pixels with "
                f"'data: {{channels: {{space_to_depth: {block}}}}}'"
            )
            break
    return ways

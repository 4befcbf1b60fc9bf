"""Activations: what an operator's forward keeps for its backward.

What is kept is what PyTorch's derivative formulas name (``tools/autograd/derivatives.yaml`` of its source); parameters
and running statistics are not activations. Per kind:

| kind | keeps |
|---|---|
| convolution, dense | its input |
| batch, instance norm | its input; mean and inverse deviation in float32, per channel, or per sample and channel |
| group, layer norm | its input; mean and inverse deviation per sample and group, or per normalised row |
| max pooling | its input; the place of each maximum as int64 |
| average pooling | its input |
| adaptive pooling | its input, unless it is a global mean |
| element-wise | its input or output, as `convmesh.graph.elementwise` says |
| multiply | each input that the other's gradient needs |
| softmax | its output |
| dropout | its mask in the data type of the input, as on CPU (a fused CUDA kernel keeps one byte per element) |
| the rest | nothing |

A tensor that several operators keep is there once: the output of a ReLU is also the input of the next convolution.
Flatten, reshape, transpose, split and slice give views, which keep what they view. Operators through which no gradient
flows keep nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from convmesh.graph.elementwise import FUNCTIONS
from convmesh.graph.graph import Edge, Graph, Node

VIEWS = ("flatten", "reshape", "transpose", "split", "slice")
"""Kinds whose outputs share the memory of their input."""

_STATISTIC_BYTES = 4
_INDEX_BYTES = 8


@dataclass(frozen=True)
class Kept:
    """What one operator keeps.

    Args:
        tensors: Tensors of the graph.
        num_bytes: Bytes of what is no tensor of the graph: statistics, masks, indices.
    """

    tensors: tuple[Edge, ...] = ()
    num_bytes: int = 0


def inputs(_graph: Graph, node: Node) -> Kept:
    """The input."""
    return Kept(node.inputs[:1])


def nothing(_graph: Graph, _node: Node) -> Kept:
    """Nothing."""
    return Kept()


def output(_graph: Graph, node: Node) -> Kept:
    """The output."""
    return Kept((Edge(node.name),))


def norm(_graph: Graph, node: Node) -> Kept:
    """The input and two statistics per normalised set of elements."""
    num_samples, *rest = node.shape
    if node.kind == "batch_norm":
        num_sets = 0 if node.attributes["statistics"] == "running" else rest[0]
    elif node.kind == "instance_norm":
        num_sets = num_samples * rest[0]
    elif node.kind == "group_norm":
        num_sets = num_samples * int(node.attributes["groups"])
    else:
        num_sets = math.prod(node.shape[: len(node.shape) - int(node.attributes["num_dims"])])
    return Kept(node.inputs[:1], num_bytes=2 * num_sets * _STATISTIC_BYTES)


def max_pool(_graph: Graph, node: Node) -> Kept:
    """The input and the place of each maximum."""
    return Kept(node.inputs[:1], num_bytes=math.prod(node.shape) * _INDEX_BYTES)


def adaptive_pool(graph: Graph, node: Node) -> Kept:
    """Nothing for a global mean, whose gradient needs the size alone."""
    if node.attributes["function"] == "max":
        return max_pool(graph, node)
    return Kept() if set(node.attributes["output_size"]) == {1} else Kept(node.inputs[:1])


def elementwise(_graph: Graph, node: Node) -> Kept:
    """As the table of functions says."""
    keeps = FUNCTIONS[node.attributes["function"]].keeps
    own = Kept((Edge(node.name),))
    return {"nothing": Kept(), "output": own, "first": Kept(node.inputs[:1]), "inputs": Kept(node.inputs)}[keeps]


def multiply(graph: Graph, node: Node) -> Kept:
    """For each input that needs a gradient, the other."""
    if len(node.inputs) != 2:
        return Kept(node.inputs)
    first, second = node.inputs
    kept = [other for own, other in ((first, second), (second, first)) if own.node in graph.needs_gradient]
    return Kept(tuple(kept))


def dropout(_graph: Graph, node: Node) -> Kept:
    """The mask: per element, or per channel of a sample."""
    if node.attributes["p"] == 0:
        return Kept()
    kept = node.shape[:2] if node.attributes["whole_channels"] else node.shape
    return Kept(num_bytes=math.prod(kept) * node.element_bytes)


def saved_bytes(graph: Graph, keeps: Mapping[str, Callable[[Graph, Node], Kept]]) -> dict[str, int]:
    """Bytes that each operator adds to what is kept, each tensor counted at the first operator that keeps it.

    Args:
        graph: The network.
        keeps: What an operator keeps, by kind.

    Returns:
        Node name to bytes, for all nodes.
    """
    counted: set[Edge] = set()
    parameters = {node.name for node in graph if node.kind == "parameter"}
    found: dict[str, int] = {}
    for node in graph:
        kept = keeps[node.kind](graph, node) if node.name in graph.needs_gradient else Kept()
        roots = {storage(graph, edge) for edge in kept.tensors}
        fresh = {root for root in roots - counted if root.node not in parameters}
        counted |= fresh
        found[node.name] = kept.num_bytes + sum(tensor_bytes(graph, root) for root in fresh)
    return found


def storage(graph: Graph, edge: Edge) -> Edge:
    """The tensor whose memory a tensor shares: itself, unless it is a view."""
    node = graph.node(edge.node)
    return storage(graph, node.inputs[0]) if node.kind in VIEWS else edge


def tensor_bytes(graph: Graph, edge: Edge) -> int:
    """Bytes of one tensor."""
    return math.prod(graph.shape(edge)) * graph.node(edge.node).element_bytes

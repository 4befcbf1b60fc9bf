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
| maximum along dims | its input and output; where the first of equal ones counts, its place as int64 |
| softmax | its output |
| dropout | its mask in the data type of the input, as on CPU (a fused CUDA kernel keeps one byte per element) |
| the rest | nothing |

A tensor that several operators keep is there once: the output of a ReLU is also the input of the next convolution.
Flatten, reshape, transpose, split and slice give views, which keep what they view. Operators through which no gradient
flows keep nothing.

A block that is recomputed (`convmesh.graph.blocks`) keeps its input alone; what its operators keep is there again
while its own backward runs. For one rank of a plan, `convmesh.plan.activations` gives both by operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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


def maximum(_graph: Graph, node: Node) -> Kept:
    """The input and the output, which are compared; or the place of the first maximum."""
    if node.attributes["ties"] == "first":
        return Kept(num_bytes=math.prod(node.shape) * _INDEX_BYTES)
    return Kept((*node.inputs[:1], Edge(node.name)))


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


class Storages(Protocol):
    """Where tensors lie, and their sizes: of the whole network, or of one rank's part of it."""

    def local(self, node: Node) -> Node:
        """The operator with the shapes with which it works."""
        ...

    def taken(self, node: Node, edge: Edge) -> Hashable:
        """The memory of a tensor as an operator takes it."""
        ...

    def made(self, node: Node) -> Hashable:
        """The memory of the first tensor that an operator makes."""
        ...

    def given(self, edge: Edge) -> Hashable:
        """The memory of a tensor as it is handed on."""
        ...

    def num_bytes(self, storage: Hashable) -> int:
        """Bytes of a memory; 0 of parameters, which are no activations."""
        ...


class Whole:
    """The tensors of the whole network.

    Args:
        graph: The network.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def local(self, node: Node) -> Node:
        """The operator itself."""
        return node

    def taken(self, node: Node, edge: Edge) -> Edge:
        """The tensor that it is or views."""
        del node
        return storage(self._graph, edge)

    def made(self, node: Node) -> Edge:
        """The tensor that it is or views."""
        return storage(self._graph, Edge(node.name))

    def given(self, edge: Edge) -> Edge:
        """The tensor that it is or views."""
        return storage(self._graph, edge)

    def num_bytes(self, storage: Hashable) -> int:
        """Bytes of the tensor."""
        if not isinstance(storage, Edge) or self._graph.node(storage.node).kind == "parameter":
            return 0
        return tensor_bytes(self._graph, storage)


@dataclass(frozen=True)
class Activations:
    """What one forward keeps for its backward.

    Args:
        kept: Bytes that each operator adds to what is kept from the forward to its backward, by node name; a memory
            that several keep counts at the first. Of a block that is recomputed that is its input, at its first
            operator, unless an earlier operator keeps it too.
        again: Bytes that each operator of a recomputed block keeps when the block is computed again, by node name; they
            last through the backward of that block alone. 0 for all other operators.
    """

    kept: Mapping[str, int]
    again: Mapping[str, int]

    @property
    def kept_bytes(self) -> int:
        """All that is kept at the end of the forward."""
        return sum(self.kept.values())


def activations(
    graph: Graph,
    keeps: Mapping[str, Callable[[Graph, Node], Kept]],
    *,
    recomputed: Sequence[Collection[str]] = (),
    inputs_of: Sequence[Edge] = (),
    storages: Storages | None = None,
) -> Activations:
    """What each operator keeps, some blocks being computed again in the backward.

    Args:
        graph: The network.
        keeps: What an operator keeps, by kind.
        recomputed: Names of the operators of each block that is computed again; blocks share none.
        inputs_of: The tensor that each of these blocks takes.
        storages: Where tensors lie; those of the whole network if left out.

    Returns:
        Bytes by operator.
    """
    where = storages if storages is not None else Whole(graph)
    block_of = {name: number for number, names in enumerate(recomputed) for name in names}
    sources = [where.given(edge) for edge in inputs_of]
    seen: set[Hashable] = set()
    seen_again: list[set[Hashable]] = [{source} for source in sources]
    kept = dict.fromkeys((node.name for node in graph), 0)
    again = dict(kept)
    firsts: dict[int, str] = {}
    for node in graph:
        roots, num_bytes = what_is_kept(graph, node, keeps, where)
        number = block_of.get(node.name)
        if number is None:
            kept[node.name] = num_bytes + sum(where.num_bytes(root) for root in roots - seen)
            seen |= roots
            continue
        first = firsts.setdefault(number, node.name)
        again[node.name] = num_bytes + sum(where.num_bytes(root) for root in roots - seen_again[number])
        seen_again[number] |= roots
        if (roots or num_bytes) and sources[number] not in seen:
            seen.add(sources[number])
            kept[first] += where.num_bytes(sources[number])
    return Activations(kept=kept, again=again)


def what_is_kept(
    graph: Graph, node: Node, keeps: Mapping[str, Callable[[Graph, Node], Kept]], where: Storages
) -> tuple[set[Hashable], int]:
    """Memories that an operator keeps, and bytes of what is no tensor of the graph.

    Args:
        graph: The network.
        node: The operator.
        keeps: What an operator keeps, by kind.
        where: Where tensors lie.

    Returns:
        Nothing of an operator through which no gradient flows.
    """
    if node.name not in graph.needs_gradient:
        return set(), 0
    found = keeps[node.kind](graph, where.local(node))
    roots = {where.made(node) if edge.node == node.name else where.taken(node, edge) for edge in found.tensors}
    return {root for root in roots if where.num_bytes(root)}, found.num_bytes


def storage(graph: Graph, edge: Edge) -> Edge:
    """The tensor whose memory a tensor shares: itself, unless it is a view."""
    node = graph.node(edge.node)
    return storage(graph, node.inputs[0]) if node.kind in VIEWS else edge


def tensor_bytes(graph: Graph, edge: Edge) -> int:
    """Bytes of one tensor."""
    return math.prod(graph.shape(edge)) * graph.node(edge.node).element_bytes

"""The one table of rules: what is known of each kind of operator.

Everything else asks here: the listing of a network, plans, costs and memory. A kind without an entry can't be in a
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convmesh.graph import costs, saved, shapes, splits
from convmesh.graph.costs import Cost
from convmesh.graph.graph import Graph, Node, Shape
from convmesh.graph.splits import Splits

ShapeRule = Callable[[Mapping[str, Any], Sequence[Shape]], tuple[Shape, ...]]


@dataclass(frozen=True)
class Rule:
    """What is known of a kind of operator.

    Args:
        shape: From attributes and input shapes to output shapes; None where only the trace knows.
        cost: What it computes.
        kept: What it keeps for the backward.
        splits: What it can be split along.
    """

    shape: ShapeRule | None
    cost: Callable[[Graph, Node], Cost]
    kept: Callable[[Graph, Node], saved.Kept]
    splits: Callable[[Graph, Node], Splits]


RULES: Mapping[str, Rule] = {
    "input": Rule(None, costs.nothing, saved.nothing, splits.source),
    "parameter": Rule(None, costs.nothing, saved.nothing, splits.source),
    "constant": Rule(None, costs.nothing, saved.nothing, splits.source),
    "convolution": Rule(shapes.convolution, costs.convolution, saved.inputs, splits.convolution),
    "dense": Rule(shapes.dense, costs.dense, saved.inputs, splits.dense),
    "batch_norm": Rule(shapes.unchanged, costs.norm, saved.norm, splits.free),
    "group_norm": Rule(shapes.unchanged, costs.norm, saved.norm, splits.per_sample_norm),
    "instance_norm": Rule(shapes.unchanged, costs.norm, saved.norm, splits.per_sample_norm),
    "layer_norm": Rule(shapes.unchanged, costs.norm, saved.norm, splits.layer_norm),
    "dropout": Rule(shapes.unchanged, costs.dropout, saved.dropout, splits.free),
    "max_pool": Rule(shapes.pool, costs.pool, saved.max_pool, splits.free),
    "avg_pool": Rule(shapes.pool, costs.pool, saved.inputs, splits.free),
    "adaptive_pool": Rule(shapes.adaptive_pool, costs.reduction, saved.adaptive_pool, splits.adaptive_pool),
    "elementwise": Rule(shapes.broadcast, costs.elementwise, saved.elementwise, splits.binary),
    "add": Rule(shapes.broadcast, costs.add, saved.nothing, splits.binary),
    "multiply": Rule(shapes.broadcast, costs.multiply, saved.multiply, splits.binary),
    "concat": Rule(shapes.concat, costs.nothing, saved.nothing, splits.along),
    "split": Rule(shapes.split, costs.nothing, saved.nothing, splits.along),
    "slice": Rule(shapes.slice_, costs.nothing, saved.nothing, splits.along),
    "flatten": Rule(shapes.flatten, costs.nothing, saved.nothing, splits.flatten),
    "reshape": Rule(shapes.reshape, costs.nothing, saved.nothing, splits.reshape),
    "transpose": Rule(shapes.transpose, costs.nothing, saved.nothing, splits.transpose),
    "channel_shuffle": Rule(shapes.unchanged, costs.nothing, saved.nothing, splits.free),
    "mean": Rule(shapes.reduction, costs.reduction, saved.nothing, splits.reduction),
    "sum": Rule(shapes.reduction, costs.reduction, saved.nothing, splits.reduction),
    "amax": Rule(shapes.reduction, costs.reduction, saved.maximum, splits.reduction),
    "softmax": Rule(shapes.unchanged, costs.softmax, saved.output, splits.along),
    "upsample": Rule(shapes.upsample, costs.upsample, saved.nothing, splits.upsample),
    "pad": Rule(shapes.pad, costs.nothing, saved.nothing, splits.pad),
    "opaque": Rule(None, costs.nothing, saved.inputs, splits.opaque),
}
"""Kind to its rule."""


def output_shapes(kind: str, attributes: Mapping[str, Any], input_shapes: Sequence[Shape]) -> tuple[Shape, ...] | None:
    """The output shapes of an operator.

    Args:
        kind: A key of ``RULES``.
        attributes: As `convmesh.graph.kinds` lists them.
        input_shapes: Shape of each input.

    Returns:
        One shape per output; None for kinds whose shapes only the network itself knows.
    """
    rule = RULES[kind].shape
    return None if rule is None else rule(attributes, input_shapes)


def node_cost(graph: Graph, node: Node) -> Cost:
    """What an operator computes; the conventions are in `convmesh.graph.costs`."""
    cost = RULES[node.kind].cost(graph, node)
    return cost if node.name in graph.needs_gradient else Cost(cost.multiply_adds, cost.flops_forward)


def total_cost(graph: Graph) -> Cost:
    """What all operators compute together."""
    return sum((node_cost(graph, node) for node in graph), Cost())


def node_splits(graph: Graph, node: Node) -> Splits:
    """What an operator can be split along, and why not along the rest."""
    return RULES[node.kind].splits(graph, node)


def saved_activations(graph: Graph) -> dict[str, int]:
    """Bytes that each operator adds to what the forward keeps for the backward.

    A tensor that several operators keep counts at the first of them; `convmesh.graph.saved` lists what is kept.

    Args:
        graph: The network.

    Returns:
        Node name to bytes, for all nodes.
    """
    return dict(saved.activations(graph, KEEPS).kept)


KEEPS: Mapping[str, Callable[[Graph, Node], saved.Kept]] = {kind: rule.kept for kind, rule in RULES.items()}
"""What each kind of operator keeps."""

"""The graph of a network at another number of samples than it was traced with, without tracing it again.

Shapes follow from the table of rules, as they did in the trace; parameters and constants stay. Only where an operator
names a number of samples itself (a reshape to fixed numbers, a slice or split of samples) does the size not follow, and
there the graph is refused unless the number stands for whole samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from convmesh.errors import ModelError
from convmesh.graph.graph import Graph, Node, Shape
from convmesh.graph.rules import output_shapes


def with_samples(graph: Graph, num_samples: int) -> Graph:
    """The same network on another number of samples.

    Args:
        graph: The network, with one or several inputs of equally many samples.
        num_samples: Samples, from 1.

    Returns:
        What tracing it with so many samples gives.

    Raises:
        ModelError: If an operator works along samples in a way that can't be carried over.
    """
    before = graph.inputs[0].shape[0]
    if before == num_samples:
        return graph
    shapes: dict[str, tuple[Shape, ...]] = {}
    nodes = []
    for node in graph:
        inputs = [shapes[edge.node][edge.output] for edge in node.inputs]
        resized = _resize(graph, node, inputs, before=before, after=num_samples)
        shapes[node.name] = resized.output_shapes
        nodes.append(resized)
    return Graph(tuple(nodes), outputs=graph.outputs)


def _resize(graph: Graph, node: Node, inputs: Sequence[Shape], *, before: int, after: int) -> Node:
    if node.kind in ("parameter", "constant"):
        return node
    if node.kind in ("input", "opaque"):
        return dataclasses.replace(node, output_shapes=tuple(_scaled(s, before, after) for s in node.output_shapes))
    attributes = node.attributes
    if node.kind in ("split", "slice") and attributes["dim"] == 0:
        raise _refusal(node, f"it is a {node.kind} of samples")
    if node.kind == "reshape":
        attributes = _reshape(graph, node, inputs[0])
    found = output_shapes(node.kind, attributes, inputs)
    assert found is not None  # Kinds without a rule are dealt with above.
    return dataclasses.replace(node, attributes=attributes, output_shapes=found)


def _reshape(graph: Graph, node: Node, source: Shape) -> dict[str, Any]:
    """The first dim of a reshape holds the samples, or a multiple of them."""
    old_source = graph.shape(node.inputs[0])
    target = tuple(node.attributes["shape"])
    if source == old_source:
        return dict(node.attributes)
    if not target or target[0] * source[0] % old_source[0]:
        raise _refusal(node, f"it reshapes {old_source} to {target}")
    return {**node.attributes, "shape": (target[0] * source[0] // old_source[0], *target[1:])}


def _scaled(shape: Shape, before: int, after: int) -> Shape:
    return (after, *shape[1:]) if shape and shape[0] == before else shape


def _refusal(node: Node, reason: str) -> ModelError:
    return ModelError(
        f"the network can't be told for another number of samples: {reason} ({node.name})",
        fix="Trace it with the micro-batch that is wanted",
    )

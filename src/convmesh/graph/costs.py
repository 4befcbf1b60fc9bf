"""What operators compute: multiply-adds as papers count them, and FLOPs forward and backward.

``multiply_adds`` counts the multiplications of convolutions and dense layers alone, each with its addition as one,
biases and everything else left out: the convention of the residual networks' paper (https://arxiv.org/abs/1512.03385,
table 1) and of fvcore's and torchinfo's figures for them. ResNet-50 at 224x224: 4.09 G.

FLOPs count multiplications and additions apart (twice the multiply-adds) and also what the other operators do:

| kind | forward, per | backward |
|---|---|---|
| convolution, dense | 2 per multiply-add; 1 per output for a bias | forward for the weight, and for the input |
| batch, group, instance, layer norm | 8 per element (mean 1, variance 3, scaling 4) | 8 (two sums 3, input 5) |
| pooling | elements of a window per output | average: the same; maximum: 1 per output |
| global and adaptive pooling, mean, sum, maximum along dims | 1 per input element | 1 per input element |
| softmax | 5 per element | 4 |
| dropout | 2 per element | 1 |
| add, multiply, element-wise | `convmesh.graph.elementwise`, per output element | same table |
| upsample | 1 per output for nearest, 2 per linear dim | the same |
| the rest | 0: moves data at most | 0 |

The backward of an input that needs no gradient, like the image, is not counted. An opaque operator counts 0, since
nobody knows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from convmesh.graph.elementwise import FUNCTIONS
from convmesh.graph.graph import Graph, Node


@dataclass(frozen=True)
class Cost:
    """What one operator, or several, compute per forward and backward.

    Args:
        multiply_adds: Of convolutions and dense layers, forward.
        flops_forward: All FLOPs of the forward.
        flops_backward: All FLOPs of the backward.
    """

    multiply_adds: int = 0
    flops_forward: int = 0
    flops_backward: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.multiply_adds + other.multiply_adds,
            self.flops_forward + other.flops_forward,
            self.flops_backward + other.flops_backward,
        )


def convolution(graph: Graph, node: Node) -> Cost:
    """Every output element (input element, if transposed) meets kernel x channels of one group."""
    attributes = node.attributes
    source, target = graph.input_shapes(node)[0], node.shape
    channels = attributes["out_channels"] if attributes["transposed"] else attributes["in_channels"]
    met = math.prod(attributes["kernel"]) * channels // attributes["groups"]
    return _weighted(graph, node, math.prod(source if attributes["transposed"] else target) * met)


def dense(graph: Graph, node: Node) -> Cost:
    """Every output element meets all features."""
    return _weighted(graph, node, math.prod(node.shape) * int(node.attributes["in_features"]))


def norm(_graph: Graph, node: Node) -> Cost:
    """8 FLOPs per element in both directions."""
    return _per_element(node, 8, 8)


def pool(_graph: Graph, node: Node) -> Cost:
    """The elements of a window per output."""
    window = math.prod(node.attributes["kernel"])
    return _per_element(node, window, 1 if node.kind == "max_pool" else window)


def reduction(graph: Graph, node: Node) -> Cost:
    """One per input element."""
    num_elements = math.prod(graph.input_shapes(node)[0])
    return Cost(flops_forward=num_elements, flops_backward=num_elements)


def softmax(_graph: Graph, node: Node) -> Cost:
    """Maximum, subtraction, exponential, sum, division; backward product, sum, subtraction, product."""
    return _per_element(node, 5, 4)


def dropout(_graph: Graph, node: Node) -> Cost:
    """A comparison and a product."""
    return _per_element(node, 2, 1)


def elementwise(_graph: Graph, node: Node) -> Cost:
    """As the table of functions says."""
    function = FUNCTIONS[node.attributes["function"]]
    return _per_element(node, function.num_flops, function.num_flops_backward)


def add(_graph: Graph, node: Node) -> Cost:
    """One addition; its gradient is passed on as it is."""
    return _per_element(node, len(node.inputs) - 1, 0)


def multiply(graph: Graph, node: Node) -> Cost:
    """One product, and one per input that needs a gradient."""
    return _per_element(node, 1, sum(edge.node in graph.needs_gradient for edge in node.inputs))


def upsample(_graph: Graph, node: Node) -> Cost:
    """One read per output element, or a weighted pair per linear dim."""
    num_dims = len(node.shape) - 2
    per_element = 1 if node.attributes["mode"] == "nearest" else 2 * num_dims
    return _per_element(node, per_element, per_element)


def nothing(_graph: Graph, _node: Node) -> Cost:
    """No arithmetic."""
    return Cost()


def _weighted(graph: Graph, node: Node, multiply_adds: int) -> Cost:
    bias = math.prod(node.shape) if node.attributes["bias"] else 0
    weight = node.parameter("weight")
    times = int(weight is not None and weight.trainable) + int(node.inputs[0].node in graph.needs_gradient)
    return Cost(
        multiply_adds=multiply_adds,
        flops_forward=2 * multiply_adds + bias,
        flops_backward=2 * multiply_adds * times + (bias if times else 0),
    )


def _per_element(node: Node, forward: int, backward: int) -> Cost:
    num_elements = math.prod(node.shape)
    return Cost(flops_forward=forward * num_elements, flops_backward=backward * num_elements)

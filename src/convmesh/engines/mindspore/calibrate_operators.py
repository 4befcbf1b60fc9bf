"""Single operators of a graph as cells of MindSpore, and a graph that runs many of them as a training step does.

How long each takes is read from MindSpore's profiler. Between operators stands the sine of one number: each waits for
what was before, and the profile falls into pieces. Inputs are that number spread over a tensor, written right before
the operator as in a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from convmesh.engines.mindspore.layers import operator_of
from convmesh.graph import Graph, Node
from convmesh.graph.graph import Shape
from convmesh.models.mindspore.layers import PaddedMaxPool

MARK, SPREAD = "/Sin-op", "/BroadcastTo-op"
"""Parts of the names of what stands between operators in a profile."""

_ELEMENTWISE: Mapping[str, Any] = {
    "abs": ops.Abs, "erf": ops.Erf, "exp": ops.Exp, "hard_sigmoid": ops.HSigmoid, "hard_swish": ops.HSwish,
    "log": ops.Log, "negative": ops.Neg, "reciprocal": ops.Reciprocal, "relu": ops.ReLU, "relu6": ops.ReLU6,
    "rsqrt": ops.Rsqrt, "sigmoid": ops.Sigmoid, "sqrt": ops.Sqrt, "tanh": ops.Tanh,
}  # fmt: skip
_MOST_INPUTS = 2


def cell_of(graph: Graph) -> nn.Cell | None:
    """The cell that computes an operator.

    Args:
        graph: With that operator alone, at local shapes.

    Returns:
        The cell; None for kinds that are looked up on curves instead.
    """
    node = graph.node("operator")
    shapes = graph.input_shapes(node)
    if node.dtype != "float32" or len(shapes) > _MOST_INPUTS:
        return None
    if len(shapes) == _MOST_INPUTS:
        return _of_two(node)
    return _Weighted(node) if node.kind in ("convolution", "dense") else _of_one(node, shapes[0])


def _of_one(node: Node, shape: Shape) -> nn.Cell | None:
    attributes, is_image = node.attributes, len(shape) == 4
    if node.kind == "elementwise" and attributes["function"] in _ELEMENTWISE:
        return _Call(_ELEMENTWISE[attributes["function"]]())
    if node.kind == "max_pool" and is_image:
        return _max_pool(attributes)
    if node.kind == "batch_norm" and is_image and attributes["statistics"] == "batch":
        return nn.BatchNorm2d(shape[1])
    if node.kind == "adaptive_pool" and is_image and attributes["function"] == "mean":
        return nn.AdaptiveAvgPool2d(attributes["output_size"])
    return None


def _of_two(node: Node) -> nn.Cell | None:
    if node.kind == "concat":
        return _Join(node.attributes["dim"])
    operators = {"add": ops.Add, "multiply": ops.Mul}
    return _CallTwo(operators[node.kind]()) if node.kind in operators else None


def _max_pool(attributes: Mapping[str, Any]) -> nn.Cell | None:
    paddings = {size for pair in attributes["padding"] for size in pair}
    if paddings == {0} and not attributes["ceil_mode"]:
        return nn.MaxPool2d(attributes["kernel"], attributes["stride"], pad_mode="valid")
    return PaddedMaxPool() if paddings == {1} and attributes["kernel"] == (3, 3) else None


class Step(nn.Cell):
    """All forwards of some operators, then all backwards in reverse order.

    Args:
        graphs: One operator each.
        cells: The cell of each.
    """

    def __init__(self, graphs: Sequence[Graph], cells: Sequence[nn.Cell]) -> None:
        super().__init__(auto_prefix=False)
        for place, cell in enumerate(cells):
            for parameter in cell.get_parameters():
                parameter.name = f"operator{place}.{parameter.name}"
        self.operators = nn.CellList([_Both(graph, cell) for graph, cell in zip(graphs, cells, strict=True)])
        self.count = len(cells)

    def construct(self, number: Tensor) -> Tensor:
        """Runs all of them.

        Args:
            number: One number, shape (1,).

        Returns:
            One number, once everything is done.
        """
        firsts: tuple[Tensor, ...] = ()
        seconds: tuple[Tensor, ...] = ()
        for operator in self.operators:
            first, second, number = operator.forward(number)
            firsts += (first,)
            seconds += (second,)
        for index in range(self.count):
            place = self.count - 1 - index
            number = self.operators[place].backward(firsts[place], seconds[place], number)
        return number

    @property
    def num_marks(self) -> int:
        """Marks of one run."""
        return sum(2 + operator.takes_two for operator in self.operators)


class _Both(nn.Cell):
    """Forward and backward of one operator."""

    def __init__(self, graph: Graph, cell: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        node = graph.node("operator")
        shapes: tuple[Shape, ...] = graph.input_shapes(node)
        self.cell = cell
        self.parameters = ms.ParameterTuple([p for p in cell.get_parameters() if p.requires_grad])
        self.takes_two = len(shapes) == 2
        self.wanted = tuple(edge.node in graph.needs_gradient for edge in node.inputs)
        self.learns = len(self.parameters) > 0
        self.has_backward = self.learns or any(self.wanted)
        self.differentiate = ops.GradOperation(get_all=True, get_by_list=self.learns, sens_param=True)
        self.spread_first = ops.BroadcastTo(shapes[0])
        self.spread_second = ops.BroadcastTo(shapes[-1])
        self.spread_output = ops.BroadcastTo(node.shape)
        self.mark = ops.Sin()

    def forward(self, number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Runs it forward; returns its inputs and the number that comes after it."""
        first = self.spread_first(number)
        second = first
        if self.takes_two:
            second = self.spread_second(self.mark(ops.depend(number, first)))
            y = self.cell(first, second)
        else:
            y = self.cell(first)
        return first, second, self.mark(ops.depend(number, y))

    def backward(self, first: Tensor, second: Tensor, number: Tensor) -> Tensor:
        """Runs it backward; returns the number that comes after it."""
        if self.has_backward:
            gradient = self.spread_output(number)
            if self.learns:
                gradients, learned = self.differentiate(self.cell, self.parameters)(first, gradient)
                for index in range(len(learned)):
                    number = ops.depend(number, learned[index])
            elif self.takes_two:
                gradients = self.differentiate(self.cell)(first, second, gradient)
            else:
                gradients = self.differentiate(self.cell)(first, gradient)
            for index in range(len(gradients)):
                if self.wanted[index]:
                    number = ops.depend(number, gradients[index])
        return self.mark(number)


class _Weighted(nn.Cell):
    """A convolution or dense layer."""

    def __init__(self, node: Node) -> None:
        super().__init__(auto_prefix=False)
        generator = np.random.default_rng(0)
        for entry in node.parameters:
            if entry.role in ("weight", "bias"):
                values = Tensor(0.01 * generator.standard_normal(entry.shape, np.float32))
                self.insert_param_to_cell(entry.role, Parameter(values, entry.role, entry.trainable))
        self.operator = operator_of(node, self.weight, groups=int(node.attributes.get("groups", 1)))
        self.has_bias = bool(node.attributes["bias"])

    def construct(self, x: Tensor) -> Tensor:
        y = self.operator(x, self.weight)
        return ops.bias_add(y, self.bias) if self.has_bias else y


class _Call(nn.Cell):
    def __init__(self, operator: Any) -> None:
        super().__init__(auto_prefix=False)
        self.operator = operator

    def construct(self, x: Tensor) -> Tensor:
        return self.operator(x)


class _CallTwo(nn.Cell):
    def __init__(self, operator: Any) -> None:
        super().__init__(auto_prefix=False)
        self.operator = operator

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return self.operator(x, y)


class _Join(nn.Cell):
    def __init__(self, dim: int) -> None:
        super().__init__(auto_prefix=False)
        self.join = ops.Concat(dim)

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return self.join((x, y))

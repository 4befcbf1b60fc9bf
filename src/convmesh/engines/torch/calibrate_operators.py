"""Single operators of a graph as functions of PyTorch, to be measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convmesh.engines.torch.layers import operator_of
from convmesh.graph import Node

Function = Callable[[Sequence[Tensor], Mapping[str, Tensor]], Tensor]
"""From inputs, and parameters by role, to the output."""

_ELEMENTWISE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs, "cos": torch.cos, "elu": F.elu, "erf": torch.erf, "exp": torch.exp, "gelu": F.gelu,
    "hard_sigmoid": F.hardsigmoid, "hard_swish": F.hardswish, "leaky_relu": F.leaky_relu, "log": torch.log,
    "log1p": torch.log1p, "mish": F.mish, "negative": torch.neg, "reciprocal": torch.reciprocal, "relu": F.relu,
    "relu6": F.relu6, "rsqrt": torch.rsqrt, "sigmoid": torch.sigmoid, "silu": F.silu, "sin": torch.sin,
    "softplus": F.softplus, "sqrt": torch.sqrt, "tanh": torch.tanh,
}  # fmt: skip


_IN_PLACE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_, "relu6": lambda x: F.relu6(x, inplace=True), "silu": lambda x: F.silu(x, inplace=True),
    "hard_swish": lambda x: F.hardswish(x, inplace=True),
}  # fmt: skip


def in_place_of(node: Node) -> Callable[[Tensor], Tensor] | None:
    """An activation that networks usually write over its input, as torchvision's do; None for other operators.

    A graph does not tell whether one does: what is measured is the usual.
    """
    return _IN_PLACE.get(node.attributes["function"]) if node.kind == "elementwise" else None


def function_of(node: Node, input_shapes: Sequence[tuple[int, ...]]) -> Function | None:
    """The function that an operator computes.

    Args:
        node: The operator, at local shapes.
        input_shapes: Shape of each of its inputs.

    Returns:
        The function; None for kinds that are looked up on curves instead.
    """
    if node.kind in ("convolution", "dense"):
        return _weighted(node)
    if node.kind.endswith("_norm"):
        return _norm(node, input_shapes[0])
    if node.kind.endswith("_pool"):
        return _pool(node)
    return _other(node)


def _weighted(node: Node) -> Function:
    operator = operator_of(node, groups=int(node.attributes.get("groups", 1)))
    return lambda inputs, parameters: operator(inputs[0], parameters["weight"], parameters.get("bias"))


def _norm(node: Node, shape: tuple[int, ...]) -> Function | None:
    attributes = node.attributes
    if node.kind == "batch_norm":
        if attributes["statistics"] != "batch":
            return None
        mean, variance = torch.zeros(shape[1]), torch.ones(shape[1])
        return lambda x, p: F.batch_norm(x[0], mean, variance, p.get("weight"), p.get("bias"), training=True)
    if node.kind == "group_norm":
        return lambda x, p: F.group_norm(x[0], attributes["groups"], p.get("weight"), p.get("bias"))
    if node.kind == "layer_norm":
        size = list(shape[len(shape) - attributes["num_dims"] :])
        return lambda x, p: F.layer_norm(x[0], size, p.get("weight"), p.get("bias"))
    return lambda x, p: F.instance_norm(x[0], weight=p.get("weight"), bias=p.get("bias"))


def _pool(node: Node) -> Function | None:
    attributes, num_dims = node.attributes, len(node.shape) - 2
    if node.kind == "adaptive_pool":
        name = "avg" if attributes["function"] == "mean" else "max"
        adaptive: Any = getattr(F, f"adaptive_{name}_pool{num_dims}d")
        return lambda x, _: adaptive(x[0], attributes["output_size"])
    if any(before != after for before, after in attributes["padding"]):
        return None
    settings = {
        "kernel_size": attributes["kernel"],
        "stride": attributes["stride"],
        "padding": tuple(before for before, _ in attributes["padding"]),
        "ceil_mode": attributes["ceil_mode"],
    }
    if node.kind == "max_pool":
        settings["dilation"] = attributes["dilation"]
    pool: Any = getattr(F, f"{node.kind.removesuffix('_pool')}_pool{num_dims}d")
    return lambda x, _: pool(x[0], **settings)


def _other(node: Node) -> Function | None:
    attributes = node.attributes
    functions: dict[str, Function] = {
        "add": lambda x, _: x[0] + x[1],
        "multiply": lambda x, _: x[0] * x[1],
        "concat": lambda x, _: torch.cat(list(x), dim=attributes["dim"]),
        "mean": lambda x, _: x[0].mean(attributes["dims"], keepdim=attributes["keep_dims"]),
        "sum": lambda x, _: x[0].sum(attributes["dims"], keepdim=attributes["keep_dims"]),
        "softmax": lambda x, _: (F.log_softmax if attributes["log"] else F.softmax)(x[0], dim=attributes["dim"]),
    }
    if node.kind == "elementwise" and attributes["function"] in _ELEMENTWISE:
        function = _ELEMENTWISE[attributes["function"]]
        return lambda x, _: function(x[0])
    if node.kind in ("add", "multiply") and len(node.inputs) != 2:
        return None
    return functions.get(node.kind)

"""What PyTorch's operators are as kinds of `convmesh.graph`: one function per family of ``aten`` operators.

Each takes a call, whose arguments have the names of the operator's schema, and says what it is; None means that no kind
fits, as for a convolution whose weight is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from convmesh.engines.torch import trace_layers as layers
from convmesh.engines.torch.trace_call import Call, Meaning, positive, shape_of
from convmesh.graph import kinds


def unary(call: Call) -> Meaning | None:
    """Functions of one tensor without numbers, and those whose numbers have one meaning."""
    attributes: dict[str, Any] = {"function": _UNARY[call.name]}
    if call.name == "leaky_relu":
        attributes["negative_slope"] = kinds.number(call["negative_slope"])
    elif call.name == "gelu":
        attributes["approximate"] = call["approximate"]
    elif call.name == "softplus":
        attributes |= {"beta": kinds.number(call["beta"])}
    elif call.name == "elu":
        if (call["scale"], call["input_scale"]) != (1, 1):
            return None
        attributes["alpha"] = kinds.number(call["alpha"])
    return Meaning("elementwise", attributes, (call["self"],))


def clamp(call: Call) -> Meaning:
    """``clamp``, ``hardtanh`` and so ReLU6."""
    lowest, highest = (call["min_val"], call["max_val"]) if call.name == "hardtanh" else (call["min"], call["max"])
    if (lowest, highest) == (0, 6):
        return Meaning("elementwise", {"function": "relu6"}, (call["self"],))
    attributes = {"function": "clamp", "min": _number(lowest), "max": _number(highest)}
    return Meaning("elementwise", attributes, (call["self"],))


def arithmetic(call: Call) -> Meaning | None:
    """``add``, ``sub``, ``rsub``, ``mul``, ``div`` and ``pow`` of two tensors, or of a tensor and a number."""
    first = call["self"]
    second = call["other"] if "other" in call.arguments else call["exponent"]
    if call.arguments.get("alpha", 1) != 1 or call.arguments.get("rounding_mode") is not None:
        return None
    if not isinstance(first, fx.Node):
        return None
    if isinstance(second, fx.Node):
        kind, function = _OF_TWO.get(call.name, ("", None))
        attributes = {} if function is None else {"function": function}
        return Meaning(kind, attributes, (first, second)) if kind else None
    function, value = {
        "add": ("add_scalar", second),
        "sub": ("add_scalar", -second),
        "rsub": ("subtract_from_scalar", second),
        "mul": ("multiply_scalar", second),
        "div": ("multiply_scalar", 1 / second if second else math.inf),
        "pow": ("power_scalar", second),
    }[call.name]
    return Meaning("elementwise", {"function": function, "value": kinds.number(value)}, (first,))


def compare(call: Call) -> Meaning:
    """``gt``, ``le`` and their like: of two tensors, or of a tensor and a number."""
    other = call["other"]
    attributes: dict[str, Any] = {"function": "compare", "relation": call.name}
    if isinstance(other, fx.Node):
        return Meaning("elementwise", attributes, (call["self"], other))
    return Meaning("elementwise", {**attributes, "value": kinds.number(other)}, (call["self"],))


def select(call: Call) -> Meaning | None:
    """``where`` with two tensors."""
    given = (call.arguments.get(name) for name in ("condition", "self", "other"))
    inputs = tuple(tensor for tensor in given if isinstance(tensor, fx.Node))
    return Meaning("elementwise", {"function": "select"}, inputs) if len(inputs) == 3 else None


def square(call: Call) -> Meaning:
    """``square``."""
    return Meaning("elementwise", {"function": "power_scalar", "value": 2.0}, (call["self"],))


def extreme(call: Call) -> Meaning:
    """``maximum`` and ``minimum`` of two tensors."""
    return Meaning("elementwise", {"function": call.name}, (call["self"], call["other"]))


def concat(call: Call) -> Meaning:
    """``cat``."""
    tensors = tuple(call["tensors"])
    return Meaning("concat", {"dim": positive(call["dim"], shape_of(tensors[0]))}, tensors)


def split(call: Call) -> Meaning:
    """``split``, ``split_with_sizes``, ``chunk`` and ``tensor_split``."""
    dim = positive(call["dim"], call.shape("self"))
    sizes = tuple(shape[dim] for shape in call.output_shapes)
    return Meaning("split", {"dim": dim, "sizes": sizes}, (call["self"],))


def slice_(call: Call) -> Meaning:
    """``slice``."""
    shape = call.shape("self")
    dim = positive(call["dim"], shape)
    start, stop, step = slice(call["start"], call["end"], call["step"]).indices(shape[dim])
    if (start, stop, step) == (0, shape[dim], 1):
        return Meaning("identity", inputs=(call["self"],))
    return Meaning("slice", {"dim": dim, "start": start, "stop": stop, "step": step}, (call["self"],))


def reshape(call: Call) -> Meaning:
    """Whatever changes the shape alone: ``view``, ``flatten``, ``unsqueeze`` and their like."""
    kind, attributes = kinds.reshape_kind(call.shape("self"), call.output_shapes[0])
    return Meaning(kind, attributes, (call["self"],))


def transpose(call: Call) -> Meaning:
    """``permute``, ``transpose`` and ``t``."""
    num_dims = len(call.shape("self"))
    order = list(range(num_dims))
    if call.name == "permute":
        order = [dim % num_dims for dim in call["dims"]]
    elif num_dims > 1:
        first, second = (0, 1) if call.name == "t" else (call["dim0"] % num_dims, call["dim1"] % num_dims)
        order[first], order[second] = order[second], order[first]
    if order == list(range(num_dims)):
        return Meaning("identity", inputs=(call["self"],))
    return Meaning("transpose", {"order": tuple(order)}, (call["self"],))


def channel_shuffle(call: Call) -> Meaning:
    """``channel_shuffle``."""
    return Meaning("channel_shuffle", {"groups": call["groups"]}, (call["self"],))


def reduction(call: Call) -> Meaning:
    """``mean`` and ``sum`` over some or all dims."""
    shape = call.shape("self")
    given = call.arguments.get("dim")
    dims = [given] if isinstance(given, int) else given or range(len(shape))
    attributes = {
        "dims": tuple(sorted(positive(dim, shape) for dim in dims)),
        "keep_dims": bool(call.arguments.get("keepdim", False)),
    }
    return Meaning(call.name, attributes, (call["self"],))


def maximum(call: Call) -> Meaning | None:
    """``amax``, and ``max`` along a dim of which nobody takes the places."""
    if call.name == "max" and (call.arguments.get("dim") is None or not call.shape("self")):
        return None
    found = reduction(call)
    ties = "all" if call.name == "amax" else "first"
    return replace(found, kind="amax", attributes={**found.attributes, "ties": ties})


def softmax(call: Call) -> Meaning:
    """``softmax`` and ``log_softmax``."""
    attributes = {"dim": positive(call["dim"], call.shape("self")), "log": call.name == "log_softmax"}
    return Meaning("softmax", attributes, (call["self"],))


def pad(call: Call) -> Meaning:
    """``pad`` in all its modes; PyTorch lists the pairs from the last dim on."""
    flat, num_dims = call["pad"], len(call.shape("self"))
    pairs = [(0, 0)] * num_dims
    for index in range(len(flat) // 2):
        pairs[num_dims - 1 - index] = (flat[2 * index], flat[2 * index + 1])
    mode = call.arguments.get("mode", "constant")
    attributes = {"mode": mode, "padding": tuple(pairs), "value": float(call["value"] or 0.0)}
    return Meaning("pad", attributes, (call["self"],))


def identity(call: Call) -> Meaning:
    """Casts and copies."""
    return Meaning("identity", inputs=(next(iter(call.arguments.values())),))


def _number(value: float | None) -> float | None:
    return None if value is None else kinds.number(value)


_UNARY = {
    "relu": "relu", "relu6": "relu6", "sigmoid": "sigmoid", "tanh": "tanh", "silu": "silu", "mish": "mish",
    "hardswish": "hard_swish", "hardsigmoid": "hard_sigmoid", "exp": "exp", "log": "log", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "abs": "abs", "neg": "negative", "reciprocal": "reciprocal", "leaky_relu": "leaky_relu",
    "gelu": "gelu", "elu": "elu", "softplus": "softplus", "erf": "erf", "sin": "sin", "cos": "cos", "log1p": "log1p",
}  # fmt: skip
_OF_TWO = {
    "add": ("add", None),
    "mul": ("multiply", None),
    "sub": ("elementwise", "subtract"),
    "div": ("elementwise", "divide"),
}
_DIMS = ("1d", "2d", "3d")

OPERATORS: Mapping[str, Callable[[Call], Meaning | None]] = {
    **dict.fromkeys([f"{name}{dims}" for name in ("conv", "conv_transpose") for dims in _DIMS], layers.convolution),
    **dict.fromkeys([f"{name}_pool{dims}" for name in ("max", "avg") for dims in _DIMS], layers.pool),
    **dict.fromkeys([f"adaptive_{name}_pool{dims}" for name in ("max", "avg") for dims in _DIMS], layers.adaptive_pool),
    **dict.fromkeys([f"upsample_nearest{dims}" for dims in _DIMS], layers.upsample),
    **dict.fromkeys(["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"], layers.upsample),
    **dict.fromkeys(_UNARY, unary),
    **dict.fromkeys(["clamp", "hardtanh"], clamp),
    **dict.fromkeys(["add", "sub", "rsub", "mul", "div", "pow"], arithmetic),
    **dict.fromkeys(["maximum", "minimum"], extreme),
    **dict.fromkeys(["gt", "ge", "lt", "le", "eq", "ne"], compare),
    **dict.fromkeys(["split", "split_with_sizes", "chunk", "tensor_split"], split),
    **dict.fromkeys(["view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"], reshape),
    **dict.fromkeys(["permute", "transpose", "t"], transpose),
    **dict.fromkeys(["mean", "sum"], reduction),
    **dict.fromkeys(["amax", "max"], maximum),
    **dict.fromkeys(["softmax", "log_softmax"], softmax),
    **dict.fromkeys(["pad", "constant_pad_nd"], pad),
    **dict.fromkeys(["group_norm", "layer_norm", "instance_norm"], layers.norm),
    **dict.fromkeys(["dropout", "feature_dropout"], layers.dropout),
    **dict.fromkeys(["contiguous", "clone", "alias", "detach", "to", "_to_copy"], identity),
    "linear": layers.dense,
    "batch_norm": layers.batch_norm,
    "prelu": layers.prelu,
    "square": square,
    "where": select,
    "cat": concat,
    "slice": slice_,
    "channel_shuffle": channel_shuffle,
}
"""Operator name to what it is."""

"""What PyTorch's operators are as kinds of `convmesh.graph`: one function per family of ``aten`` operators.

Each takes a call, whose arguments have the names of the operator's schema, and says what it is; None means that no kind
fits, as for a convolution whose weight is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from convmesh.graph import kinds
from convmesh.graph.graph import Shape


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Args:
        name: The operator without name space, overload and the mark of working in place: ``conv2d``.
        arguments: Value by the schema's name, defaults filled in; tensors are nodes of PyTorch's graph.
        output_shapes: Shapes of what it returns.
        own: Whether a node is a parameter or buffer of the network.
    """

    name: str
    arguments: Mapping[str, Any]
    output_shapes: tuple[Shape, ...]
    own: Callable[[Any], bool]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def shape(self, name: str = "input") -> Shape:
        """The shape of a tensor argument."""
        return shape_of(self.arguments[name])


@dataclass(frozen=True)
class Meaning:
    """What a call is.

    Args:
        kind: A kind of the table of rules, or ``"identity"``.
        attributes: Its attributes.
        inputs: Its tensors.
        parameters: Its parameters by role.
    """

    kind: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[fx.Node, ...] = ()
    parameters: Mapping[str, fx.Node] = field(default_factory=dict)


def shape_of(node: fx.Node) -> Shape:
    """The shape that export found for a node."""
    return tuple(int(size) for size in node.meta["val"].shape)


def _own(call: Call, **by_role: Any) -> dict[str, fx.Node] | None:
    """Parameters by role, those that are None left out; None if one is computed."""
    given = {role: node for role, node in by_role.items() if node is not None}
    return given if all(call.own(node) for node in given.values()) else None


def _dim(dim: int, shape: Shape) -> int:
    return dim % len(shape)


def convolution(call: Call) -> Meaning | None:
    """``conv1d`` to ``conv3d``, ``conv_transpose1d`` to ``conv_transpose3d``."""
    parameters = _own(call, weight=call["weight"], bias=call["bias"])
    if parameters is None:
        return None
    shape, weight = call.shape(), shape_of(call["weight"])
    kernel = weight[2:]
    if len(shape) != len(weight):
        return None
    padding = call["padding"]
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, kinds.spread(call["dilation"], len(kernel)), strict=True)]
        pairs = tuple((total // 2, total - total // 2) for total in totals)
    else:
        pairs = kinds.pairs(0 if padding == "valid" else padding, len(kernel))
    attributes = kinds.convolution(
        in_channels=shape[1],
        out_channels=call.output_shapes[0][1],
        kernel=kernel,
        stride=call["stride"],
        padding=pairs,
        dilation=call["dilation"],
        groups=call["groups"],
        bias=call["bias"] is not None,
        transposed="transpose" in call.name,
        output_padding=call.arguments.get("output_padding", 0),
    )
    return Meaning("convolution", attributes, (call["input"],), parameters)


def dense(call: Call) -> Meaning | None:
    """``linear``."""
    parameters = _own(call, weight=call["weight"], bias=call["bias"])
    if parameters is None:
        return None
    out_features, in_features = shape_of(call["weight"])
    attributes = {"in_features": in_features, "out_features": out_features, "bias": call["bias"] is not None}
    return Meaning("dense", attributes, (call["input"],), parameters)


def batch_norm(call: Call) -> Meaning | None:
    """``batch_norm``."""
    parameters = _own(
        call,
        weight=call["weight"],
        bias=call["bias"],
        running_mean=call["running_mean"],
        running_var=call["running_var"],
    )
    if parameters is None:
        return None
    attributes = {
        "momentum": kinds.number(call["momentum"]),
        "eps": kinds.number(call["eps"]),
        "statistics": "batch" if call["training"] else "running",
    }
    return Meaning("batch_norm", attributes, (call["input"],), parameters)


def norm(call: Call) -> Meaning | None:
    """``group_norm``, ``layer_norm`` and ``instance_norm``."""
    tracked = {role: call.arguments.get(role) for role in ("running_mean", "running_var")}
    parameters = _own(call, weight=call["weight"], bias=call["bias"], **tracked)
    if parameters is None:
        return None
    attributes: dict[str, Any] = {"eps": kinds.number(call["eps"])}
    if call.name == "group_norm":
        attributes["groups"] = call["num_groups"]
    elif call.name == "layer_norm":
        attributes["num_dims"] = len(call["normalized_shape"])
    return Meaning(call.name, attributes, (call["input"],), parameters)


def dropout(call: Call) -> Meaning:
    """``dropout`` of elements, ``feature_dropout`` of channels."""
    if not call["train"]:
        return Meaning("identity", inputs=(call["input"],))
    attributes = {"p": kinds.number(call["p"]), "whole_channels": call.name == "feature_dropout"}
    return Meaning("dropout", attributes, (call["input"],))


def pool(call: Call) -> Meaning | None:
    """``max_pool1d`` to ``max_pool3d``, ``avg_pool1d`` to ``avg_pool3d``."""
    num_dims = int(call.name[-2])
    if len(call.shape("self")) != num_dims + 2 or call.arguments.get("divisor_override") is not None:
        return None
    kernel = kinds.spread(call["kernel_size"], num_dims)
    stride = call["stride"] or kernel
    padding = kinds.pairs(call["padding"], num_dims)
    if call.name.startswith("max"):
        attributes = kinds.max_pool(
            kernel=kernel,
            stride=stride,
            padding=padding,
            dilation=call["dilation"],
            ceil_mode=call["ceil_mode"],
        )
        return Meaning("max_pool", attributes, (call["self"],))
    attributes = kinds.avg_pool(
        kernel=kernel,
        stride=stride,
        padding=padding,
        ceil_mode=call["ceil_mode"],
        count_padding=call["count_include_pad"],
    )
    return Meaning("avg_pool", attributes, (call["self"],))


def adaptive_pool(call: Call) -> Meaning | None:
    """``adaptive_avg_pool1d`` to ``3d``, ``adaptive_max_pool1d`` to ``3d``."""
    num_dims = int(call.name[-2])
    if len(call.shape("self")) != num_dims + 2:
        return None
    function = "max" if "max" in call.name else "mean"
    attributes = {"function": function, "output_size": call.output_shapes[0][2:]}
    return Meaning("adaptive_pool", attributes, (call["self"],))


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


def prelu(call: Call) -> Meaning | None:
    """``prelu`` with a weight of the network."""
    parameters = _own(call, weight=call["weight"])
    return None if parameters is None else Meaning("elementwise", {"function": "prelu"}, (call["self"],), parameters)


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
    return Meaning("concat", {"dim": _dim(call["dim"], shape_of(tensors[0]))}, tensors)


def split(call: Call) -> Meaning:
    """``split``, ``split_with_sizes``, ``chunk`` and ``tensor_split``."""
    dim = _dim(call["dim"], call.shape("self"))
    sizes = tuple(shape[dim] for shape in call.output_shapes)
    return Meaning("split", {"dim": dim, "sizes": sizes}, (call["self"],))


def slice_(call: Call) -> Meaning:
    """``slice``."""
    shape = call.shape("self")
    dim = _dim(call["dim"], shape)
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
    dims = call.arguments.get("dim") or range(len(shape))
    attributes = {
        "dims": tuple(sorted(_dim(dim, shape) for dim in dims)),
        "keep_dims": bool(call.arguments.get("keepdim", False)),
    }
    return Meaning(call.name, attributes, (call["self"],))


def softmax(call: Call) -> Meaning:
    """``softmax`` and ``log_softmax``."""
    attributes = {"dim": _dim(call["dim"], call.shape("self")), "log": call.name == "log_softmax"}
    return Meaning("softmax", attributes, (call["self"],))


def upsample(call: Call) -> Meaning:
    """``upsample_nearest1d`` to ``3d``, ``upsample_linear1d``, ``upsample_bilinear2d``, ``upsample_trilinear3d``."""
    attributes = {
        "mode": "nearest" if "nearest" in call.name else "linear",
        "output_size": call.output_shapes[0][2:],
        "align_corners": bool(call.arguments.get("align_corners", False)),
    }
    return Meaning("upsample", attributes, (call["input"],))


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
    **dict.fromkeys([f"{name}{dims}" for name in ("conv", "conv_transpose") for dims in _DIMS], convolution),
    **dict.fromkeys([f"{name}_pool{dims}" for name in ("max", "avg") for dims in _DIMS], pool),
    **dict.fromkeys([f"adaptive_{name}_pool{dims}" for name in ("max", "avg") for dims in _DIMS], adaptive_pool),
    **dict.fromkeys([f"upsample_nearest{dims}" for dims in _DIMS], upsample),
    **dict.fromkeys(["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"], upsample),
    **dict.fromkeys(_UNARY, unary),
    **dict.fromkeys(["clamp", "hardtanh"], clamp),
    **dict.fromkeys(["add", "sub", "rsub", "mul", "div", "pow"], arithmetic),
    **dict.fromkeys(["maximum", "minimum"], extreme),
    **dict.fromkeys(["gt", "ge", "lt", "le", "eq", "ne"], compare),
    **dict.fromkeys(["split", "split_with_sizes", "chunk", "tensor_split"], split),
    **dict.fromkeys(["view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"], reshape),
    **dict.fromkeys(["permute", "transpose", "t"], transpose),
    **dict.fromkeys(["mean", "sum"], reduction),
    **dict.fromkeys(["softmax", "log_softmax"], softmax),
    **dict.fromkeys(["pad", "constant_pad_nd"], pad),
    **dict.fromkeys(["group_norm", "layer_norm", "instance_norm"], norm),
    **dict.fromkeys(["dropout", "feature_dropout"], dropout),
    **dict.fromkeys(["contiguous", "clone", "alias", "detach", "to", "_to_copy"], identity),
    "linear": dense,
    "batch_norm": batch_norm,
    "prelu": prelu,
    "square": square,
    "where": select,
    "cat": concat,
    "slice": slice_,
    "channel_shuffle": channel_shuffle,
}
"""Operator name to what it is."""

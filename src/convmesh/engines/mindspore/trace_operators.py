"""What MindSpore's primitives are as kinds of `convmesh.graph`: one function per family of primitives.

Each takes a call, whose inputs are tensors, parameters or constants in the order of the primitive, and says what it is;
None means that no kind fits, as for a convolution whose weight is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from convmesh.engines.mindspore.trace_mindir import Constant
from convmesh.graph import kinds
from convmesh.graph.graph import Shape
from convmesh.graph.operator import Port


@dataclass(frozen=True)
class Value:
    """A tensor that an operator makes.

    Args:
        port: Which output of which operator.
        shape: Its shape.
        calls: Paths of the cells whose calls it stands in, outermost first.
    """

    port: Port
    shape: Shape
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Own:
    """A parameter of the network, loaded.

    Args:
        name: Its name in MindSpore.
        shape: Its shape.
    """

    name: str
    shape: Shape


Input = Value | Own | Constant | tuple["Input", ...] | None


@dataclass(frozen=True)
class Call:
    """One call of a primitive.

    Args:
        name: The primitive.
        attributes: What it has fixed.
        inputs: What it takes; a tuple for a list of tensors.
        shapes: Shapes of what it returns.
    """

    name: str
    attributes: Mapping[str, Any]
    inputs: tuple[Input, ...]
    shapes: tuple[Shape, ...]

    def tensor(self, index: int = 0) -> Value | None:
        """The tensor at a position, or None if there is no computed one."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return found if isinstance(found, Value) else None

    def own(self, index: int) -> Own | None:
        """The parameter at a position, or None."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return found if isinstance(found, Own) else None

    def constant(self, index: int, default: Any = None) -> Any:
        """The value of the constant at a position."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return found.value if isinstance(found, Constant) else default


@dataclass(frozen=True)
class Meaning:
    """What a call is.

    Args:
        kind: A kind of the table of rules, ``"identity"``, or ``"bias"`` for what is joined to the operator before.
        attributes: Its attributes.
        inputs: Its tensors, some of which may be parameters used by themselves.
        parameters: Its parameters by role.
    """

    kind: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Value | Own | Constant, ...] = ()
    parameters: Mapping[str, Own] = field(default_factory=dict)


def convolution(call: Call) -> Meaning | None:
    """``Conv2D``, ``Conv3D``, and what computes the gradient of their input as a transposed convolution."""
    x, weight = call.tensor(0), call.own(1)
    if x is None or weight is None:
        return None
    num_dims = len(x.shape) - 2
    transposed = call.name not in ("Conv2D", "Conv3D")
    kernel, attributes = tuple(call.attributes["kernel_size"])[-num_dims:], call.attributes
    stride, dilation = tuple(attributes["stride"])[-num_dims:], tuple(attributes["dilation"])[-num_dims:]
    padding = _pairs(attributes["pad_list"], num_dims)
    extra = (0,) * num_dims
    if transposed:
        reached = [
            (size - 1) * s - sum(p) + d * (k - 1) + 1
            for size, s, p, d, k in zip(x.shape[2:], stride, padding, dilation, kernel, strict=True)
        ]
        extra = tuple(size - got for size, got in zip(call.shapes[0][2:], reached, strict=True))
    described = kinds.convolution(
        in_channels=x.shape[1],
        out_channels=call.shapes[0][1],
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=attributes["groups"],
        transposed=transposed,
        output_padding=extra,
    )
    return Meaning("convolution", described, (x,), {"weight": weight})


def dense(call: Call) -> Meaning | None:
    """``MatMul`` and ``Dense`` with a weight of the network in the layout (out, in)."""
    x, weight = call.tensor(0), call.own(1)
    if x is None or weight is None or (call.name == "MatMul" and (call.constant(2), call.constant(3)) != (False, True)):
        return None
    parameters, bias = {"weight": weight}, call.own(2)
    if bias is not None:
        parameters["bias"] = bias
    attributes = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": bias is not None}
    return Meaning("dense", attributes, (x,), parameters)


def bias_add(call: Call) -> Meaning | None:
    """``BiasAdd``, which belongs to the convolution or dense layer before it."""
    x, bias = call.tensor(0), call.own(1)
    return None if x is None or bias is None else Meaning("bias", {}, (x,), {"bias": bias})


def batch_norm(call: Call) -> Meaning | None:
    """``BatchNorm``."""
    parameters = _parameters(call, 1, ("weight", "bias", "running_mean", "running_var"))
    x = call.tensor(0)
    if parameters is None or x is None:
        return None
    attributes = {
        "momentum": kinds.number(call.constant(7)),
        "eps": kinds.number(call.constant(6)),
        "statistics": "batch" if call.constant(5) else "running",
    }
    return Meaning("batch_norm", attributes, (x,), parameters)


def group_norm(call: Call) -> Meaning | None:
    """``GroupNorm``."""
    parameters, x = _parameters(call, 2, ("weight", "bias")), call.tensor(0)
    if parameters is None or x is None:
        return None
    attributes = {"eps": kinds.number(call.constant(4)), "groups": call.constant(1)}
    return Meaning("group_norm", attributes, (x,), parameters)


def instance_norm(call: Call) -> Meaning | None:
    """``InstanceNorm``."""
    parameters, x = _parameters(call, 1, ("weight", "bias", "running_mean", "running_var")), call.tensor(0)
    if parameters is None or x is None:
        return None
    return Meaning("instance_norm", {"eps": kinds.number(call.attributes["epsilon"])}, (x,), parameters)


def layer_norm(call: Call) -> Meaning | None:
    """``LayerNorm`` whose weight has the normalised dims."""
    parameters, x = _parameters(call, 1, ("weight", "bias")), call.tensor(0)
    if parameters is None or x is None:
        return None
    num_dims = len(x.shape) - call.constant(3) % len(x.shape)
    if len(parameters["weight"].shape) != num_dims:
        return None
    return Meaning("layer_norm", {"eps": kinds.number(call.constant(5)), "num_dims": num_dims}, (x,), parameters)


def dropout(call: Call) -> Meaning | None:
    """``Dropout`` of elements, ``Dropout2D`` and ``Dropout3D`` of channels."""
    keep = call.constant(1) if call.name == "Dropout" else call.attributes["keep_prob"]
    attributes = {"p": kinds.number(1 - keep), "whole_channels": call.name != "Dropout"}
    return _of_first(call, "dropout", attributes)


def pool(call: Call) -> Meaning | None:
    """``MaxPool``, ``AvgPool`` and their kin in three dims; the first two dims of what is fixed are not pooled."""
    x = call.tensor(0)
    if x is None:
        return None
    num_dims = len(x.shape) - 2
    fixed = call.attributes
    if call.name == "AvgPool":
        fixed = {"kernel_size": call.constant(1), "strides": call.constant(2), "pad_mode": call.constant(3), **fixed}
    kernel = tuple(fixed.get("kernel_size", fixed.get("ksize")))[-num_dims:]
    stride = tuple(fixed["strides"])[-num_dims:]
    dilation = tuple(fixed.get("dilation", (1,) * num_dims))[-num_dims:]
    padding = _pool_padding(fixed, x.shape[2:], kernel=kernel, stride=stride, dilation=dilation)
    if call.name.startswith("Max"):
        attributes = kinds.max_pool(
            kernel=kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            ceil_mode=bool(fixed.get("ceil_mode", False)),
        )
        return Meaning("max_pool", attributes, (x,))
    if fixed.get("divisor_override"):
        return None
    attributes = kinds.avg_pool(
        kernel=kernel,
        stride=stride,
        padding=padding,
        ceil_mode=bool(fixed.get("ceil_mode", False)),
        count_padding=bool(fixed.get("count_include_pad", False)),
    )
    return Meaning("avg_pool", attributes, (x,))


def adaptive_pool(call: Call) -> Meaning | None:
    """``AdaptiveAvgPool2D``, ``AdaptiveMaxPool2D`` and their kin."""
    function = "max" if "Max" in call.name else "mean"
    return _of_first(call, "adaptive_pool", {"function": function, "output_size": call.shapes[0][2:]})


def unary(call: Call) -> Meaning | None:
    """Functions of one tensor."""
    attributes: dict[str, Any] = {"function": UNARY[call.name]}
    if call.name == "GeLU":
        attributes["approximate"] = "tanh"
    elif call.name == "GeluExt":
        attributes["approximate"] = call.constant(1, "none")
    elif call.name == "Elu":
        attributes["alpha"] = kinds.number(call.constant(1, 1.0))
    elif call.name == "Softplus":
        attributes["beta"] = 1.0
    elif call.name == "Square":
        attributes["value"] = 2.0
    return _of_first(call, "elementwise", attributes)


def prelu(call: Call) -> Meaning | None:
    """``PReLU`` with a weight of the network."""
    x, weight = call.tensor(0), call.own(1)
    if x is None or weight is None:
        return None
    return Meaning("elementwise", {"function": "prelu"}, (x,), {"weight": weight})


def clamp(call: Call) -> Meaning | None:
    """``ClampScalar``."""
    lowest, highest = call.constant(1), call.constant(2)
    if (lowest, highest) == (0, 6):
        return _of_first(call, "elementwise", {"function": "relu6"})
    bounds = {
        name: None if value is None else kinds.number(value) for name, value in (("min", lowest), ("max", highest))
    }
    return _of_first(call, "elementwise", {"function": "clamp", **bounds})


def arithmetic(call: Call) -> Meaning | None:
    """``Add``, ``Sub``, ``Mul``, ``Div``, ``Maximum``, ``Pow`` and their kin of two tensors, or with a number."""
    name = ARITHMETIC[call.name]
    first, second = call.inputs[:2]
    if isinstance(second, Constant) and isinstance(second.value, int | float):
        return _with_number(call, name, second.value, swapped=False)
    if isinstance(first, Constant) and isinstance(first.value, int | float):
        return _with_number(call, name, first.value, swapped=True)
    operands = tuple(entry for entry in (first, second) if isinstance(entry, Value | Own | Constant))
    if len(operands) < 2 or name == "power":
        return None
    if name in ("add", "multiply"):
        return Meaning(name, {}, operands)
    return Meaning("elementwise", {"function": name}, operands)


def _with_number(call: Call, name: str, value: float, *, swapped: bool) -> Meaning | None:
    if swapped:
        known = {
            "add": ("add_scalar", value),
            "multiply": ("multiply_scalar", value),
            "subtract": ("subtract_from_scalar", value),
        }
    else:
        known = {
            "add": ("add_scalar", value),
            "subtract": ("add_scalar", -value),
            "multiply": ("multiply_scalar", value),
            "divide": ("multiply_scalar", 1 / value if value else math.inf),
            "power": ("power_scalar", value),
        }
    operand = call.inputs[1 if swapped else 0]
    if not isinstance(operand, Value | Own):
        return None
    if name in ("maximum", "minimum"):
        bounds = (
            {"min": kinds.number(value), "max": None}
            if name == "maximum"
            else {"min": None, "max": kinds.number(value)}
        )
        return Meaning("elementwise", {"function": "clamp", **bounds}, (operand,))
    if name not in known:
        return (
            Meaning("elementwise", {"function": "reciprocal"}, (operand,)) if (name, value) == ("divide", 1) else None
        )
    function, number = known[name]
    return Meaning("elementwise", {"function": function, "value": kinds.number(number)}, (operand,))


def compare(call: Call) -> Meaning | None:
    """``Greater``, ``LessEqual`` and their like."""
    attributes: dict[str, Any] = {"function": "compare", "relation": COMPARISONS[call.name]}
    second = call.inputs[1]
    if isinstance(second, Constant) and isinstance(second.value, int | float):
        return _of_first(call, "elementwise", {**attributes, "value": kinds.number(second.value)})
    first = call.tensor(0)
    if first is None or not isinstance(second, Value | Own):
        return None
    return Meaning("elementwise", attributes, (first, second))


def select(call: Call) -> Meaning | None:
    """``Select`` between two tensors."""
    operands = tuple(entry for entry in call.inputs[:3] if isinstance(entry, Value | Own | Constant))
    return Meaning("elementwise", {"function": "select"}, operands) if len(operands) == 3 else None


def concat(call: Call) -> Meaning | None:
    """``Concat``."""
    listed = call.inputs[0]
    operands = tuple(entry for entry in listed if isinstance(entry, Value)) if isinstance(listed, tuple) else ()
    if not isinstance(listed, tuple) or len(operands) != len(listed):
        return None
    return Meaning("concat", {"dim": call.constant(1, 0) % len(call.shapes[0])}, operands)


def split(call: Call) -> Meaning | None:
    """``Split`` into equal parts and ``SplitWithSize``."""
    x = call.tensor(0)
    if x is None:
        return None
    dim = call.constant(2 if call.name == "SplitWithSize" else 1, 0) % len(x.shape)
    return Meaning("split", {"dim": dim, "sizes": tuple(shape[dim] for shape in call.shapes)}, (x,))


def slice_(call: Call) -> Meaning | None:
    """``StridedSlice`` along one dim that keeps all dims."""
    x = call.tensor(0)
    if x is None or any(call.constant(index) for index in (7, 8)):
        return None
    begin, end, step = (call.constant(index) for index in (1, 2, 3))
    open_begin, open_end = call.constant(4) or 0, call.constant(5) or 0
    found = []
    for dim, size in enumerate(x.shape):
        if dim >= len(begin) or call.constant(6):
            start, stop, stride = 0, size, 1
        else:
            low, high = (
                None if mask >> dim & 1 else edge[dim] for mask, edge in ((open_begin, begin), (open_end, end))
            )
            start, stop, stride = slice(low, high, step[dim]).indices(size)
        if (start, stop, stride) != (0, size, 1):
            found.append({"dim": dim, "start": start, "stop": stop, "step": stride})
    if not found:
        return Meaning("identity", inputs=(x,))
    return Meaning("slice", found[0], (x,)) if len(found) == 1 else None


def reshape(call: Call) -> Meaning | None:
    """Whatever changes the shape alone: ``Reshape``, ``Flatten``, ``ExpandDims``, ``Squeeze``."""
    x = call.tensor(0)
    if x is None:
        return None
    kind, attributes = kinds.reshape_kind(x.shape, call.shapes[0])
    return Meaning(kind, attributes, (x,))


def transpose(call: Call) -> Meaning | None:
    """``Transpose``."""
    x = call.tensor(0)
    if x is None:
        return None
    order = tuple(dim % len(x.shape) for dim in call.constant(1))
    if order == tuple(range(len(x.shape))):
        return Meaning("identity", inputs=(x,))
    return Meaning("transpose", {"order": order}, (x,))


def reduction(call: Call) -> Meaning | None:
    """``ReduceMean``, ``ReduceSum``, ``MeanExt`` and ``SumExt``."""
    x = call.tensor(0)
    if x is None:
        return None
    given = call.constant(1)
    dims = (given,) if isinstance(given, int) else given
    attributes = {
        "dims": tuple(sorted(dim % len(x.shape) for dim in dims or range(len(x.shape)))),
        "keep_dims": bool(call.constant(2)),
    }
    return Meaning("mean" if "Mean" in call.name else "sum", attributes, (x,))


def softmax(call: Call) -> Meaning | None:
    """``Softmax`` and ``LogSoftmax``."""
    given = call.constant(1, -1)
    dim = given[0] if isinstance(given, tuple) else given
    return _of_first(call, "softmax", {"dim": dim % len(call.shapes[0]), "log": call.name.startswith("Log")})


def upsample(call: Call) -> Meaning | None:
    """``ResizeNearestNeighborV2``, ``ResizeBilinearV2`` and their kin, those that agree with PyTorch's."""
    nearest = "Nearest" in call.name
    flags = [call.constant(index) for index in (2, 3)]
    if nearest and any(flags):
        return None
    attributes = {
        "mode": "nearest" if nearest else "linear",
        "output_size": call.shapes[0][2:],
        "align_corners": bool(flags[0]) and not nearest,
    }
    return _of_first(call, "upsample", attributes)


def pad(call: Call) -> Meaning | None:
    """``Pad``, and ``PadV3``, which lists the pairs from the last dim on."""
    x = call.tensor(0)
    if x is None:
        return None
    if call.name == "Pad":
        attributes = {"mode": "constant", "padding": tuple(map(tuple, call.attributes["paddings"])), "value": 0.0}
        return Meaning("pad", attributes, (x,))
    flat = call.constant(1)
    pairs = [(0, 0)] * len(x.shape)
    for index in range(len(flat) // 2):
        pairs[-1 - index] = (flat[2 * index], flat[2 * index + 1])
    attributes = {
        "mode": call.attributes.get("mode", "constant"),
        "padding": tuple(pairs),
        "value": float(call.constant(2, 0.0) or 0.0),
    }
    return Meaning("pad", attributes, (x,))


def identity(call: Call) -> Meaning | None:
    """Casts and copies."""
    return _of_first(call, "identity", {})


def _of_first(call: Call, kind: str, attributes: Mapping[str, Any]) -> Meaning | None:
    x = call.tensor(0)
    return None if x is None else Meaning(kind, attributes, (x,))


def _parameters(call: Call, first: int, roles: tuple[str, ...]) -> dict[str, Own] | None:
    found = {role: call.own(first + index) for index, role in enumerate(roles)}
    known = {role: own for role, own in found.items() if own is not None}
    return known if len(known) == len(roles) else None


def _pairs(flat: tuple[int, ...], num_dims: int) -> kinds.Pairs:
    return tuple((flat[2 * dim], flat[2 * dim + 1]) for dim in range(num_dims))


def _pool_padding(
    fixed: Mapping[str, Any], size: Shape, *, kernel: Shape, stride: Shape, dilation: Shape
) -> kinds.Pairs:
    mode = fixed.get("pad_mode", "PAD")
    if mode in ("SAME", 1):
        return kinds.same_padding(size, kernel=kernel, stride=stride, dilation=dilation)
    if mode in ("VALID", 2):
        return ((0, 0),) * len(kernel)
    if "pads" in fixed:
        return kinds.pairs(tuple(fixed["pads"])[-len(kernel) :], len(kernel))
    return _pairs(fixed["pad_list"], len(kernel))


UNARY = {
    "ReLU": "relu", "ReLU6": "relu6", "Sigmoid": "sigmoid", "Tanh": "tanh", "SiLU": "silu", "Mish": "mish",
    "HSwish": "hard_swish", "HSigmoid": "hard_sigmoid", "GeLU": "gelu", "GeluExt": "gelu", "Elu": "elu", "Exp": "exp",
    "Log": "log", "Log1p": "log1p", "Sqrt": "sqrt", "Rsqrt": "rsqrt", "Abs": "abs", "Neg": "negative", "Erf": "erf",
    "Reciprocal": "reciprocal", "Softplus": "softplus", "Square": "power_scalar", "Sin": "sin", "Cos": "cos",
}  # fmt: skip
"""Primitives of one tensor to functions."""

ARITHMETIC = {
    "Add": "add", "Adds": "add", "Sub": "subtract", "Subs": "subtract", "Mul": "multiply", "Muls": "multiply",
    "Div": "divide", "Divs": "divide", "RealDiv": "divide", "Pow": "power", "PowTensorScalar": "power",
    "Maximum": "maximum", "Minimum": "minimum",
}  # fmt: skip
"""Primitives of two operands to functions."""

COMPARISONS = {
    "Greater": "gt", "GreaterEqual": "ge", "Less": "lt", "LessEqual": "le", "Equal": "eq", "NotEqual": "ne",
}  # fmt: skip
"""Primitives that compare to relations."""

_CONVOLUTIONS = ("", "Transpose", "BackpropInput")
_POOLS = ("MaxPool", "MaxPool3D", "MaxPoolWithArgmaxV2", "MaxPool3DWithArgmax", "AvgPool", "AvgPool3D")
_UPSAMPLES = (
    "ResizeNearestNeighborV2",
    "ResizeBilinearV2",
    "ResizeLinear1D",
    "UpsampleNearest2D",
    "UpsampleBilinear2D",
)

PRIMITIVES: Mapping[str, Callable[[Call], Meaning | None]] = {
    **dict.fromkeys([f"Conv{dims}D{name}" for dims in (2, 3) for name in _CONVOLUTIONS], convolution),
    **dict.fromkeys(["MatMul", "Dense"], dense),
    **dict.fromkeys(["Dropout", "Dropout2D", "Dropout3D"], dropout),
    **dict.fromkeys(_POOLS, pool),
    **dict.fromkeys([f"Adaptive{name}Pool{dims}D" for name in ("Avg", "Max") for dims in (1, 2, 3)], adaptive_pool),
    **dict.fromkeys(UNARY, unary),
    **dict.fromkeys(ARITHMETIC, arithmetic),
    **dict.fromkeys(COMPARISONS, compare),
    **dict.fromkeys(["Split", "SplitWithSize"], split),
    **dict.fromkeys(["Reshape", "Flatten", "ExpandDims", "Squeeze", "View"], reshape),
    **dict.fromkeys(["ReduceMean", "ReduceSum", "MeanExt", "SumExt"], reduction),
    **dict.fromkeys(["Softmax", "LogSoftmax"], softmax),
    **dict.fromkeys(_UPSAMPLES, upsample),
    **dict.fromkeys(["Pad", "PadV3"], pad),
    **dict.fromkeys(["Cast", "Identity", "Contiguous", "StopGradient"], identity),
    "BiasAdd": bias_add,
    "BatchNorm": batch_norm,
    "GroupNorm": group_norm,
    "InstanceNorm": instance_norm,
    "LayerNorm": layer_norm,
    "PReLU": prelu,
    "ClampScalar": clamp,
    "Select": select,
    "Concat": concat,
    "StridedSlice": slice_,
    "Transpose": transpose,
}
"""Primitive to what it is."""

"""What MindSpore's primitives are as kinds of `convmesh.graph`: one function per family of primitives.

Each takes a call, whose inputs are tensors, parameters or constants in the order of the primitive, and says what it is;
None means that no kind fits, as for a convolution whose weight is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from convmesh.engines.mindspore import trace_layers as layers
from convmesh.engines.mindspore.trace_call import Call, Meaning, Own, Value, of_first
from convmesh.engines.mindspore.trace_mindir import Constant
from convmesh.graph import kinds


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
    return of_first(call, "elementwise", attributes)


def clamp(call: Call) -> Meaning | None:
    """``ClampScalar``."""
    lowest, highest = call.constant(1), call.constant(2)
    if (lowest, highest) == (0, 6):
        return of_first(call, "elementwise", {"function": "relu6"})
    bounds = {
        name: None if value is None else kinds.number(value) for name, value in (("min", lowest), ("max", highest))
    }
    return of_first(call, "elementwise", {"function": "clamp", **bounds})


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
        return of_first(call, "elementwise", {**attributes, "value": kinds.number(second.value)})
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


def maximum(call: Call) -> Meaning | None:
    """``ReduceMax``."""
    found = reduction(call)
    return None if found is None else replace(found, kind="amax", attributes={**found.attributes, "ties": "all"})


def softmax(call: Call) -> Meaning | None:
    """``Softmax`` and ``LogSoftmax``."""
    given = call.constant(1, -1)
    dim = given[0] if isinstance(given, tuple) else given
    return of_first(call, "softmax", {"dim": dim % len(call.shapes[0]), "log": call.name.startswith("Log")})


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
    return of_first(call, "identity", {})


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
    **dict.fromkeys([f"Conv{dims}D{name}" for dims in (2, 3) for name in _CONVOLUTIONS], layers.convolution),
    **dict.fromkeys(["MatMul", "Dense"], layers.dense),
    **dict.fromkeys(["Dropout", "Dropout2D", "Dropout3D"], layers.dropout),
    **dict.fromkeys(_POOLS, layers.pool),
    **dict.fromkeys(
        [f"Adaptive{name}Pool{dims}D" for name in ("Avg", "Max") for dims in (1, 2, 3)], layers.adaptive_pool
    ),
    **dict.fromkeys(UNARY, unary),
    **dict.fromkeys(ARITHMETIC, arithmetic),
    **dict.fromkeys(COMPARISONS, compare),
    **dict.fromkeys(["Split", "SplitWithSize"], split),
    **dict.fromkeys(["Reshape", "Flatten", "ExpandDims", "Squeeze", "View"], reshape),
    **dict.fromkeys(["ReduceMean", "ReduceSum", "MeanExt", "SumExt"], reduction),
    **dict.fromkeys(["Softmax", "LogSoftmax"], softmax),
    "ReduceMax": maximum,
    **dict.fromkeys(_UPSAMPLES, layers.upsample),
    **dict.fromkeys(["Pad", "PadV3"], pad),
    **dict.fromkeys(["Cast", "Identity", "Contiguous", "StopGradient"], identity),
    "BiasAdd": layers.bias_add,
    "BatchNorm": layers.batch_norm,
    "GroupNorm": layers.group_norm,
    "InstanceNorm": layers.instance_norm,
    "LayerNorm": layers.layer_norm,
    "PReLU": layers.prelu,
    "ClampScalar": clamp,
    "Select": select,
    "Concat": concat,
    "StridedSlice": slice_,
    "Transpose": transpose,
}
"""Primitive to what it is."""

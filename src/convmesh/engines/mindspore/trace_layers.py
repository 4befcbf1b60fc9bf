"""What MindSpore's layers are as kinds of `convmesh.graph`: convolutions, dense layers, norms, dropout, pooling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convmesh.engines.mindspore.trace_call import Call, Meaning, of_first, parameters_at
from convmesh.graph import kinds
from convmesh.graph.graph import Shape


def convolution(call: Call) -> Meaning | None:
    """``Conv2D``, ``Conv3D``, and what computes the gradient of their input as a transposed convolution."""
    x, weight = call.tensor(0), call.own(1)
    if x is None or weight is None:
        return None
    num_dims = len(x.shape) - 2
    transposed = call.name not in ("Conv2D", "Conv3D")
    attributes = call.attributes
    kernel = kinds.spread(attributes["kernel_size"], num_dims)[-num_dims:]
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
    parameters = parameters_at(call, 1, ("weight", "bias", "running_mean", "running_var"))
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
    parameters, x = parameters_at(call, 2, ("weight", "bias")), call.tensor(0)
    if parameters is None or x is None:
        return None
    attributes = {"eps": kinds.number(call.constant(4)), "groups": call.constant(1)}
    return Meaning("group_norm", attributes, (x,), parameters)


def instance_norm(call: Call) -> Meaning | None:
    """``InstanceNorm``."""
    parameters, x = parameters_at(call, 1, ("weight", "bias", "running_mean", "running_var")), call.tensor(0)
    if parameters is None or x is None:
        return None
    return Meaning("instance_norm", {"eps": kinds.number(call.attributes["epsilon"])}, (x,), parameters)


def layer_norm(call: Call) -> Meaning | None:
    """``LayerNorm`` whose weight has the normalised dims."""
    parameters, x = parameters_at(call, 1, ("weight", "bias")), call.tensor(0)
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
    return of_first(call, "dropout", attributes)


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
    return of_first(call, "adaptive_pool", {"function": function, "output_size": call.shapes[0][2:]})


def prelu(call: Call) -> Meaning | None:
    """``PReLU`` with a weight of the network."""
    x, weight = call.tensor(0), call.own(1)
    if x is None or weight is None:
        return None
    return Meaning("elementwise", {"function": "prelu"}, (x,), {"weight": weight})


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
    return of_first(call, "upsample", attributes)


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

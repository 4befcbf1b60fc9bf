"""What PyTorch's layers are as kinds of `convmesh.graph`: convolutions, dense layers, norms, dropout, pooling."""

from __future__ import annotations

from typing import Any

from convmesh.engines.torch.trace_call import Call, Meaning, own_parameters, shape_of
from convmesh.graph import kinds


def convolution(call: Call) -> Meaning | None:
    """``conv1d`` to ``conv3d``, ``conv_transpose1d`` to ``conv_transpose3d``."""
    parameters = own_parameters(call, weight=call["weight"], bias=call["bias"])
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
    parameters = own_parameters(call, weight=call["weight"], bias=call["bias"])
    if parameters is None:
        return None
    out_features, in_features = shape_of(call["weight"])
    attributes = {"in_features": in_features, "out_features": out_features, "bias": call["bias"] is not None}
    return Meaning("dense", attributes, (call["input"],), parameters)


def batch_norm(call: Call) -> Meaning | None:
    """``batch_norm``."""
    parameters = own_parameters(
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
    parameters = own_parameters(call, weight=call["weight"], bias=call["bias"], **tracked)
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


def prelu(call: Call) -> Meaning | None:
    """``prelu`` with a weight of the network."""
    parameters = own_parameters(call, weight=call["weight"])
    return None if parameters is None else Meaning("elementwise", {"function": "prelu"}, (call["self"],), parameters)


def upsample(call: Call) -> Meaning:
    """``upsample_nearest1d`` to ``3d``, ``upsample_linear1d``, ``upsample_bilinear2d``, ``upsample_trilinear3d``."""
    attributes = {
        "mode": "nearest" if "nearest" in call.name else "linear",
        "output_size": call.output_shapes[0][2:],
        "align_corners": bool(call.arguments.get("align_corners", False)),
    }
    return Meaning("upsample", attributes, (call["input"],))

"""The kinds of operators and what describes each: constructors for their attributes.

Every trace makes attributes through these functions alone, so that equal operators get equal attributes whatever
framework they come from. Spatial values have one entry per spatial dim (depth, height, width); padding is a pair,
before and after, per spatial dim.

| kind | attributes |
|---|---|
| ``input``, ``constant`` | none |
| ``parameter`` | none: a parameter that is used by itself, as in a layer scale |
| ``convolution`` | in_channels, out_channels, kernel, stride, padding, dilation, groups, bias, |
| | transposed, output_padding |
| ``dense`` | in_features, out_features, bias |
| ``batch_norm`` | momentum (share of the new value, as in PyTorch), eps, statistics (batch or running) |
| ``group_norm`` | groups, eps |
| ``instance_norm`` | eps |
| ``layer_norm`` | num_dims (how many last dims are normalised), eps |
| ``dropout`` | p, whole_channels |
| ``max_pool`` | kernel, stride, padding, dilation, ceil_mode |
| ``avg_pool`` | kernel, stride, padding, ceil_mode, count_padding |
| ``adaptive_pool`` | function (mean or max), output_size; all ones is a global pool |
| ``elementwise`` | function (see `convmesh.graph.elementwise`) and its numbers |
| ``add``, ``multiply`` | none: of two tensors, broadcast against each other |
| ``concat`` | dim |
| ``split`` | dim, sizes |
| ``slice`` | dim, start, stop, step |
| ``flatten`` | start_dim, end_dim |
| ``reshape`` | shape |
| ``transpose`` | order (output dim i is input dim order[i]) |
| ``channel_shuffle`` | groups |
| ``mean``, ``sum`` | dims, keep_dims |
| ``amax`` | dims, keep_dims, ties (all: equal maxima share the gradient; first: it is the first one's) |
| ``softmax`` | dim, log |
| ``upsample`` | mode, output_size, align_corners |
| ``pad`` | mode, padding (a pair per dim, from the first), value |
| ``opaque`` | operator: the framework's own name |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from convmesh.graph.graph import Shape

Attributes = dict[str, Any]
Pairs = tuple[tuple[int, int], ...]


def number(value: float) -> float:
    """A number as people wrote it: engines keep float32, in which 1e-5 reads back as 9.99999974e-06."""
    return float(str(np.float32(value)))


def spread(value: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
    """One value per spatial dim.

    Args:
        value: One for all dims, or one for each.
        num_dims: Spatial dims.

    Returns:
        As many values as dims.
    """
    values = (value,) if isinstance(value, int) else tuple(int(entry) for entry in value)
    return values * num_dims if len(values) == 1 else values


def pairs(padding: int | Sequence[int], num_dims: int) -> Pairs:
    """Equal padding before and after, per spatial dim."""
    return tuple((entry, entry) for entry in spread(padding, num_dims))


def same_padding(size: Shape, *, kernel: Shape, stride: Shape, dilation: Shape) -> Pairs:
    """The padding that makes the output ``ceil(size / stride)``, the odd one at the end.

    Args:
        size: Rows, columns... of the input.
        kernel: Of the operator.
        stride: Of the operator.
        dilation: Of the operator.

    Returns:
        A pair per spatial dim.
    """
    found = []
    for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
        total = max(0, (math.ceil(n / s) - 1) * s + d * (k - 1) + 1 - n)
        found.append((total // 2, total - total // 2))
    return tuple(found)


def convolution(  # noqa: PLR0913 - as many as a convolution has
    *,
    in_channels: int,
    out_channels: int,
    kernel: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: Sequence[tuple[int, int]],
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    bias: bool = False,
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
) -> Attributes:
    """Attributes of a convolution; those that are given as one number hold for every spatial dim.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel: Size per spatial dim.
        stride: Step.
        padding: Pair per spatial dim; of a transposed one what is cut from the output.
        dilation: Distance of kernel elements.
        groups: Groups of channels.
        bias: Whether a bias is added.
        transposed: Whether it is a transposed convolution.
        output_padding: What a transposed one adds at the end.

    Returns:
        The attributes.
    """
    num_dims = len(kernel)
    return {
        "in_channels": in_channels,
        "out_channels": out_channels,
        "kernel": tuple(kernel),
        "stride": spread(stride, num_dims),
        "padding": tuple((before, after) for before, after in padding),
        "dilation": spread(dilation, num_dims),
        "groups": groups,
        "bias": bias,
        "transposed": transposed,
        "output_padding": spread(output_padding, num_dims),
    }


def convolution_weight(attributes: Attributes) -> Shape:
    """The shape of a convolution's weight, in PyTorch's layout."""
    first, second = attributes["out_channels"], attributes["in_channels"]
    if attributes["transposed"]:
        first, second = second, first
    return (first, second // attributes["groups"], *attributes["kernel"])


def max_pool(
    *,
    kernel: Sequence[int],
    stride: int | Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Attributes:
    """Attributes of max-pooling; padding never wins the maximum.

    Args:
        kernel: Size per spatial dim.
        stride: Step.
        padding: Pair per spatial dim.
        dilation: Distance of kernel elements.
        ceil_mode: Whether a last window may reach over the end.

    Returns:
        The attributes.
    """
    return {
        "kernel": tuple(kernel),
        "stride": spread(stride, len(kernel)),
        "padding": tuple((before, after) for before, after in padding),
        "dilation": spread(dilation, len(kernel)),
        "ceil_mode": ceil_mode,
    }


def avg_pool(
    *,
    kernel: Sequence[int],
    stride: int | Sequence[int],
    padding: Sequence[tuple[int, int]],
    ceil_mode: bool = False,
    count_padding: bool = True,
) -> Attributes:
    """Attributes of average pooling; whether padding counts matters only where there is some.

    Args:
        kernel: Size per spatial dim.
        stride: Step.
        padding: Pair per spatial dim.
        ceil_mode: Whether a last window may reach over the end.
        count_padding: Whether padding counts in the mean.

    Returns:
        The attributes.
    """
    padded = any(before or after for before, after in padding)
    return {
        "kernel": tuple(kernel),
        "stride": spread(stride, len(kernel)),
        "padding": tuple((before, after) for before, after in padding),
        "ceil_mode": ceil_mode,
        "count_padding": count_padding and padded,
    }


def reshape_kind(old: Shape, new: Shape) -> tuple[str, Attributes]:
    """What a change of shape is: nothing (``identity``), a flatten of neighbouring dims, or another reshape.

    Args:
        old: Shape of the input.
        new: Shape of the output, with as many elements.

    Returns:
        Kind and attributes.
    """
    if old == new:
        return "identity", {}
    num_merged = len(old) - len(new) + 1
    if num_merged > 1:
        for start in (*range(1, len(new)), 0):  # With dims of size 1 several fit; samples are never merged then.
            merged = (*old[:start], math.prod(old[start : start + num_merged]), *old[start + num_merged :])
            if merged == new:
                return "flatten", {"start_dim": start, "end_dim": start + num_merged - 1}
    return "reshape", {"shape": new}

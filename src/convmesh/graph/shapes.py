"""Output shapes: from the shapes of the inputs and the attributes of an operator, per kind.

Formulas of sizes are those of PyTorch's documentation of each layer (``torch.nn.Conv2d``, ``ConvTranspose2d``,
``MaxPool2d``), with padding before and after counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from convmesh.graph.graph import Shape

Attributes = Mapping[str, Any]
Shapes = Sequence[Shape]


def window_size(size: int, *, reach: int, stride: int, padding: tuple[int, int], ceil_mode: bool = False) -> int:
    """How many windows fit along one dim.

    Args:
        size: Elements along the dim.
        reach: Elements that a window spans, dilation included.
        stride: Step.
        padding: Before and after.
        ceil_mode: Whether a last window may reach over the end; it must start within the input or the padding before.

    Returns:
        The number of windows; 0 if none fits.
    """
    room = size + sum(padding) - reach
    if not ceil_mode:
        return max(0, room // stride + 1)
    num_windows = -(-room // stride) + 1
    return max(0, num_windows - ((num_windows - 1) * stride >= size + padding[0]))


def convolution(attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """(N, C, size...) to (N, out_channels, size...)."""
    if attributes["transposed"]:
        return (_transposed(attributes, shapes[0]),)
    return ((shapes[0][0], attributes["out_channels"], *_windows(attributes, shapes[0])),)


def pool(attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """(N, C, size...) to (N, C, windows...)."""
    return ((*shapes[0][:2], *_windows(attributes, shapes[0])),)


def adaptive_pool(attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """(N, C, size...) to (N, C, output_size...)."""
    return ((*shapes[0][:2], *attributes["output_size"]),)


def dense(attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """(..., in_features) to (..., out_features)."""
    return ((*shapes[0][:-1], attributes["out_features"]),)


def unchanged(_attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """The shape of the input."""
    return (shapes[0],)


def broadcast(_attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """The shape of all inputs, broadcast against each other as in NumPy."""
    num_dims = max(len(shape) for shape in shapes)
    padded = [(1,) * (num_dims - len(shape)) + shape for shape in shapes]
    return (tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True)),)


def concat(attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """Sizes along the dim are added."""
    dim = attributes["dim"]
    return ((*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :]),)


def split(attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """One output per size along the dim."""
    dim = attributes["dim"]
    return tuple((*shapes[0][:dim], size, *shapes[0][dim + 1 :]) for size in attributes["sizes"])


def slice_(attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """The elements from start to stop along the dim."""
    dim = attributes["dim"]
    kept = len(range(attributes["start"], min(attributes["stop"], shapes[0][dim]), attributes["step"]))
    return ((*shapes[0][:dim], kept, *shapes[0][dim + 1 :]),)


def flatten(attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """The dims from start_dim to end_dim become one."""
    start, stop = attributes["start_dim"], attributes["end_dim"] + 1
    return ((*shapes[0][:start], math.prod(shapes[0][start:stop]), *shapes[0][stop:]),)


def reshape(attributes: Attributes, _shapes: Shapes) -> tuple[Shape, ...]:
    """The shape that is asked for."""
    return (tuple(attributes["shape"]),)


def transpose(attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """The dims in another order."""
    return (tuple(shapes[0][dim] for dim in attributes["order"]),)


def reduction(attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """The dims are gone, or of size 1 if they are kept."""
    dims, keep = attributes["dims"], attributes["keep_dims"]
    return (tuple(1 if dim in dims else size for dim, size in enumerate(shapes[0]) if keep or dim not in dims),)


def upsample(attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """(N, C, size...) to (N, C, output_size...)."""
    return ((*shapes[0][:2], *attributes["output_size"]),)


def pad(attributes: Attributes, shapes: Shapes) -> tuple[Shape, ...]:
    """Every dim grows by its padding."""
    return (tuple(size + sum(pair) for size, pair in zip(shapes[0], attributes["padding"], strict=True)),)


def _windows(attributes: Attributes, shape: Shape) -> Shape:
    kernel = attributes["kernel"]
    dilation = attributes.get("dilation", (1,) * len(kernel))
    return tuple(
        window_size(size, reach=d * (k - 1) + 1, stride=s, padding=p, ceil_mode=attributes.get("ceil_mode", False))
        for size, k, s, p, d in zip(
            shape[2:], kernel, attributes["stride"], attributes["padding"], dilation, strict=True
        )
    )


def _transposed(attributes: Attributes, shape: Shape) -> Shape:
    sizes = zip(
        shape[2:],
        attributes["kernel"],
        attributes["stride"],
        attributes["padding"],
        attributes["dilation"],
        attributes["output_padding"],
        strict=True,
    )
    return (
        shape[0],
        attributes["out_channels"],
        *((size - 1) * s - sum(p) + d * (k - 1) + extra + 1 for size, k, s, p, d, extra in sizes),
    )

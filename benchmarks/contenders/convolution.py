"""The convolutions that peers split over ranks, whatever the peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SplitConvolution:
    """One convolution and how it is split.

    Args:
        title: Its row in the table.
        split: What is divided over the ranks.
        kernel: Side of the kernel.
        stride: Of both spatial dims.
        padding: On every side.
        groups: Groups of channels; as many as channels for a depthwise convolution.
    """

    title: str
    split: Literal["samples", "width", "height", "in_channels", "out_channels", "groups"]
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    groups: int = 1


@dataclass(frozen=True)
class Sizes:
    """Sizes of the input, which all ranks share evenly.

    Args:
        num_samples: Samples.
        num_channels: Input and output channels.
        side: Rows and columns.
    """

    num_samples: int = 4
    num_channels: int = 8
    side: int = 16


@dataclass(frozen=True)
class Answer:
    """What a rank saw of a split convolution.

    Args:
        differences: Of each tensor that the peer gave, in the order output, input gradient, weight gradient: the norm
            of its difference over the norm of what is right, or in words what is wrong with it.
        refusal: First sentence of the error that the peer raised; empty if it raised none.
    """

    differences: dict[str, float | str]
    refusal: str


SPLITS = (
    SplitConvolution("batch, 3x3, stride 1", "samples"),
    SplitConvolution("batch, 7x7, stride 2", "samples", kernel=7, stride=2, padding=3),
    SplitConvolution("columns, 3x3, stride 1", "width"),
    SplitConvolution("columns, 2x2, stride 2", "width", kernel=2, stride=2, padding=0),
    SplitConvolution("columns, 3x3, stride 2", "width", stride=2),
    SplitConvolution("rows, 3x3, stride 1", "height"),
    SplitConvolution("input channels, 3x3, stride 1", "in_channels"),
    SplitConvolution("output channels, 3x3, stride 1", "out_channels"),
    SplitConvolution("depthwise by channel, 3x3, stride 1", "groups", groups=Sizes.num_channels),
)
"""What the table shows."""

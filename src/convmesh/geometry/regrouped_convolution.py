"""The convolution that computes from regrouped images what another one computes from the images themselves.

Along one spatial dim, output u of a convolution takes pixel ``u * s - p + k * d`` with its weight k (stride s,
padding p before, dilation d). With blocks of side B and a stride that is a multiple of B, that pixel stands in block
``u * (s / B) + floor((k * d - p) / B)`` at offset ``(k * d - p) mod B``: again a convolution, of stride s / B, whose
kernel reaches over the blocks between the smallest and the largest of these floors. What it has beside the weights that
were there before is *structural zeros*: they stand for pixels that the original does not look at, and stay zero.
Padding stays exact because the size of the image is a multiple of B: a block lies in the image or beyond its border.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.geometry.regrouping import ChannelRegrouping, Origin

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A convolution along one spatial dim.

    Args:
        size: Pixels of its input.
        kernel: Weights.
        stride: Step.
        before: Padding before the first pixel.
        after: Padding after the last one.
        dilation: Distance of the weights.
    """

    size: int
    kernel: int
    stride: int
    before: int
    after: int
    dilation: int

    @property
    def num_outputs(self) -> int:
        """Pixels of its output."""
        return (self.size + self.before + self.after - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def in_blocks(self, block: int) -> Extent:
        """The same convolution on blocks of pixels.

        Args:
            block: Side of a block; size and stride are multiples of it.

        Returns:
            A convolution of blocks with as many outputs, which reaches no further than it must.
        """
        if block == 1:
            return self
        reached = [(tap * self.dilation - self.before) // block for tap in range(self.kernel)]
        steps = [place - reached[0] for place in reached]
        dilation = math.gcd(*steps) or 1
        stride, size = self.stride // block, self.size // block
        last = (self.num_outputs - 1) * stride + reached[-1]
        return Extent(
            size=size,
            kernel=steps[-1] // dilation + 1,
            stride=stride,
            before=-reached[0],
            after=max(0, last + 1 - size),
            dilation=dilation,
        )

    def taps(self, block: int, offset: int) -> Indices:
        """For each weight of ``in_blocks`` which one it is here, at an offset within the blocks; -1 for none."""
        blocks = self.in_blocks(block)
        pixels = (np.arange(blocks.kernel) * blocks.dilation - blocks.before) * block + offset + self.before
        taps: Indices = pixels // self.dilation
        taps[(pixels % self.dilation != 0) | (taps < 0) | (taps >= self.kernel)] = -1
        return taps


@dataclass(frozen=True, kw_only=True)
class RegroupedConvolution:
    """A convolution before and after its input is regrouped.

    Args:
        regrouping: Of its input.
        out_channels: Its outputs.
        groups: Its groups before.
        extents: What it is along each spatial dim, before; sizes and strides are multiples of the block.
    """

    regrouping: ChannelRegrouping
    out_channels: int
    groups: int
    extents: tuple[Extent, ...]

    @cached_property
    def regrouped_extents(self) -> tuple[Extent, ...]:
        """What it is along each spatial dim, after."""
        return tuple(extent.in_blocks(self.regrouping.block) for extent in self.extents)

    @cached_property
    def regrouped_groups(self) -> int:
        """The most groups that it can have after: all channels of a group come from the old groups that it joins."""
        return max(groups for groups in range(1, self.groups + 1) if self._may_have(groups))

    def _may_have(self, groups: int) -> bool:
        num_channels = self.regrouping.num_regrouped
        if self.groups % groups or num_channels % groups:
            return False
        return all(
            origin is None or place * groups // num_channels == self._group_of(origin) * groups // self.groups
            for place, origin in enumerate(self.regrouping.origins)
        )

    def _group_of(self, origin: Origin) -> int:
        return origin.channel * self.groups // self.regrouping.num_channels

    @property
    def original_shape(self) -> tuple[int, ...]:
        """Shape of the weight before: (out, in / groups, kernel...)."""
        num_in = self.regrouping.num_channels // self.groups
        return (self.out_channels, num_in, *(extent.kernel for extent in self.extents))

    @property
    def regrouped_shape(self) -> tuple[int, ...]:
        """Shape of the weight after: (out, in / groups, kernel...)."""
        num_in = self.regrouping.num_regrouped // self.regrouped_groups
        return (self.out_channels, num_in, *(extent.kernel for extent in self.regrouped_extents))

    @property
    def num_zeros(self) -> int:
        """Structural zeros."""
        return math.prod(self.regrouped_shape) - math.prod(self.original_shape)

    @cached_property
    def index(self) -> Indices:
        """For each weight after, its place in the flattened weight before; -1 for a structural zero."""
        found = np.full(self.regrouped_shape, -1, dtype=np.int64)
        num_out, num_in = self.out_channels, self.regrouped_shape[1]
        old_in = self.original_shape[1]
        outputs = np.arange(num_out)
        old_groups = outputs * self.groups // num_out
        for place, origin in enumerate(self.regrouping.origins):
            if origin is None:
                continue
            group, local = divmod(place, num_in)
            users = outputs[
                (outputs * self.regrouped_groups // num_out == group) & (old_groups == self._group_of(origin))
            ]
            weights = users * old_in + origin.channel % old_in
            found[users, local] = self._with_taps(weights, origin.offset)
        return found

    def _with_taps(self, weights: Indices, offset: Sequence[int]) -> Indices:
        """Places of weights that are given without their spatial dims, at an offset within the blocks."""
        places = weights
        missing = np.zeros(weights.shape, dtype=np.bool_)
        for extent, within in zip(self.extents, offset, strict=True):
            taps = extent.taps(self.regrouping.block, within)
            places = places[..., None] * extent.kernel + taps
            missing = missing[..., None] | (taps < 0)
        return np.where(missing, -1, places)

    @cached_property
    def is_weight(self) -> npt.NDArray[np.bool_]:
        """Which weights after are weights before, rather than structural zeros."""
        return self.index >= 0

    def to_regrouped(self, weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The weight after, from that before.

        Args:
            weight: Of ``original_shape``.

        Returns:
            Of ``regrouped_shape``; structural zeros are zero.
        """
        flat = weight.reshape(-1)
        return np.where(self.is_weight, flat[self.index], np.zeros((), weight.dtype))

    def to_original(self, weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The weight before, from that after; also of gradients and of an optimizer's tensors.

        Args:
            weight: Of ``regrouped_shape``.

        Returns:
            Of ``original_shape``.
        """
        flat = np.empty(math.prod(self.original_shape), weight.dtype)
        flat[self.index[self.is_weight]] = weight[self.is_weight]
        return flat.reshape(self.original_shape)

"""Regrouping of an image's channels: pixels moved into channels, zero channels added, channels put into another order.

What a network computes stays the same if its first convolution is changed to suit, which
`convmesh.geometry.regrouped_convolution` does.

Legend: N samples, C channels, n spatial dims (height and width of images), B side of a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.errors import ConfigError, ConvMeshError, raise_all


@dataclass(frozen=True)
class Origin:
    """Where a regrouped channel comes from: ``regrouped[i, j] = image[channel, i * B + row, j * B + column]``.

    Args:
        channel: Channel of the image.
        offset: Row and column within a block, one number per spatial dim; all 0 without blocks.
    """

    channel: int
    offset: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ChannelRegrouping:
    """How the channels of images are regrouped: by blocks first, then zero channels are added, then all are ordered.

    Args:
        num_channels: Channels of the image.
        block: Side B of the blocks whose pixels become channels, in every spatial dim; 1 leaves pixels where they are.
            Channel c at offset (a, b) becomes channel ``(c * B + a) * B + b``, as in PyTorch's ``pixel_unshuffle``.
        num_zeros: Zero channels that are added at the end.
        order: Regrouped channel i is what stands at ``order[i]`` before; None leaves them in order.
        num_dims: Spatial dims.

    Raises:
        ConfigError: If a number is too small, or the order does not hold every channel once.
        MistakeList: If several things are wrong.
    """

    num_channels: int
    block: int = 1
    num_zeros: int = 0
    order: tuple[int, ...] | None = None
    num_dims: int = 2

    def __post_init__(self) -> None:
        mistakes: list[ConvMeshError] = [
            ConfigError(f"{what} is too small", got=number, expected=f"at least {least}")
            for what, number, least in (
                ("the number of channels", self.num_channels, 1),
                ("the side of a block", self.block, 1),
                ("the number of zero channels", self.num_zeros, 0),
                ("the number of spatial dims", self.num_dims, 1),
            )
            if number < least
        ]
        raise_all(mistakes or self._wrong_order())

    @classmethod
    def of(
        cls,
        num_channels: int,
        *,
        space_to_depth: int = 1,
        pad: int = 0,
        pad_to: int | None = None,
        order: Sequence[int] | None = None,
        num_dims: int = 2,
    ) -> ChannelRegrouping:
        """A regrouping of images as a run file writes it.

        Args:
            num_channels: Channels of the image.
            space_to_depth: Side of the blocks.
            pad: Zero channels.
            pad_to: Channels that there shall be with the zero channels, instead of ``pad``.
            order: Which channel stands at each place.
            num_dims: Spatial dims.

        Returns:
            The regrouping.

        Raises:
            ConfigError: If the numbers contradict each other, or there are more channels than ``pad_to``.
            MistakeList: If several things are wrong.
        """
        num_moved = int(num_channels * space_to_depth**num_dims)
        if pad_to is not None and pad:
            raise ConfigError("pad and pad_to say the same in two ways", got=f"{pad} and {pad_to}", fix="Give one")
        if pad_to is not None and pad_to < num_moved:
            raise ConfigError(
                "there are more channels already than channels are padded to",
                got=f"{num_moved} channels, pad_to {pad_to}",
                fix=f"Use 'pad_to: {num_moved}' or more",
            )
        return cls(
            num_channels=num_channels,
            block=space_to_depth,
            num_zeros=pad if pad_to is None else pad_to - num_moved,
            order=None if order is None else tuple(order),
            num_dims=num_dims,
        )

    @property
    def num_regrouped(self) -> int:
        """Channels after regrouping."""
        return int(self.num_channels * self.block**self.num_dims) + self.num_zeros

    @property
    def is_identity(self) -> bool:
        """Whether it changes nothing."""
        return self.num_regrouped == self.num_channels and self.origins == tuple(
            Origin(channel, (0,) * self.num_dims) for channel in range(self.num_channels)
        )

    @cached_property
    def origins(self) -> tuple[Origin | None, ...]:
        """Where each regrouped channel comes from; None for a zero channel."""
        offsets = list(itertools.product(range(self.block), repeat=self.num_dims))
        moved: list[Origin | None] = [
            Origin(channel, offset) for channel in range(self.num_channels) for offset in offsets
        ]
        moved += [None] * self.num_zeros
        return tuple(moved if self.order is None else [moved[place] for place in self.order])

    def sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The spatial sizes of regrouped images.

        Args:
            sizes: Of the images: height and width.

        Returns:
            The sizes in blocks.

        Raises:
            ConfigError: If a size is no multiple of the block.
        """
        if any(size % self.block for size in sizes):
            nearest = "x".join(str(max(1, size // self.block) * self.block) for size in sizes)
            fitting = [block for block in range(self.block - 1, 1, -1) if not any(size % block for size in sizes)]
            other = f", or 'space_to_depth: {fitting[0]}'" if fitting else ", or zero channels ('pad_to') instead"
            raise ConfigError(
                "the image does not divide into blocks",
                got=f"{'x'.join(map(str, sizes))} pixels, blocks of {self.block}",
                expected=f"multiples of {self.block}",
                fix=f"Use images of {nearest} pixels{other}",
            )
        return tuple(size // self.block for size in sizes)

    def images(self, x_NC: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Regroups images.

        Args:
            x_NC: (N, C, then the spatial dims).

        Returns:
            (N, regrouped channels, then the sizes in blocks).

        Raises:
            ConfigError: If the images have other channels, or do not divide into blocks.
        """
        self.check_channels(x_NC.shape[1])
        moved = x_NC.reshape(self.blocked_shape(x_NC.shape)).transpose(self.block_order)
        moved = moved.reshape(x_NC.shape[0], -1, *self.sizes(x_NC.shape[2:]))
        if self.num_zeros:
            moved = np.pad(moved, ((0, 0), (0, self.num_zeros), *[(0, 0)] * self.num_dims))
        return moved if self.order is None else moved.take(self.order, axis=1)

    def check_channels(self, num_channels: int) -> None:
        """Refuses images with another number of channels.

        Raises:
            ConfigError: If the number is another one.
        """
        if num_channels != self.num_channels:
            raise ConfigError(
                "the images have other channels than are regrouped", got=num_channels, expected=self.num_channels
            )

    def blocked_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of images, each spatial dim written as blocks and pixels within a block."""
        pairs = [(size, self.block) for size in self.sizes(shape[2:])]
        return (*shape[:2], *itertools.chain.from_iterable(pairs))

    @property
    def block_order(self) -> tuple[int, ...]:
        """Dims of ``blocked_shape`` in the order samples, channels, pixels within a block, blocks."""
        dims = range(self.num_dims)
        return (0, 1, *(3 + 2 * dim for dim in dims), *(2 + 2 * dim for dim in dims))

    def _wrong_order(self) -> list[ConvMeshError]:
        if self.order is None or sorted(self.order) == list(range(self.num_regrouped)):
            return []
        given = set(self.order)
        missing = [channel for channel in range(self.num_regrouped) if channel not in given]
        unknown = sorted(channel for channel in given if not 0 <= channel < self.num_regrouped)
        twice = sorted(channel for channel in given if self.order.count(channel) > 1)
        told = [
            f"{what} {', '.join(map(str, channels))}"
            for what, channels in (("missing", missing), ("unknown", unknown), ("twice", twice))
            if channels
        ]
        return [
            ConfigError(
                "the order of the channels does not hold every channel once",
                got="; ".join(told),
                expected=f"0 to {self.num_regrouped - 1}, each once",
            )
        ]

"""What a network split along channels knows of itself: which tensors are parts, and how they become whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from convmesh.engines.contract import Arrays, CollectiveCount
from convmesh.engines.mindspore.channel_axis import ChannelAxis
from convmesh.plan import CHANNEL
from convmesh.plan.placement import ParameterShard
from convmesh.plan.plan import DATA
from convmesh.plan.resolved import ResolvedPlan

_ATTRIBUTE = "convmesh_channel_split"


@dataclass(frozen=True)
class ChannelSplit:
    """How a network is split along channels.

    Args:
        resolved: The plan, applied to the network's graph.
        axis: The axis along which channels are split: the channel axis, or the data axis.
        shards: Name of each parameter and buffer of which this rank has a part.
    """

    resolved: ResolvedPlan
    axis: ChannelAxis
    shards: Mapping[str, ParameterShard]

    @property
    def replicas_may_differ(self) -> bool:
        """Whether gradients of whole parameters may differ in bits between ranks."""
        return self.resolved.replicas_may_differ(deterministic=not self.axis.native)

    def is_of_data(self, name: str) -> bool:
        """Whether ranks of the data axis hold different parts of a tensor: its gradient is not summed over them."""
        return self.axis.name == DATA and name in self.shards

    @property
    def summed(self) -> frozenset[str]:
        """Whole parameters that every rank uses for own channels only, so that their gradients are to be summed."""
        return frozenset(name for entry in self.resolved.operators.values() for name in entry.summed)

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a whole tensor from that of this rank's part."""
        shard = self.shards.get(name)
        if shard is None:
            return shape
        return (*shape[: shard.dim], sum(map(len, shard.lists)), *shape[shard.dim + 1 :])

    def gather(self, arrays: Arrays) -> Arrays:
        """Whole arrays from every rank's parts; all ranks of the axis must call.

        Args:
            arrays: By name, or by ``slot/name``.

        Returns:
            The same names; tensors that are whole stay.
        """
        split = [name for name in arrays if _parameter(name) in self.shards]
        shards = [self.shards[_parameter(name)] for name in split]
        whole = self.axis.gather(
            [(arrays[name], shard.lists, shard.dim) for name, shard in zip(split, shards, strict=True)]
        )
        return {**arrays, **dict(zip(split, whole, strict=True))}

    def own(self, arrays: Arrays) -> Arrays:
        """This rank's parts of whole arrays; an array of another size than the plan splits stays as it is.

        Args:
            arrays: By name, or by ``slot/name``.

        Returns:
            The same names.
        """
        return {name: self._own(name, array) for name, array in arrays.items()}

    def _own(self, name: str, array: np.ndarray) -> np.ndarray:
        shard = self.shards.get(_parameter(name))
        if shard is None or array.shape[shard.dim : shard.dim + 1] != (sum(map(len, shard.lists)),):
            return array
        return self.axis.own(array, shard.lists, dim=shard.dim)

    def num_parameters(self, parameters: Iterable[tuple[str, Parameter]]) -> int:
        """Elements of whole parameters, from this rank's parts."""
        return sum(math.prod(self.whole_shape(name, tuple(entry.shape))) for name, entry in parameters)


def split_of(network: nn.Cell) -> ChannelSplit | None:
    """How a network is split along channels; None if it is not."""
    split: ChannelSplit | None = network.__dict__.get(_ATTRIBUTE)
    return split


def note_split(network: nn.Cell, split: ChannelSplit) -> None:
    """Notes how a network was split."""
    object.__setattr__(network, _ATTRIBUTE, split)


class FromFirst(nn.Cell):
    """The tensors of the first rank of the channel axis, in one collective.

    Args:
        shapes: Of the tensors.
        axis: The channel axis.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], axis: ChannelAxis) -> None:
        super().__init__(auto_prefix=False)
        self.shapes = tuple(shapes)
        ends = list(itertools.accumulate(math.prod(shape) for shape in self.shapes))
        self.spans = tuple(zip([0, *ends[:-1]], ends, strict=True))
        self.is_first = axis.position == 0
        self.sum = axis.all_reduce()

    def construct(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The first rank's tensors.

        Args:
            *tensors: This rank's, in float32.

        Returns:
            The same on all ranks, bit for bit but for the sign of zeros.
        """
        parts: tuple[Tensor, ...] = ()
        for tensor in tensors:
            parts += (ops.reshape(tensor, (-1,)),)
        flat = ops.concat(parts, 0)
        if not self.is_first:
            flat = ops.zeros_like(flat)
        flat = self.sum(flat)
        found: tuple[Tensor, ...] = ()
        for index, span in enumerate(self.spans):
            found += (ops.reshape(flat[span[0] : span[1]], self.shapes[index]),)
        return found


class Equalizer:
    """Gives every rank the first one's gradients of whole parameters: else replicas would drift apart, by rounding.

    Args:
        trained: All trainable parameters, by neutral name.
        split: How the network is split.
    """

    def __init__(self, trained: Mapping[str, Parameter], split: ChannelSplit) -> None:
        self._places = [place for place, name in enumerate(trained) if name not in split.shards]
        shapes = [tuple(parameter.shape) for name, parameter in trained.items() if name not in split.shards]
        self._num_bytes = 4 * sum(math.prod(shape) for shape in shapes)
        self._from_first = FromFirst(shapes, split.axis) if shapes else None

    def __call__(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients that are equal on all ranks of the axis; all must call.

        Args:
            gradients: This rank's, one per trainable parameter.

        Returns:
            The same, with the first rank's of whole parameters.
        """
        found = list(gradients)
        if self._from_first is not None:
            equal = self._from_first(*[found[place] for place in self._places])
            for place, gradient in zip(self._places, equal, strict=True):
                found[place] = gradient
        return found

    def count(self) -> CollectiveCount:
        """What one call communicates, as it is meant: a broadcast."""
        return CollectiveCount("gradients", "broadcast", int(self._num_bytes > 0), self._num_bytes, axis=CHANNEL)


class HalfSquare(nn.Cell):
    """Half the square of the norm of all gradients, split ones counted once; equal on all ranks.

    What is not finite on one rank is so on all afterwards.

    Args:
        is_split: Of each gradient whether this rank has a part of it.
        axis: The channel axis; None where nothing is split.
    """

    def __init__(self, is_split: tuple[bool, ...], axis: ChannelAxis | None) -> None:
        super().__init__(auto_prefix=False)
        self.is_split = is_split
        self.count = len(is_split)
        self.any_split, self.any_whole = any(is_split), not all(is_split)
        self.half_square = ops.L2Loss()
        self.add = ops.AddN()
        self.crosses = axis is not None
        if axis is not None:
            self.sum: Any = axis.collective("AllReduce", "all-reduce")
            self.share = 1.0 / axis.size
            self.stack = ops.Stack()

    def construct(self, gradients: tuple[Tensor, ...]) -> Tensor:
        """The half square, a scalar.

        Args:
            gradients: This rank's.
        """
        parts: tuple[Tensor, ...] = ()
        wholes: tuple[Tensor, ...] = ()
        for index in range(self.count):
            half = self.half_square(gradients[index])
            if self.is_split[index]:
                parts += (half,)
            else:
                wholes += (half,)
        if not self.crosses:
            return self.add(wholes)
        zero = Tensor(0.0, ms.float32)
        part = self.add(parts) if self.any_split else zero
        whole = self.add(wholes) if self.any_whole else zero
        sums = self.sum(self.stack((part, whole * self.share)))
        return sums[0] + sums[1]


def _parameter(name: str) -> str:
    return name.rpartition("/")[2]

"""What a network split along channels knows of itself: which tensors are parts, and how they become whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from convmesh.engines.contract import Arrays, CollectiveCount
from convmesh.engines.torch.channel_axis import ChannelAxis
from convmesh.engines.torch.state import to_array, to_tensor
from convmesh.plan.placement import ParameterShard
from convmesh.plan.resolved import ResolvedPlan

_ATTRIBUTE = "_convmesh_channel_split"


@dataclass(frozen=True)
class Parts:
    """What a network's ranks along one axis have parts of.

    Args:
        axis: The axis.
        shards: Name of each parameter and buffer of which this rank has a part, every alias of it included.
    """

    axis: ChannelAxis
    shards: Mapping[str, ParameterShard]


@dataclass(frozen=True)
class ChannelSplit:
    """How a network is split by channels, along the channel axis, the data axis or both.

    Args:
        resolved: The plan, applied to the network's graph.
        axis: The channel axis; of one rank if nothing is split along it.
        shards: Name of each parameter and buffer of which this rank has a part, every alias of it included.
        of_data: What is split along the data axis; None if nothing is.
        dropouts: Modules that drop own channels of the samples of all ranks of the data axis.
    """

    resolved: ResolvedPlan
    axis: ChannelAxis
    shards: Mapping[str, ParameterShard]
    of_data: Parts | None = None
    dropouts: tuple[nn.Module, ...] = ()

    @property
    def axes(self) -> tuple[ChannelAxis, ...]:
        """The axes along which something is split by channels."""
        return (self.axis,) if self.of_data is None else (self.axis, self.of_data.axis)

    def begin_update(self) -> None:
        """Starts counting anew."""
        for axis in self.axes:
            axis.begin_update()

    def counts(self) -> tuple[CollectiveCount, ...]:
        """What was communicated since ``begin_update``."""
        return tuple(count for axis in self.axes for count in axis.counts())

    def is_of_data(self, name: str) -> bool:
        """Whether ranks of the data axis hold different parts of a tensor: its gradient is not summed over them."""
        return self.of_data is not None and name in self.of_data.shards

    def drop(self, *, training: bool) -> None:
        """Says whether channels of all samples are dropped, also on a rank whose own samples are fillers."""
        for module in self.dropouts:
            module.training = training

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a whole tensor from that of this rank's part."""
        shard = self.shards.get(name)
        if shard is None:
            return shape
        return (*shape[: shard.dim], sum(map(len, shard.lists)), *shape[shard.dim + 1 :])

    def gather(self, arrays: Arrays) -> Arrays:
        """Whole arrays from every rank's parts; all ranks of the axes must call.

        Args:
            arrays: By name, or by ``slot/name``.

        Returns:
            The same names; tensors that are whole stay.
        """
        whole: Arrays = {}
        for name, array in arrays.items():
            shard = self.shards.get(_parameter(name))
            if shard is None:
                whole[name] = array
            else:
                part, axis = to_tensor(array), self._axis_of(_parameter(name))
                whole[name] = to_array(axis.gather(part, shard.lists, dim=shard.dim, purpose="state"))
        return whole

    def _axis_of(self, name: str) -> ChannelAxis:
        return self.of_data.axis if self.of_data is not None and name in self.of_data.shards else self.axis

    def own(self, arrays: Arrays) -> Arrays:
        """This rank's parts of whole arrays; an array of another size than the plan splits stays as it is.

        Args:
            arrays: By name, or by ``slot/name``.

        Returns:
            The same names.
        """
        return {name: self._own(name, array) for name, array in arrays.items()}

    def _own(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        shard = self.shards.get(_parameter(name))
        if shard is None or array.shape[shard.dim : shard.dim + 1] != (sum(map(len, shard.lists)),):
            return array
        return array.take(list(shard.lists[self._axis_of(_parameter(name)).position]), axis=shard.dim)

    @torch.no_grad()
    def equalize_(self, gradients: Mapping[str, Tensor]) -> None:
        """Gives every rank of the channel axis the first one's gradients of parameters that all of them have alike.

        It does so where bits may differ. Else replicas would drift apart, by rounding alone.

        Args:
            gradients: This rank's, by name of their parameter; changed in place.
        """
        whole = [gradient for name, gradient in gradients.items() if name not in self.shards or self.is_of_data(name)]
        deterministic = all(gradient.device.type == "cpu" for gradient in whole)
        if self.axis.size == 1 or not whole or not self.resolved.replicas_may_differ(deterministic=deterministic):
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in whole])
        self.axis.broadcast_([flat], purpose="gradients")
        for gradient, part in zip(whole, flat.split([gradient.numel() for gradient in whole]), strict=True):
            gradient.copy_(part.view(gradient.shape))

    def norm(self, gradients: Mapping[str, Tensor]) -> tuple[bool, float]:
        """Whether a gradient of any rank is not finite, and the 2-norm of all, split ones counted once.

        Args:
            gradients: This rank's, by name of their parameter.

        Returns:
            Equal values on all ranks of the axes.
        """
        total = _square([gradient for name, gradient in gradients.items() if name not in self.shards])
        parts = {
            axis: _square([gradient for name, gradient in gradients.items() if self._is_part(name, axis)])
            for axis in self.axes
            if axis.size > 1
        }
        # Looking at each element takes four times as long as the norm, which tells nearly always.
        finite = math.isfinite(total + sum(parts.values())) or all(map(_is_finite, gradients.values()))
        num_overflows = 0.0 if finite else 1.0
        for axis, square in parts.items():
            sums = torch.tensor([num_overflows, square], dtype=torch.float64, device=_device(gradients))
            num_overflows, summed = axis.all_reduce(sums, purpose="norm").tolist()
            total += summed
        return num_overflows > 0, float(total**0.5)

    def _is_part(self, name: str, axis: ChannelAxis) -> bool:
        return name in self.shards and self._axis_of(name) is axis

    def num_parameters(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Elements of whole parameters, from this rank's parts."""
        return sum(torch.Size(self.whole_shape(name, tuple(entry.shape))).numel() for name, entry in parameters)


def split_of(network: nn.Module) -> ChannelSplit | None:
    """How a network is split along channels; None if it is not."""
    split: ChannelSplit | None = getattr(network, _ATTRIBUTE, None)
    return split


def note_split(network: nn.Module, split: ChannelSplit) -> None:
    """Notes how a network was split."""
    object.__setattr__(network, _ATTRIBUTE, split)


def _is_finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(gradient).all())


def _square(gradients: Sequence[Tensor]) -> float:
    if not gradients:
        return 0.0
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return float(torch.stack(norms).square().sum())


def _device(gradients: Mapping[str, Tensor]) -> torch.device:
    return next(iter(gradients.values())).device if gradients else torch.device("cpu")


def _parameter(name: str) -> str:
    return name.rpartition("/")[2]

"""What a network split along channels knows of itself: which tensors are parts, and how they become whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from convmesh.engines.contract import Arrays
from convmesh.engines.torch.channel_axis import ChannelAxis
from convmesh.engines.torch.state import to_array, to_tensor
from convmesh.plan.placement import ParameterShard
from convmesh.plan.resolved import ResolvedPlan

_ATTRIBUTE = "_convmesh_channel_split"


@dataclass(frozen=True)
class ChannelSplit:
    """How a network is split along channels.

    Args:
        resolved: The plan, applied to the network's graph.
        axis: The channel axis.
        shards: Name of each parameter and buffer of which this rank has a part, every alias of it included.
    """

    resolved: ResolvedPlan
    axis: ChannelAxis
    shards: Mapping[str, ParameterShard]

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
        whole: Arrays = {}
        for name, array in arrays.items():
            shard = self.shards.get(_parameter(name))
            if shard is None:
                whole[name] = array
            else:
                part = to_tensor(array)
                whole[name] = to_array(self.axis.gather(part, shard.lists, dim=shard.dim, purpose="state"))
        return whole

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
        return array.take(list(shard.lists[self.axis.position]), axis=shard.dim)

    @torch.no_grad()
    def equalize_(self, gradients: Mapping[str, Tensor]) -> None:
        """Gives every rank the first one's gradients of whole parameters, where bits may differ.

        Else replicas would drift apart, by rounding alone.

        Args:
            gradients: This rank's, by name of their parameter; changed in place.
        """
        whole = [gradient for name, gradient in gradients.items() if name not in self.shards]
        deterministic = all(gradient.device.type == "cpu" for gradient in whole)
        if not whole or not self.resolved.replicas_may_differ(deterministic=deterministic):
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
            Equal values on all ranks of the axis.
        """
        parts = [gradient for name, gradient in gradients.items() if name in self.shards]
        whole = [gradient for name, gradient in gradients.items() if name not in self.shards]
        finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
        device = next(iter(gradients.values())).device if gradients else torch.device("cpu")
        sums = torch.tensor([0.0 if finite else 1.0, _square(parts)], dtype=torch.float64, device=device)
        num_overflows, square = self.axis.all_reduce(sums, purpose="norm").tolist()
        return num_overflows > 0, float((square + _square(whole)) ** 0.5)

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


def _square(gradients: Sequence[Tensor]) -> float:
    if not gradients:
        return 0.0
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return float(torch.stack(norms).square().sum())


def _parameter(name: str) -> str:
    return name.rpartition("/")[2]

"""Layers that work on own channels, but not as their module does on all: dropout and group norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convmesh.engines.torch.channel_axis import ChannelAxis
from convmesh.engines.torch.sample_axis import Cut, SampleAxis
from convmesh.graph import Node
from convmesh.plan.placement import Shard


class ShardedDropout(nn.Module):
    """Dropout of own channels with the random numbers that one device would draw for them.

    The mask of all channels is drawn and own channels are taken: it is independent between shards, and the generator
    moves on equally on all ranks, so that whole tensors later are dropped alike. Drawing costs a byte per element of
    the whole for a moment.

    Args:
        node: The operator.
        placement: Where its channels are.
        axis: The axis. On the data axis every rank draws for its own samples, and masks are exchanged for those of
            own channels: an all-to-all of a byte per element.
    """

    def __init__(self, node: Node, placement: Shard, axis: ChannelAxis) -> None:
        super().__init__()
        self._p = float(node.attributes["p"])
        self._whole_channels = bool(node.attributes["whole_channels"])
        self._placement = placement
        self._axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Drops elements, or whole channels, in training.

        Args:
            x: (N, own channels, ...).

        Returns:
            The same shape.
        """
        if not self.training or self._p == 0:
            return x
        pixels = [1] * (x.ndim - 2) if self._whole_channels else list(x.shape[2:])
        shape = (self._num_drawn(x), sum(map(len, self._placement.lists)), *pixels)
        is_last = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        order = torch.channels_last if is_last and not self._whole_channels else torch.contiguous_format
        mask = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=order).bernoulli_(1 - self._p)
        own = self._own(mask).to(x.dtype)
        return x * (own.div_(1 - self._p) if self._p < 1 else own)

    def _num_drawn(self, x: Tensor) -> int:
        if isinstance(self._axis, SampleAxis):
            return len(self._axis.samples.lists[self._axis.position])
        return x.shape[0]

    def _own(self, mask: Tensor) -> Tensor:
        lists = self._placement.lists
        if isinstance(self._axis, SampleAxis):
            return self._axis.exchange(mask, cut=Cut(1, lists), joined=self._axis.samples, purpose="dropout")
        return self._axis.own(mask, lists)


class ShardedGroupNorm(nn.Module):
    """Group norm of own groups.

    Args:
        node: The operator.
        placement: Where its channels are: whole groups.
        axis: The channel axis.
        parameters: Its parameters by name, this rank's part.
    """

    def __init__(
        self, node: Node, placement: Shard, axis: ChannelAxis, parameters: Mapping[str, nn.Parameter | None]
    ) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        names = {entry.role: entry.name.rpartition(".")[2] for entry in node.parameters}
        self._weight_name, self._bias_name = names.get("weight"), names.get("bias")
        num_channels = sum(map(len, placement.lists))
        self._num_groups = int(node.attributes["groups"]) * len(placement.lists[axis.position]) // num_channels
        self._eps = float(node.attributes["eps"])

    def forward(self, x: Tensor) -> Tensor:
        """Normalises each group of own channels; x (N, own channels, ...)."""
        weight = getattr(self, self._weight_name) if self._weight_name else None
        bias = getattr(self, self._bias_name) if self._bias_name else None
        return F.group_norm(x, self._num_groups, weight, bias, self._eps)

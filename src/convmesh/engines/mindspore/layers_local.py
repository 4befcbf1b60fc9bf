"""Layers that work on own channels, but not as their cell does on all: dropout and norms."""

from __future__ import annotations

from mindspore import Tensor, nn, ops

from convmesh.engines.mindspore.channel_axis import ChannelAxis, Own, hide
from convmesh.engines.mindspore.sample_axis import Exchanged, OfSamples, SampleAxis
from convmesh.graph import Node
from convmesh.plan.placement import Shard

DROPOUTS = (nn.Dropout, nn.Dropout2d, nn.Dropout3d)
"""Cells that `ShardedDropout` stands in for."""
_DROPPING = ("dropout", "dropout2d", "dropout3d")


class ShardedDropout(nn.Cell):
    """Dropout of own channels, or of elements in them, with the random numbers that one device would draw for them.

    The mask of all channels is drawn and own channels are taken: it is independent between shards, and the generator
    moves on equally on all ranks, so that whole tensors later are dropped alike. MindSpore's operators that drop whole
    channels draw one number for each, whatever the number of pixels.

    Args:
        cell: The layer for all channels, whose generator goes on.
        placement: Where its channels are.
        axis: The channel axis.
        node: The operator.
    """

    def __init__(self, cell: nn.Cell, placement: Shard, axis: ChannelAxis, node: Node) -> None:
        super().__init__(auto_prefix=False)
        self.dropout = next(getattr(cell, name) for name in _DROPPING if hasattr(cell, name))
        self.drops = float(node.attributes["p"]) > 0
        self.num_whole = sum(map(len, placement.lists))
        self.pixels = (1,) * len(node.shape[2:]) if node.attributes["whole_channels"] else tuple(node.shape[2:])
        self.fill = ops.Fill()
        self.stop = ops.StopGradient() if hasattr(ops, "StopGradient") else ops.stop_gradient
        hide(self, own=Own(axis, placement.lists))

    def construct(self, x: Tensor) -> Tensor:
        """Drops elements in training; (N, own channels, ...)."""
        if not self.training or not self.drops:
            return x
        ones = self.fill(x.dtype, (x.shape[0], self.num_whole, *self.pixels), 1.0)
        factors, _ = self.dropout(ones)
        return x * self.stop(self.own(factors))


class ExchangedDropout(OfSamples):
    """Dropout of own channels of the samples of all ranks of the data axis.

    Every rank draws for its own samples, as one device does, and masks are exchanged for those of own channels.

    Args:
        cell: The layer for all channels, whose generator goes on.
        placement: Where its channels are.
        axis: The data axis.
        node: The operator.
    """

    def __init__(self, cell: nn.Cell, placement: Shard, axis: SampleAxis, node: Node) -> None:
        super().__init__(axis)
        self.dropout = next(getattr(cell, name) for name in _DROPPING if hasattr(cell, name))
        self.drops = float(node.attributes["p"]) > 0
        pixels = (1,) * len(node.shape[2:]) if node.attributes["whole_channels"] else tuple(node.shape[2:])
        self.mask_shape = (sum(map(len, placement.lists)), *pixels)
        self.num_own = 1
        self.fill = ops.Fill()
        hide(self, exchange=Exchanged(axis, placement.lists))

    def expect(self, num_own: int, capacity: int) -> None:
        """See `SampleAxis.expect`."""
        self.num_own = num_own

    def construct(self, x: Tensor) -> Tensor:
        """Drops elements in training; (all samples, own channels, ...)."""
        if not self.training or not self.drops:
            return x
        factors, _ = self.dropout(self.fill(x.dtype, (self.num_own, *self.mask_shape), 1.0))
        return x * self.exchange(factors)


def narrow_norm(cell: nn.Cell, placement: Shard, axis: ChannelAxis) -> None:
    """Tells a norm that it has own channels, or groups of them, only.

    Args:
        cell: A norm of MindSpore's; its parameters are cut already.
        placement: Where its channels are.
        axis: The channel axis.
    """
    num_whole, num_own = sum(map(len, placement.lists)), len(placement.lists[axis.position])
    for name in ("num_features", "num_channels", "num_groups"):
        size = getattr(cell, name, None)
        if isinstance(size, int):
            setattr(cell, name, size * num_own // num_whole)

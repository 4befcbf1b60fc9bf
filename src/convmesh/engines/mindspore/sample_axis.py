"""The data axis where channels are split along it: its ranks exchange samples for channels.

MindSpore's graphs have fixed shapes. So each rank fills its samples up to one number, equal on all ranks, with copies
of its last one; their gradients are zero. An all-to-all, which MindSpore on CPU does not have, is an all-gather of
which a rank keeps its own part. Graphs of all ranks have one structure, as `channel_axis` tells: how many samples a
rank has is a fixed number in them.

Legend: N own samples, B samples that each rank fills up to, k ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

from convmesh.engines.mindspore.channel_axis import ChannelAxis, Gather, Own, hide
from convmesh.engines.mindspore.collectives import DataAxis
from convmesh.plan.partitions import Lists
from convmesh.plan.plan import DATA


class SampleAxis(ChannelAxis):
    """The ranks of the data axis, for tensors of which they hold own channels of all samples.

    Args:
        axis: The data axis.
        native: Whether the device has all-gather and reduce-scatter on groups.
    """

    def __init__(self, axis: DataAxis, *, native: bool) -> None:
        super().__init__(
            position=axis.position, size=axis.size, group=axis.group, first_rank=axis.first_rank, native=native
        )
        self.name = DATA
        self._cells: list[OfSamples] = []

    def register(self, cell: OfSamples) -> None:
        """Notes a cell that has to know the number of samples."""
        self._cells.append(cell)

    def expect(self, num_own: int, *, capacity: int) -> None:
        """Tells the number of samples of the graphs that are compiled next.

        Args:
            num_own: Samples of this rank.
            capacity: Samples that each rank fills up to; equal on all ranks and for all graphs of ``num_own`` samples.
        """
        for cell in self._cells:
            cell.expect(num_own, capacity)


class OfSamples(nn.Cell):
    """A cell whose fixed numbers depend on how many samples there are."""

    def __init__(self, axis: SampleAxis) -> None:
        super().__init__(auto_prefix=False)
        self.position, self.size = axis.position, axis.size
        axis.register(self)

    def expect(self, num_own: int, capacity: int) -> None:
        """See `SampleAxis.expect`."""
        raise NotImplementedError


class Fill(OfSamples):
    """Own samples and copies of the last: from (N, ...) to (B, ...)."""

    def __init__(self, axis: SampleAxis) -> None:
        super().__init__(axis)
        self.pick = ops.Gather()
        self.rows = Tensor(np.zeros(1, np.int32))

    def expect(self, num_own: int, capacity: int) -> None:
        """See `SampleAxis.expect`."""
        self.rows = Tensor(np.minimum(np.arange(capacity), num_own - 1).astype(np.int32))

    def construct(self, x: Tensor) -> Tensor:
        """Shape (B, ...)."""
        return self.pick(x, self.rows, 0)


class FillZeros(OfSamples):
    """Own samples and zeros: from (N, ...) to (B, ...)."""

    def __init__(self, axis: SampleAxis) -> None:
        super().__init__(axis)
        self.zeros, self.join, self.pick = ops.ZerosLike(), ops.Concat(0), ops.Gather()
        self.rows = Tensor(np.zeros(1, np.int32))

    def expect(self, num_own: int, capacity: int) -> None:
        """See `SampleAxis.expect`."""
        self.rows = Tensor(np.arange(capacity).clip(max=num_own).astype(np.int32))

    def construct(self, x: Tensor) -> Tensor:
        """Shape (B, ...)."""
        return self.pick(self.join((x, self.zeros(x))), self.rows, 0)


class OwnSamples(OfSamples):
    """Own samples of all, or of those that a reduce-scatter has left: from (k B, ...) or (B, ...) to (N, ...).

    Args:
        axis: The data axis.
        of_all: Whether there are those of all ranks.
    """

    def __init__(self, axis: SampleAxis, *, of_all: bool = True) -> None:
        super().__init__(axis)
        self.of_all = of_all
        self.pick = ops.Gather()
        self.rows = Tensor(np.zeros(1, np.int32))

    def expect(self, num_own: int, capacity: int) -> None:
        """See `SampleAxis.expect`."""
        first = self.position * capacity if self.of_all else 0
        self.rows = Tensor(np.arange(first, first + num_own).astype(np.int32))

    def construct(self, x: Tensor) -> Tensor:
        """Shape (N, ...)."""
        return self.pick(x, self.rows, 0)


class GatherSamples(OfSamples):
    """Those of all ranks, one rank after the other: from (B, ...) to (k B, ...).

    Args:
        axis: The data axis.
        kind: What it stands for.
    """

    def __init__(self, axis: SampleAxis, *, kind: str = "all-gather") -> None:
        super().__init__(axis)
        self.native = axis.gathers
        operator = "AllGather" if self.native else "AllReduce"
        self.collect = axis.collective(operator, kind, share=(1, axis.size))
        self.zeros, self.join, self.pick = ops.ZerosLike(), ops.Concat(0), axis.apart(ops.Gather())
        self.rows = Tensor(np.zeros(1, np.int32))

    def expect(self, num_own: int, capacity: int) -> None:
        """See `SampleAxis.expect`."""
        rows = np.full(capacity * self.size, capacity)
        rows[self.position * capacity :][:capacity] = np.arange(capacity)
        self.rows = Tensor(rows.astype(np.int32))

    def construct(self, x: Tensor) -> Tensor:
        """Shape (k B, ...)."""
        if self.native:
            return self.collect(x)
        return self.collect(self.pick(self.join((x, self.zeros(x))), self.rows, 0))


class ScatterSamples(nn.Cell):
    """Own samples of the sum of all ranks' tensors: from (k B, ...) to (N, ...).

    Args:
        axis: The data axis.
    """

    def __init__(self, axis: SampleAxis) -> None:
        super().__init__(auto_prefix=False)
        operator, share = ("ReduceScatter", (axis.size, 1)) if axis.native else ("AllReduce", (1, 1))
        self.sum = axis.collective(operator, "reduce-scatter", share=share)
        hide(self, own=OwnSamples(axis, of_all=not axis.native))

    def construct(self, partial: Tensor) -> Tensor:
        """Shape (N, ...)."""
        return self.own(self.sum(partial))


class Chain(nn.Cell):
    """Cells one after the other.

    Args:
        first: The first.
        second: The second.
        third: The third, if there is one.
    """

    def __init__(self, first: nn.Cell, second: nn.Cell, third: nn.Cell | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.is_long = third is not None
        hide(self, first=first, second=second, third=third)

    def construct(self, x: Tensor) -> Tensor:
        """What the last one makes."""
        y = self.second(self.first(x))
        return self.third(y) if self.is_long else y


class Exchanged(nn.Cell):
    """Own channels of all samples from all channels of own ones, of what takes no gradient.

    Args:
        axis: The data axis.
        channels: Of each rank.
    """

    def __init__(self, axis: SampleAxis, channels: Lists) -> None:
        super().__init__(auto_prefix=False)
        hide(self, there=_to_channels(Fill(axis), channels, axis))
        self.zeros = ops.ZerosLike()

    def construct(self, x: Tensor) -> Tensor:
        """Shape (k B, own channels, ...)."""
        return self.there(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        """Zeros."""
        return (self.zeros(x),)


def sample_ways(kind: str, channels: Lists, axis: SampleAxis) -> tuple[nn.Cell, nn.Cell]:
    """What the forward and the backward of a change between samples and channels do.

    Args:
        kind: Of the change.
        channels: Of each rank; empty where only samples come together.
        axis: The data axis.

    Returns:
        Two cells.
    """
    ways: dict[str, Any] = {
        "to_channels": lambda: (_to_channels(Fill(axis), channels, axis), _to_samples(channels, axis)),
        "to_samples": lambda: (_to_samples(channels, axis), _to_channels(FillZeros(axis), channels, axis)),
        "gather_samples": lambda: (Chain(Fill(axis), GatherSamples(axis)), ScatterSamples(axis)),
        "scatter_samples": lambda: (ScatterSamples(axis), Chain(FillZeros(axis), GatherSamples(axis))),
    }
    there, back = ways[kind]()
    return there, back


def _to_channels(fill: nn.Cell, channels: Lists, axis: SampleAxis) -> nn.Cell:
    return Chain(fill, GatherSamples(axis, kind="all-to-all"), Own(axis, channels))


def _to_samples(channels: Lists, axis: SampleAxis) -> nn.Cell:
    return Chain(Gather(axis, channels, kind="all-to-all"), OwnSamples(axis))

"""The channel axis in MindSpore's graphs: gathering, summing and scattering channels, exact for any index lists.

MindSpore on CPU has no reduce-scatter, and an all-gather among all ranks only. There, a reduce-scatter is an all-reduce
of which a rank keeps its own channels, and an all-gather on a group an all-reduce of own channels within zeros: 55
instead of 31 ms for 16 MiB on two ranks of one machine. On Ascend and GPU the operators of these names are used. Both
take parts of one size only; for others the all-reduce stands in everywhere.

Where all ranks compute on the CPU of one machine they exchange through its memory instead (`shared_exchange`), called
by the graph like any operator: ResNet-50's collectives take a fraction of the time, no tensor of zeros is made, and
parts may have any size.

What a rank sends is matched by its order alone, and MindSpore orders the collectives of a graph by the graph. So the
graphs of all ranks must have one structure: a rank's channels are fixed numbers in it (padding, indices, offsets),
never other operators. `graph_record` makes sure of it whenever a graph was compiled.

Legend: N samples, C channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

from convmesh.engines.contract import World
from convmesh.engines.mindspore.collectives import DataAxis, gather_values, place_on_axis
from convmesh.engines.mindspore.host_collectives import (
    ALL,
    KIND,
    OWN,
    gathering_on_host,
    scattering_on_host,
    summing_on_host,
)
from convmesh.engines.mindspore.kernels import COLLECTIVE_SECONDS
from convmesh.engines.shared_exchange import SharedExchange
from convmesh.errors import ModelError
from convmesh.plan import CHANNEL
from convmesh.plan.partitions import Lists

_NUMBER = "convmesh_number"


class ChannelAxis(DataAxis):
    """The ranks that see the same samples and hold different channels.

    Args:
        position: Of this rank on the axis.
        size: Ranks on the axis.
        group: Name of their group; None for all ranks of the run.
        first_rank: Rank of position 0.
        native: Whether the device has all-gather and reduce-scatter on groups.
        exchange: Memory that the ranks share, if they do.

    Attributes:
        name: Of the axis in the mesh.
        gathers: Whether there is an all-gather on this group.
    """

    def __init__(
        self,
        *,
        position: int = 0,
        size: int = 1,
        group: str | None = None,
        first_rank: int = 0,
        native: bool = False,
        exchange: SharedExchange | None = None,
    ) -> None:
        super().__init__(position=position, size=size, group=group, first_rank=first_rank)
        self.name = CHANNEL
        self.native = native
        self.exchange = exchange
        self.gathers = native or group is None
        self._numbers = itertools.count()

    def __deepcopy__(self, memo: dict[int, object]) -> ChannelAxis:
        return self  # A copy of a network talks to the same ranks.

    def collective(self, operator: str, kind: str, *, share: tuple[int, int] = (1, 1)) -> Any:
        """A collective for use in a graph, marked for `graph_record.collectives_of`.

        Args:
            operator: ``"AllReduce"``, ``"AllGather"`` or ``"ReduceScatter"``.
            kind: What it stands for: ``"all-reduce"``, ``"all-gather"`` or ``"reduce-scatter"``.
            share: What part of its output is meant to enter it: so many of so many channels.

        Returns:
            The operator.
        """
        make = getattr(ops, operator)
        made = make() if self._group is None else make(group=self._group)
        for name, value in ((KIND, kind), (OWN, share[0]), (ALL, share[1])):
            made.add_prim_attr(name, value)
        return self.apart(made)

    def apart(self, operator: Any) -> Any:
        """An operator that the compiler does not merge with an equal one of the same input.

        It would leave fewer collectives than the plan has told, and keep what should be gathered again. All-reduces it
        merges in spite of their numbers; so what makes their inputs has to be told apart.
        """
        operator.add_prim_attr(_NUMBER, next(self._numbers))
        return operator

    def own(self, whole: np.ndarray, lists: Lists, *, dim: int) -> np.ndarray:
        """This rank's part of a whole array, as an array of its own."""
        return np.ascontiguousarray(whole.take(lists[self.position], axis=dim))

    def gather(self, arrays: Sequence[tuple[np.ndarray, Lists, int]]) -> list[np.ndarray]:
        """Whole arrays from every rank's parts; all ranks of the axis must call.

        Args:
            arrays: Of each array this rank's part in float32, the indices of each rank, and the dim that is split.

        Returns:
            The whole arrays, bit for bit but for the sign of zeros.
        """
        spread = [_within_zeros(part, lists, dim, self.position) for part, lists, dim in arrays]
        flat = np.concatenate([array.reshape(-1) for array in spread]) if spread else np.zeros(0, np.float32)
        total = np.empty_like(flat)
        for start in range(0, len(flat), _CHUNK):
            chunk = np.zeros(_CHUNK, np.float32)
            chunk[: len(flat) - start] = flat[start : start + _CHUNK]
            total[start : start + _CHUNK] = self._sum(Tensor(chunk)).asnumpy()[: len(flat) - start]
        ends = np.cumsum([array.size for array in spread])[:-1]
        pieces = np.split(total, ends) if spread else []
        return [piece.reshape(array.shape) for piece, array in zip(pieces, spread, strict=True)]

    def _sum(self, tensor: Tensor) -> Tensor:
        if not hasattr(self, "_summing"):
            self._summing = Sum(self)
        return self._summing(tensor)


_CHUNK = 2**20
"""Elements of whole arrays that are gathered at once: one graph for arrays of all shapes."""


def channel_axis(world: World) -> ChannelAxis | None:
    """The channel axis of a rank, None if there is none; all ranks must call it."""
    if world.mesh.size(CHANNEL) == 1:
        return None
    position, size, group, first_rank = place_on_axis(world, CHANNEL)
    on_cpu = world.device == "cpu"
    exchange = None
    if on_cpu and world.num_local_ranks == world.num_ranks:
        own = next(ranks for ranks in world.mesh.groups(CHANNEL) if world.rank in ranks)
        exchange = SharedExchange.connect(
            position=position,
            size=size,
            gather=lambda value: list(map(gather_values(value).__getitem__, own)),
            timeout_seconds=COLLECTIVE_SECONDS,
        )
    return ChannelAxis(
        position=position, size=size, group=group, first_rank=first_rank, native=not on_cpu, exchange=exchange
    )


class Keep(nn.Cell):
    """The tensor itself."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, x: Tensor) -> Tensor:
        """The input."""
        return x


class Sum(nn.Cell):
    """The sum of all ranks' tensors.

    Args:
        axis: The channel axis.
    """

    def __init__(self, axis: ChannelAxis) -> None:
        super().__init__(auto_prefix=False)
        if axis.exchange is not None:
            self.sum = summing_on_host(axis.exchange)
        else:
            self.sum = axis.collective("AllReduce", "all-reduce")

    def construct(self, x: Tensor) -> Tensor:
        """The sum of all ranks' inputs."""
        return self.sum(x)


class Own(nn.Cell):
    """This rank's channels of a whole tensor.

    Args:
        axis: The channel axis.
        lists: Channels of each rank.
    """

    def __init__(self, axis: ChannelAxis, lists: Lists) -> None:
        super().__init__(auto_prefix=False)
        own = lists[axis.position]
        self.num_whole = sum(map(len, lists))
        self.in_order = in_order(lists)
        self.first, self.count = own[0], len(own)
        self.indices = Tensor(np.array(own, np.int32))
        self.slice = ops.Slice()
        self.pick = ops.Gather()

    def construct(self, whole: Tensor) -> Tensor:
        """Own channels, shape (N, own channels, ...)."""
        check_channels(whole.shape, self.num_whole)
        if self.in_order:
            begin, size = box(whole.shape, self.first, self.count)
            return self.slice(whole, begin, size)
        return self.pick(whole, self.indices, 1)


class Spread(nn.Cell):
    """This rank's channels within zeros of the whole's shape.

    Args:
        axis: The channel axis.
        lists: Channels of each rank.
    """

    def __init__(self, axis: ChannelAxis, lists: Lists) -> None:
        super().__init__(auto_prefix=False)
        own, size = lists[axis.position], sum(map(len, lists))
        self.count = len(own)
        places = np.full(size, len(own), np.int32)
        places[list(own)] = np.arange(len(own))
        self.places = Tensor(places)
        # ops.Pad takes 180 ms where these take 2 ms.
        self.slice, self.zeros, self.join = ops.Slice(), ops.ZerosLike(), ops.Concat(1)
        self.pick = axis.apart(ops.Gather())

    def construct(self, part: Tensor) -> Tensor:
        """Shape (N, C, ...)."""
        check_channels(part.shape, self.count)
        begin, size = box(part.shape, 0, 1)
        zero = self.zeros(self.slice(part, begin, size))
        return self.pick(self.join((part, zero)), self.places, 1)


class Gather(nn.Cell):
    """The whole tensor from every rank's channels.

    Args:
        axis: The channel axis.
        lists: Channels of each rank.
        kind: What it stands for.
    """

    def __init__(self, axis: ChannelAxis, lists: Lists, *, kind: str = "all-gather") -> None:
        super().__init__(auto_prefix=False)
        own, size = lists[axis.position], sum(map(len, lists))
        self.shares = axis.exchange is not None
        self.native = not self.shares and axis.gathers and len({len(part) for part in lists}) == 1
        self.in_order, self.count = in_order(lists), len(own)
        if axis.exchange is not None:
            self.gather = gathering_on_host(axis.exchange, lists, axis.position)
        elif self.native:
            self.gather = axis.collective("AllGather", kind, share=(1, len(lists)))
            self.num_ranks = len(lists)
            # On CPU, each transpose would keep memory of its own for ever.
            self.slice, self.join = ops.Slice(), ops.Concat(1)
            self.to_whole = Tensor(np.argsort(np.concatenate(lists)).astype(np.int32))
            self.pick = ops.Gather()
        else:
            hide(self, spread=Spread(axis, lists))
            self.sum = axis.collective("AllReduce", kind, share=(len(own), size))

    def construct(self, part: Tensor) -> Tensor:
        """Shape (N, C, ...)."""
        check_channels(part.shape, self.count)
        if self.shares:
            return self.gather(part)
        if not self.native:
            return self.sum(self.spread(part))
        stacked = self.gather(part)
        parts: tuple[Tensor, ...] = ()
        for rank in range(self.num_ranks):
            begin, size = piece(stacked.shape, self.num_ranks, rank, 0)
            parts += (self.slice(stacked, begin, size),)
        whole = self.join(parts)
        return whole if self.in_order else self.pick(whole, self.to_whole, 1)


class ReduceScatter(nn.Cell):
    """This rank's channels of the sum of all ranks' tensors.

    Args:
        axis: The channel axis.
        lists: Channels of each rank.
    """

    def __init__(self, axis: ChannelAxis, lists: Lists) -> None:
        super().__init__(auto_prefix=False)
        self.shares = axis.exchange is not None
        self.native = axis.native and len({len(part) for part in lists}) == 1
        self.in_order, self.num_whole = in_order(lists), sum(map(len, lists))
        if axis.exchange is not None:
            self.scatter = scattering_on_host(axis.exchange, lists, axis.position)
        elif self.native:
            self.scatter = axis.collective("ReduceScatter", "reduce-scatter", share=(len(lists), 1))
            self.num_ranks = len(lists)
            self.slice, self.join = ops.Slice(), ops.Concat(0)
            self.to_parts = Tensor(np.concatenate(lists).astype(np.int32))
            self.pick = ops.Gather()
        else:
            hide(self, own=Own(axis, lists))
            self.sum = axis.collective("AllReduce", "reduce-scatter")

    def construct(self, partial: Tensor) -> Tensor:
        """Shape (N, own channels, ...)."""
        check_channels(partial.shape, self.num_whole)
        if self.shares:
            return self.scatter(partial)
        if not self.native:
            return self.own(self.sum(partial))
        parts = partial if self.in_order else self.pick(partial, self.to_parts, 1)
        stacked: tuple[Tensor, ...] = ()
        for rank in range(self.num_ranks):
            begin, size = piece(parts.shape, self.num_ranks, rank, 1)
            stacked += (self.slice(parts, begin, size),)
        return self.scatter(self.join(stacked))


def hide(cell: nn.Cell, **children: Any) -> None:
    """Gives a cell others to compute with that don't show among its cells: precision and names leave them alone."""
    for name, child in children.items():
        object.__setattr__(cell, name, child)


def in_order(lists: Lists) -> bool:
    """Whether the ranks' lists, joined, count up from 0."""
    return [index for own in lists for index in own] == list(range(sum(map(len, lists))))


@ops.constexpr
def check_channels(shape: tuple[int, ...], num_channels: int) -> None:
    """Refuses, while a graph is compiled, a tensor that code before has brought into another shape than on one device.

    Args:
        shape: (N, channels, ...).
        num_channels: What this rank should hold.

    Raises:
        ModelError: If it has another number of channels.
    """
    if len(shape) < 2 or shape[1] != num_channels:
        raise ModelError(
            "a tensor has not the channels that the plan gives this rank",
            got=f"shape {tuple(shape)}",
            expected=f"{num_channels} channels",
            fix="Look for a reshape to fixed numbers in construct: take them from x.shape, or use flatten",
        )


@ops.constexpr
def box(shape: tuple[int, ...], first: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Begin and size of a slice of ``count`` channels."""
    return (0, first, *[0] * (len(shape) - 2)), (shape[0], count, *shape[2:])


@ops.constexpr
def piece(shape: tuple[int, ...], count: int, number: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Begin and size of one of equal pieces along a dim.

    Args:
        shape: Of the whole.
        count: How many pieces.
        number: Which of them.
        dim: The dim that is cut.

    Returns:
        Begin and size for a slice.
    """
    begin, size = [0] * len(shape), list(shape)
    size[dim] = shape[dim] // count
    begin[dim] = number * size[dim]
    return tuple(begin), tuple(size)


def _within_zeros(part: np.ndarray, lists: Lists, dim: int, position: int) -> np.ndarray:
    shape = list(part.shape)
    shape[dim] = sum(map(len, lists))
    whole = np.zeros(shape, np.float32)
    whole[(slice(None),) * dim + (list(lists[position]),)] = part
    return whole

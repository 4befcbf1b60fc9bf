"""How channels travel between ranks on each backend; chosen here and nowhere else.

Arrays come as they lie in memory, (outer dims, channels, inner dims): (N H W, C, 1) in channels-last order, (N, C, H W)
in contiguous order. Whatever is received goes straight to its place in the result, piece by piece: no second tensor of
the whole's size.

| | gather | reduce-scatter |
|---|---|---|
| CPU, one machine | shared memory | shared memory, added up in the order of the ranks |
| Gloo | one broadcast per rank | all-to-all, and a local sum in the order of the ranks |
| NCCL, equal parts | ``all_gather_into_tensor`` | ``reduce_scatter_tensor``; half types as with Gloo |
| NCCL, unequal parts | as with Gloo | as with Gloo |

On Gloo ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` take 1.7 times as long as what is used (16 MiB on 2 and
4 ranks of one machine with two cores).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from convmesh.engines.shared_exchange import SharedExchange, as_index
from convmesh.plan.partitions import Lists

PIECE_BYTES = 8 * 2**20
"""What of a whole tensor travels at once where messages have a cost of their own."""

_HALF = (torch.float16, torch.bfloat16)


class Transport(Protocol):
    """Moves channels between the ranks of a group."""

    def gather(self, part_OCI: Tensor, lists: Lists, whole_OCI: Tensor) -> None:
        """Fills a whole tensor with the parts of all ranks."""

    def reduce_scatter(self, partial_OCI: Tensor, lists: Lists, own_OCI: Tensor) -> None:
        """Fills this rank's part of the sum of all ranks' tensors; half types are summed in float32."""

    def all_reduce(self, flat: Tensor) -> None:
        """Sums a 1-D tensor over the ranks, in place."""


class Transports:
    """The transports of a group, by device.

    Args:
        group: The process group; None for a rank on its own.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._messages: Transport = Messages(group)
        self._native: Transport = Native(group)
        exchange = _exchange_of(group) if group is not None else None
        self._shared = Shared(exchange) if exchange is not None else None

    def of(self, tensor: Tensor, num_channels: int) -> Transport:
        """What carries a tensor with so many channels."""
        if tensor.device.type != "cpu":
            return self._native
        if self._shared is not None and self._shared.fits(tensor, num_channels):
            return self._shared
        return self._messages


class Shared:
    """Through memory that the ranks of one machine share.

    Args:
        exchange: The memory.
    """

    def __init__(self, exchange: SharedExchange) -> None:
        self._exchange = exchange

    def fits(self, tensor: Tensor, num_channels: int) -> bool:
        """Whether a pixel of so many channels fits."""
        return self._exchange.fits(num_channels, tensor.element_size())

    def gather(self, part_OCI: Tensor, lists: Lists, whole_OCI: Tensor) -> None:
        """Fills a whole tensor with the parts of all ranks."""
        self._exchange.gather(_array(part_OCI), lists, _array(whole_OCI))

    def reduce_scatter(self, partial_OCI: Tensor, lists: Lists, own_OCI: Tensor) -> None:
        """Fills this rank's part of the sum of all ranks' tensors; half types are summed in float32."""
        self._exchange.reduce_scatter(_array(partial_OCI), lists, _array(own_OCI), _adder(own_OCI.dtype))

    def all_reduce(self, flat: Tensor) -> None:
        """Sums a 1-D tensor over the ranks, in place."""
        array = _array(flat)
        self._exchange.all_reduce(array, array, _adder(flat.dtype))


class Messages:
    """By broadcasts and all-to-all, for parts of any sizes.

    Args:
        group: The process group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        self._position = dist.get_group_rank(group, dist.get_rank()) if group is not None else 0

    def gather(self, part_OCI: Tensor, lists: Lists, whole_OCI: Tensor) -> None:
        """Fills a whole tensor with the parts of all ranks."""
        for rows in _pieces(whole_OCI):
            target = whole_OCI[rows]
            parts = [
                part_OCI[rows]
                if rank == self._position
                else target.new_empty(target.shape[0], len(own), target.shape[2])
                for rank, own in enumerate(lists)
            ]
            works = [
                dist.broadcast(part, src=self._ranks[rank], group=self._group, async_op=True)
                for rank, part in enumerate(parts)
            ]
            for work, part, own in zip(works, parts, lists, strict=True):
                work.wait()
                target[:, _index(own, target)] = part

    def reduce_scatter(self, partial_OCI: Tensor, lists: Lists, own_OCI: Tensor) -> None:
        """Fills this rank's part of the sum of all ranks' tensors; half types are summed in float32."""
        exact = torch.float32 if own_OCI.dtype in _HALF else own_OCI.dtype
        for rows in _pieces(partial_OCI):
            partial, own = partial_OCI[rows], own_OCI[rows]
            sizes = [len(entry) * partial.shape[0] * partial.shape[2] for entry in lists]
            sent = torch.cat([partial[:, _index(entry, partial)].reshape(-1) for entry in lists])
            received = torch.empty((len(lists), own.numel()), dtype=own.dtype, device=own.device)
            dist.all_to_all_single(received.view(-1), sent, [own.numel()] * len(lists), sizes, group=self._group)
            own.copy_(received.sum(dim=0, dtype=exact).view(own.shape))

    def all_reduce(self, flat: Tensor) -> None:
        """Sums a 1-D tensor over the ranks, in place."""
        dist.all_reduce(flat, group=self._group)


class Native(Messages):
    """By all-gather and reduce-scatter where all parts have one size."""

    def gather(self, part_OCI: Tensor, lists: Lists, whole_OCI: Tensor) -> None:
        """Fills a whole tensor with the parts of all ranks."""
        if not _is_even(lists):
            return super().gather(part_OCI, lists, whole_OCI)
        for rows in _pieces(whole_OCI):
            part, target = part_OCI[rows], whole_OCI[rows]
            stacked = target.new_empty(len(lists), *part.shape)
            dist.all_gather_into_tensor(stacked.view(-1), part.reshape(-1), group=self._group)
            for received, own in zip(stacked, lists, strict=True):
                target[:, _index(own, target)] = received
        return None

    def reduce_scatter(self, partial_OCI: Tensor, lists: Lists, own_OCI: Tensor) -> None:
        """Fills this rank's part of the sum of all ranks' tensors; half types are summed in float32."""
        if not _is_even(lists) or own_OCI.dtype in _HALF:
            return super().reduce_scatter(partial_OCI, lists, own_OCI)
        for rows in _pieces(partial_OCI):
            partial, own = partial_OCI[rows], own_OCI[rows]
            sent = torch.cat([partial[:, _index(entry, partial)].reshape(-1) for entry in lists])
            dist.reduce_scatter_tensor(own.view(-1), sent, group=self._group)
        return None


_exchanges: weakref.WeakKeyDictionary[Any, SharedExchange | None] = weakref.WeakKeyDictionary()


def _exchange_of(group: dist.ProcessGroup) -> SharedExchange | None:
    """The memory that the ranks of a group share; all of them must call it."""
    if "gloo" not in str(dist.get_backend_config(group)):
        return None
    if group not in _exchanges:
        size = dist.get_world_size(group)

        def gather(value: Any) -> list[Any]:
            values = [None] * size
            dist.all_gather_object(values, value, group=group)
            return values

        _exchanges[group] = SharedExchange.connect(
            position=dist.get_rank(group), size=size, gather=gather, timeout_seconds=_TIMEOUT_SECONDS
        )
    return _exchanges[group]


_TIMEOUT_SECONDS = 1800.0
"""As long as PyTorch itself waits for a collective of Gloo."""


def _pieces(whole_OCI: Tensor) -> Iterator[slice]:
    """Ranges of the outer dim; as many on all ranks."""
    num_outer = whole_OCI.shape[0]
    row_bytes = max(1, whole_OCI[:1].numel() * whole_OCI.element_size())
    rows = max(1, PIECE_BYTES // row_bytes)
    for first in range(0, num_outer, rows):
        yield slice(first, first + rows)


def _is_even(lists: Lists) -> bool:
    return len({len(own) for own in lists}) == 1


def _index(own: Sequence[int], like: Tensor) -> Any:
    index = as_index(own)
    return index if isinstance(index, slice) else torch.from_numpy(index).to(like.device)


def _array(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    # NumPy has no bfloat16.
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _adder(dtype: torch.dtype) -> Any:
    """Adds arrays up in order, half types in float32."""

    def add_up(parts: Sequence[Any], total: Any) -> None:
        result, *rest = [torch.from_numpy(array).view(dtype) for array in (total, *parts)]
        if dtype in _HALF:
            result.copy_(torch.stack([part.float() for part in rest]).sum(dim=0))
            return
        torch.add(rest[0], rest[1], out=result)
        for part in rest[2:]:
            result.add_(part)

    return add_up

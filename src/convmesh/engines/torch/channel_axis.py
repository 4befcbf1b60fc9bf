"""Collectives over the channel axis: exact for uneven partitions and arbitrary index lists, counted by purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from convmesh.engines.contract import CollectiveCount
from convmesh.engines.torch.channel_transport import Transports
from convmesh.plan import CHANNEL
from convmesh.plan.partitions import Lists
from convmesh.profiling.recorder import RECORDER


@dataclass
class _Tally:
    number: int = 0
    num_bytes: int = 0


class ChannelAxis:
    """The ranks that see the same samples and hold different channels, as this rank sees them.

    Args:
        group: Their process group; None for a rank on its own.
        channels_last: Whether images travel, and arrive, in channels-last memory order. All ranks must agree: what
            order a tensor of one channel has, it does not tell itself.
        name: Of the axis of the mesh.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, channels_last: bool = False, name: str = CHANNEL) -> None:
        self._group = group
        self._name = name
        self._channels_last = channels_last
        self._ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        self._position = dist.get_group_rank(group, dist.get_rank()) if group is not None else 0
        self._tallies: dict[tuple[str, str], _Tally] = {}
        self._transports = Transports(group)
        self._indices: dict[tuple[Lists, torch.device], tuple[Tensor | None, Tensor | None]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> ChannelAxis:
        return self  # A copy of a network talks to the same ranks.

    @property
    def size(self) -> int:
        """Ranks on the axis."""
        return len(self._ranks)

    @property
    def name(self) -> str:
        """Its name in the mesh."""
        return self._name

    @property
    def position(self) -> int:
        """Where this rank sits on the axis."""
        return self._position

    def begin_update(self) -> None:
        """Starts counting anew."""
        self._tallies.clear()

    def counts(self) -> tuple[CollectiveCount, ...]:
        """What was communicated since ``begin_update``."""
        return tuple(
            CollectiveCount(purpose=purpose, kind=kind, number=tally.number, num_bytes=tally.num_bytes, axis=self._name)
            for (purpose, kind), tally in self._tallies.items()
        )

    def own(self, whole: Tensor, lists: Lists, *, dim: int = 1) -> Tensor:
        """This rank's part of a whole tensor, in its memory format.

        Args:
            whole: Equal on all ranks.
            lists: Indices of each rank along the dim.
            dim: The dim that is split.

        Returns:
            A tensor of its own.
        """
        own = lists[self.position]
        if own == tuple(range(own[0], own[0] + len(own))):
            part = whole.narrow(dim, own[0], len(own))
        else:
            part = whole.index_select(dim, torch.tensor(own, device=whole.device))
        return part.clone(memory_format=self._format(whole))

    def gather(self, part: Tensor, lists: Lists, *, dim: int = 1, purpose: str = "activations") -> Tensor:
        """The whole tensor from every rank's part.

        Args:
            part: This rank's part.
            lists: Indices of each rank along the dim.
            dim: The dim that is split.
            purpose: What it is counted as.

        Returns:
            The whole tensor, in the memory format of the part.
        """
        part = part.contiguous(memory_format=self._format(part))
        num_channels = sum(map(len, lists))
        whole = self._empty(part, num_channels, dim)
        transport = self._transports.of(part, num_channels)
        part_OCI, whole_OCI = self._in_memory(part, dim), self._in_memory(whole, dim)
        with self._count(purpose, "all-gather", part):
            transport.gather(part_OCI, lists, whole_OCI)
        return whole

    def reduce_scatter(self, partial: Tensor, lists: Lists, *, dim: int = 1, purpose: str = "activations") -> Tensor:
        """This rank's part of the sum of all ranks' tensors.

        Args:
            partial: This rank's summand of the whole tensor.
            lists: Indices of each rank along the dim.
            dim: The dim that is split.
            purpose: What it is counted as.

        Returns:
            The part, in the memory format of the summand; half types are summed in float32.
        """
        partial = partial.contiguous(memory_format=self._format(partial))
        own = self._empty(partial, len(lists[self.position]), dim)
        transport = self._transports.of(partial, partial.shape[dim])
        partial_OCI, own_OCI = self._in_memory(partial, dim), self._in_memory(own, dim)
        with self._count(purpose, "reduce-scatter", partial):
            transport.reduce_scatter(partial_OCI, lists, own_OCI)
        return own

    def all_reduce(self, tensor: Tensor, *, purpose: str = "activations") -> Tensor:
        """The sum of all ranks' tensors, as a new tensor."""
        total = tensor.clone(memory_format=self._format(tensor))
        transport, flat = self._transports.of(total, 1), flat_view(total)
        with self._count(purpose, "all-reduce", total):
            transport.all_reduce(flat)
        return total

    @torch.no_grad()
    def broadcast_(self, tensors: Sequence[Tensor], *, purpose: str) -> None:
        """Gives every rank the tensors of the first, in place."""
        for tensor in tensors if self._group is not None else ():
            flat = tensor.detach().contiguous()
            dist.broadcast(flat, src=self._ranks[0], group=self._group)
            self._count(purpose, "broadcast", flat)
            tensor.copy_(flat)

    def _order(self, lists: Lists, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Index lists from joined parts to the whole and back; None where both have one order."""
        key = (lists, device)
        if key not in self._indices:
            joined = [index for own in lists for index in own]
            if joined == sorted(joined):
                self._indices[key] = (None, None)
            else:
                to_parts = torch.tensor(joined, device=device)
                self._indices[key] = (to_parts.argsort(), to_parts)
        return self._indices[key]

    def _in_memory(self, tensor: Tensor, dim: int) -> Tensor:
        """A view as (outer dims, channels, inner dims), in the order in which they lie in memory."""
        order = [0, 2, 3, 1] if self._format(tensor) == torch.channels_last else list(range(tensor.ndim))
        sizes = [tensor.shape[entry] for entry in order]
        place = order.index(dim)
        return flat_view(tensor).view(math.prod(sizes[:place]), sizes[place], math.prod(sizes[place + 1 :]))

    def _format(self, tensor: Tensor) -> torch.memory_format:
        return torch.channels_last if self._channels_last and tensor.ndim == 4 else torch.contiguous_format

    def _empty(self, like: Tensor, size: int, dim: int) -> Tensor:
        shape = list(like.shape)
        shape[dim] = size
        return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=self._format(like))

    def _count(self, purpose: str, kind: str, tensor: Tensor) -> AbstractContextManager[None]:
        """Counts a collective; as a ``with`` it notes the time too."""
        tally = self._tallies.setdefault((purpose, kind), _Tally())
        num_bytes = tensor.numel() * tensor.element_size()
        tally.number += 1
        tally.num_bytes += num_bytes
        return RECORDER.span("communication", f"{kind} {purpose}", axis=self._name, num_bytes=num_bytes)


def flat_view(tensor: Tensor) -> Tensor:
    """All elements in memory order, as a view of a tensor that is dense in its memory format."""
    return tensor.as_strided((tensor.numel(),), (1,))

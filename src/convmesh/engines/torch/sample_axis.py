"""The data axis where channels are split along it: its ranks exchange samples for channels.

Ranks may have different numbers of samples. They tell each other theirs whenever samples come together.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from convmesh.engines.torch.channel_axis import ChannelAxis, flat_view
from convmesh.errors import ModelError
from convmesh.plan.partitions import Lists
from convmesh.plan.plan import DATA


@dataclass(frozen=True)
class Cut:
    """Along which dim a tensor is split over the ranks.

    Args:
        dim: 0 for samples, 1 for channels.
        lists: Indices of each rank along it.
    """

    dim: int
    lists: Lists


class SampleAxis(ChannelAxis):
    """The ranks of the data axis, for tensors of which they hold own channels of all samples.

    Args:
        group: Their process group, not the one in which gradients are summed: in a backward both are busy at once.
        channels_last: Whether images travel, and arrive, in channels-last memory order.
    """

    def __init__(self, group: dist.ProcessGroup, *, channels_last: bool = False) -> None:
        super().__init__(group, channels_last=channels_last, name=DATA)
        self._lists: dict[tuple[int, ...], Lists] = {}
        self._told: Lists = ()

    @property
    def samples(self) -> Cut:
        """The samples of each rank among all, as they were last told.

        Raises:
            ModelError: If samples have not come together yet.
        """
        if not self._told:
            raise ModelError("own samples are wanted back of a tensor before samples came together")
        return Cut(0, self._told)

    def tell(self, part: Tensor) -> Cut:
        """Tells all ranks how many samples a tensor has; all must call.

        Args:
            part: (own samples, ...).

        Returns:
            The samples of each rank among all.
        """
        own = torch.tensor([part.shape[0]], dtype=torch.int64, device=part.device)
        of_rank = [torch.empty_like(own) for _ in range(self.size)]
        with self._count("samples", "all-gather", own):
            dist.all_gather(of_rank, own, group=self._group)
        counts = tuple(int(count) for count in of_rank)
        if counts not in self._lists:
            ends = list(itertools.accumulate(counts))
            self._lists[counts] = tuple(tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True))
        self._told = self._lists[counts]
        return Cut(0, self._told)

    def exchange(self, part: Tensor, *, cut: Cut, joined: Cut, purpose: str = "activations") -> Tensor:
        """Splits a tensor along one dim and brings it together along another: an all-to-all.

        Args:
            part: This rank's part along ``joined``, whole along ``cut``.
            cut: How it is split afterwards.
            joined: How it is split before.
            purpose: What it is counted as.

        Returns:
            This rank's part along ``cut``, whole along ``joined``, in the memory format of the part.
        """
        form = self._format(part)
        span = self._count(purpose, "all-to-all", part)
        _, to_parts = self._order(cut.lists, part.device)
        if to_parts is not None:
            part = part.index_select(cut.dim, to_parts)
        pieces = part.split([len(own) for own in cut.lists], dim=cut.dim)
        sent = [piece.contiguous(memory_format=form) for piece in pieces]
        own = sent[self.position]
        received = [self._empty(own, len(theirs), joined.dim) for theirs in joined.lists]
        flat = torch.empty(sum(piece.numel() for piece in received), dtype=part.dtype, device=part.device)
        with span:
            dist.all_to_all_single(
                flat,
                torch.cat([flat_view(piece) for piece in sent]),
                output_split_sizes=[piece.numel() for piece in received],
                input_split_sizes=[piece.numel() for piece in sent],
                group=self._group,
            )
        for piece, values in zip(received, flat.split([piece.numel() for piece in received]), strict=True):
            flat_view(piece).copy_(values)
        whole = torch.cat(received, dim=joined.dim)
        to_whole, _ = self._order(joined.lists, whole.device)
        if to_whole is not None:
            whole = whole.index_select(joined.dim, to_whole)
        return whole.contiguous(memory_format=form)

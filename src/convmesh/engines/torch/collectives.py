"""Collectives over the data axis, each counted by purpose. A group of one communicates nothing.

Gloo serves CPU tensors, NCCL those on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from convmesh.engines.contract import CollectiveCount
from convmesh.engines.torch.storage import StorageOrder
from convmesh.profiling.recorder import RECORDER

MIB = 2**20


@dataclass
class _Tally:
    number: int = 0
    num_bytes: int = 0


class DataAxis:
    """The ranks that hold the same parameters and see different samples, as this rank sees them.

    Args:
        group: Their process group; None for a rank on its own.

    Attributes:
        last_sent: When the last bucket of gradients was sent off, in seconds of the recorder.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        self._tallies: dict[tuple[str, str], _Tally] = {}
        self._parts: frozenset[str] = frozenset()
        self.last_sent = 0.0

    @property
    def size(self) -> int:
        """Ranks on the axis."""
        return len(self._ranks)

    @property
    def position(self) -> int:
        """Where this rank sits on the axis."""
        return dist.get_group_rank(self._group, dist.get_rank()) if self._group is not None else 0

    def begin_update(self) -> None:
        """Starts counting anew."""
        self._tallies.clear()

    def counts(self) -> tuple[CollectiveCount, ...]:
        """What was communicated since ``begin_update``."""
        return tuple(
            CollectiveCount(purpose=purpose, kind=kind, number=tally.number, num_bytes=tally.num_bytes)
            for (purpose, kind), tally in self._tallies.items()
        )

    def sum_(self, tensor: Tensor, *, purpose: str) -> None:
        """Sums a tensor over the axis, in place."""
        self._all_reduce(tensor, dist.ReduceOp.SUM, purpose)

    def max_(self, tensor: Tensor, *, purpose: str) -> None:
        """Takes the largest of each element over the axis, in place."""
        self._all_reduce(tensor, dist.ReduceOp.MAX, purpose)

    def broadcast_(self, tensors: Sequence[Tensor], *, purpose: str) -> None:
        """Gives every rank the tensors of the first, in place."""
        if self._group is None:
            return
        # Gloo takes contiguous tensors only: each travels flat, in its memory order.
        orders = [StorageOrder.of(tensor) for tensor in tensors]
        flats = [order.flatten(tensor.detach()) for order, tensor in zip(orders, tensors, strict=True)]
        works = [dist.broadcast(flat, src=self._ranks[0], group=self._group, async_op=True) for flat in flats]
        for tensor, order, flat, work in zip(tensors, orders, flats, works, strict=True):
            work.wait()
            self._count(purpose, "broadcast", flat)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(order.unflatten(flat, tensor.shape))

    def share_slices_(self, flat: Tensor, *, purpose: str) -> None:
        """Gives every rank all slices of a flat tensor of which each rank has its own up to date, in place.

        Args:
            flat: 1-D, divisible by the size of the axis; slice ``r`` of equal length belongs to position ``r``.
            purpose: What it is counted as.
        """
        if self._group is None:
            return
        num_bytes = flat.numel() * flat.element_size() // self.size
        with RECORDER.span("communication", f"all-gather {purpose}", axis="data", num_bytes=num_bytes):
            self._share_slices(flat, purpose)

    def _share_slices(self, flat: Tensor, purpose: str) -> None:
        slices = flat.chunk(self.size)
        if flat.is_cuda:
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(flat, slices[self.position], group=self._group)
            self._count(purpose, "all-gather", slices[self.position])
            return
        # Gloo's all-gather copies its input and output: 250-300 ms for 100 MB on two ranks, against 50-60 ms for
        # one broadcast of each slice in place.
        works = [
            dist.broadcast(part, src=self._ranks[position], group=self._group, async_op=True)
            for position, part in enumerate(slices)
        ]
        for part, work in zip(slices, works, strict=True):
            self._count(purpose, "broadcast", part)
            work.wait()

    def data_parallel(
        self,
        network: nn.Module,
        *,
        bucket_bytes: int,
        reduction: torch.dtype,
        parts: Collection[str] = (),
    ) -> DistributedDataParallel | nn.Module:
        """Wraps a network so that its backward sums gradients over the axis, bucket by bucket, as they get ready.

        Looking for unused parameters costs one walk of the graph and one small all-reduce per update, and gives: ranks
        that use different parameters don't hang, a parameter used on one rank only is reduced with zeros from the
        others, one used nowhere keeps no gradient, as on one device; and buckets stay as they were first laid out, so
        that their number is known and a resumed run sums in the same order, which Gloo's ring makes depend on the
        place in the bucket.

        Args:
            network: Its parameters must be equal on all ranks, but for ``parts``.
            bucket_bytes: A bucket is closed once it holds so many bytes.
            reduction: Type in which gradients travel.
            parts: Parameters and buffers of which every rank has another part; their gradients are not summed.

        Returns:
            The wrapped network, or the network itself where there is nothing to sum.
        """
        self._parts = frozenset(parts)
        if self._group is None or not self._summed(network):
            return network
        # Tensor parallel modules of PyTorch tell DDP so, too, what is not its own.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, list(parts))
        parallel = DistributedDataParallel(
            network,
            process_group=self._group,
            bucket_cap_mb=bucket_bytes / MIB,
            **_without_buffer_broadcast(),
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
            init_sync=False,
        )
        parallel.register_comm_hook(None, lambda _, bucket: self._sum_bucket(bucket, reduction))
        return parallel

    def count_used_parameters(self, network: nn.Module) -> None:
        """Counts the all-reduce by which DDP agrees on the parameters in use: one int32 each."""
        number = self._summed(network)
        if self._group is not None and number:
            tally = self._tallies.setdefault(("gradients", "all-reduce"), _Tally())
            tally.number += 1
            tally.num_bytes += 4 * number

    def _summed(self, network: nn.Module) -> int:
        return sum(1 for name, entry in network.named_parameters() if entry.requires_grad and name not in self._parts)

    def _sum_bucket(self, bucket: Any, reduction: torch.dtype) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        sent = buffer.to(reduction) if buffer.dtype == torch.float32 else buffer
        self._count("gradients", "all-reduce", sent)
        num_bytes, begun = sent.numel() * sent.element_size(), RECORDER.now()
        self.last_sent = begun

        def finish(done: Any) -> Tensor:
            RECORDER.add_beside(
                "all-reduce gradients",
                start=begun,
                end=RECORDER.now(),
                axis="data",
                num_bytes=num_bytes,
                lane="buckets",
            )
            total: Tensor = done.value()[0]
            return total if sent is buffer else buffer.copy_(total)

        # A sum, not DDP's mean: the loss is already divided by the global number of samples.
        return dist.all_reduce(sent, group=self._group, async_op=True).get_future().then(finish)

    def _all_reduce(self, tensor: Tensor, operation: Any, purpose: str) -> None:
        if self._group is not None:
            num_bytes = tensor.numel() * tensor.element_size()
            with RECORDER.span("communication", f"all-reduce {purpose}", axis="data", num_bytes=num_bytes):
                dist.all_reduce(tensor, op=operation, group=self._group)
            self._count(purpose, "all-reduce", tensor)

    def _count(self, purpose: str, kind: str, tensor: Tensor) -> None:
        tally = self._tallies.setdefault((purpose, kind), _Tally())
        tally.number += 1
        tally.num_bytes += tensor.numel() * tensor.element_size()


def gather_values(value: Any) -> list[Any]:
    """Gathers a small picklable value of every rank of the default process group, in rank order.

    Args:
        value: This rank's value.

    Returns:
        One value per rank; just this one where no process group was initialised.
    """
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _without_buffer_broadcast() -> dict[str, Any]:
    """The argument that stops DDP from sending buffers in each forward; its name changed with PyTorch 2.13."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}

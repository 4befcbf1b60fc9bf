"""Which gradients travel together, and which rank owns which part of a tensor. Pure integers, no MindSpore."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from convmesh.plan.buckets import pack_buckets
from convmesh.plan.collectives import Expected

NORM_BYTES = 8
"""Bytes of the all-reduce by which the ranks of the channel axis agree on overflow and the gradient's norm: two numbers
in float32, the only type that MindSpore sums on the CPU."""


@dataclass(frozen=True)
class Interval:
    """Elements ``start`` to ``stop - 1`` of a flattened tensor; empty if they are equal."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


def plan_buckets(sizes_bytes: Sequence[int], *, bucket_bytes: int) -> tuple[int, ...]:
    """Puts tensors into buckets, last tensor first: the backward finishes the gradients of the last layers first.

    Args:
        sizes_bytes: Size of each tensor.
        bucket_bytes: A bucket is closed before the tensor that would make it larger; a larger tensor is one on its own.

    Returns:
        The bucket of each tensor, counted from 1 for the one that is sent first.
    """
    packed = pack_buckets(sizes_bytes, bucket_bytes)
    last = max(packed, default=0)
    return tuple(last - bucket + 1 for bucket in packed)


def own_intervals(counts: Sequence[int], *, position: int, size: int) -> tuple[Interval, ...]:
    """Splits the concatenation of tensors evenly over ranks and tells one rank's part of each tensor.

    Args:
        counts: Elements of each tensor.
        position: Of this rank.
        size: Number of ranks.

    Returns:
        One interval per tensor, possibly empty. Over all ranks they cover each tensor once; the ranks' totals differ by
        one element at most.
    """
    total = sum(counts)
    first, last = total * position // size, total * (position + 1) // size
    ends = list(itertools.accumulate(counts))
    intervals = []
    for end, count in zip(ends, counts, strict=True):
        begin = end - count
        start = min(max(first, begin), end) - begin
        stop = min(max(last, begin), end) - begin
        intervals.append(Interval(start, max(start, stop)))
    return tuple(intervals)


def data_collectives(
    parameter_bytes: Sequence[int],
    buffer_bytes: int,
    *,
    num_ranks: int,
    bucket_bytes: int,
    shares: bool = False,
    in_shared_memory: bool = False,
) -> tuple[Expected, ...]:
    """The closed form: what one update in float32 communicates over the data axis.

    Args:
        parameter_bytes: Of each trainable parameter as a rank holds it, in order.
        buffer_bytes: Of a rank's buffers.
        num_ranks: Ranks on the data axis.
        bucket_bytes: A bucket is closed before the tensor that would make it larger.
        shares: Whether the optimizer is sharded, so that new parameters travel as gradients do.
        in_shared_memory: Whether all tensors are summed at once, in memory that the ranks share.

    Returns:
        The all-reduces; none on an axis of one.
    """
    if num_ranks == 1:
        return ()
    times = 2 if shares else 1
    number = 1 if in_shared_memory else max(plan_buckets(parameter_bytes, bucket_bytes=bucket_bytes))
    return (Expected("all-reduce", times * number + (buffer_bytes > 0), times * sum(parameter_bytes) + buffer_bytes),)

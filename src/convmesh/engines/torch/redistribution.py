"""Changes of placement with their exact gradients: the table of `convmesh.plan.placement`.

Channels are dim 1 of every tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convmesh.engines.torch.channel_axis import ChannelAxis
from convmesh.engines.torch.recompute import Spared, is_repeating
from convmesh.engines.torch.sample_axis import Cut, SampleAxis
from convmesh.errors import ModelError
from convmesh.plan.partitions import Lists
from convmesh.plan.placement import Change


def redistribute(tensor: Tensor, change: Change, axis: ChannelAxis, *, spared: bool = False) -> Tensor:
    """Changes where the channels of a tensor are.

    Args:
        tensor: As the change's source says: (N, channels, ...).
        change: The change; ``none`` gives the tensor itself.
        axis: The axis; for changes from and to own samples a `SampleAxis`.
        spared: Whether nothing needs the result when a block is recomputed, so that nothing is communicated then.

    Returns:
        The tensor as the change's target says.

    Raises:
        ModelError: If the tensor has another number of channels than the change's source.
    """
    if change.kind == "none":
        return tensor
    if change.source:
        check_channels(tensor, len(change.source[axis.position]))
    if spared and is_repeating() and change.kind != "copy":
        whole = sum(map(len, change.source)) if change.source else tensor.shape[1]
        zeros: Tensor = Spared.apply(tensor, len(change.target[axis.position]) if change.target else whole)
        return zeros
    result: Tensor = _FUNCTIONS[change.kind].apply(tensor, change.source, change.target, axis)
    return result


def parts_of(part: Tensor, change: Change, axis: ChannelAxis) -> Cut:
    """How a tensor that a change gathers is split over the ranks: by samples, which are told, or by channels."""
    if change.kind == "gather_samples" and isinstance(axis, SampleAxis):
        return axis.tell(part)
    return Cut(1, change.source)


def check_channels(tensor: Tensor, num_channels: int) -> None:
    """Refuses a tensor that code before it has brought into another shape than on one device.

    Args:
        tensor: (N, channels, ...).
        num_channels: What this rank should hold.

    Raises:
        ModelError: If it has another number of channels.
    """
    if tensor.ndim < 2 or tensor.shape[1] != num_channels:
        raise ModelError(
            "a tensor has not the channels that the plan gives this rank",
            got=f"shape {tuple(tensor.shape)}",
            expected=f"{num_channels} channels",
            fix="Look for a reshape to fixed numbers in forward: take them from x.shape, or use flatten(1)",
        )


class _Copy(torch.autograd.Function):
    """Whole into work on own channels: every rank's gradient is a part of the sum."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, _source: Lists, _target: Lists, axis: ChannelAxis) -> Tensor:
        ctx.axis = axis
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.axis.all_reduce(gradient), None, None, None


class _Gather(torch.autograd.Function):
    """Own channels to whole, for work that all ranks do alike."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, source: Lists, _target: Lists, axis: ChannelAxis) -> Tensor:
        ctx.axis, ctx.source = axis, source
        return axis.gather(part, source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.axis.own(gradient, ctx.source), None, None, None


class _GatherSum(torch.autograd.Function):
    """Own channels to whole, for work of which every rank does a part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, source: Lists, _target: Lists, axis: ChannelAxis) -> Tensor:
        ctx.axis, ctx.source = axis, source
        return axis.gather(part, source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.axis.reduce_scatter(gradient, ctx.source), None, None, None


class _Slice(torch.autograd.Function):
    """Whole to own channels."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, _source: Lists, target: Lists, axis: ChannelAxis) -> Tensor:
        check_channels(whole, sum(map(len, target)))
        ctx.axis, ctx.target = axis, target
        return axis.own(whole, target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.axis.gather(gradient, ctx.target), None, None, None


class _Permute(torch.autograd.Function):
    """Own channels to others."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, source: Lists, target: Lists, axis: ChannelAxis) -> Tensor:
        ctx.axis, ctx.source, ctx.target = axis, source, target
        return axis.own(axis.gather(part, source), target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.axis.own(ctx.axis.gather(gradient, ctx.target), ctx.source), None, None, None


class _ReduceScatter(torch.autograd.Function):
    """Summands of the whole to own channels of the sum."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, _source: Lists, target: Lists, axis: ChannelAxis) -> Tensor:
        ctx.axis, ctx.target = axis, target
        return axis.reduce_scatter(partial, target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.axis.gather(gradient, ctx.target), None, None, None


class _AllReduce(torch.autograd.Function):
    """Summands of the whole to the sum on every rank, which all ranks use alike."""

    @staticmethod
    def forward(_ctx: Any, partial: Tensor, _source: Lists, _target: Lists, axis: ChannelAxis) -> Tensor:
        return axis.all_reduce(partial)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, None, None, None


class _ToChannels(torch.autograd.Function):
    """Own samples to own channels of all samples."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, _source: Lists, target: Lists, axis: SampleAxis) -> Tensor:
        check_channels(part, sum(map(len, target)))
        ctx.axis, ctx.channels, ctx.samples = axis, Cut(1, target), axis.tell(part)
        return axis.exchange(part, cut=ctx.channels, joined=ctx.samples)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.axis.exchange(gradient, cut=ctx.samples, joined=ctx.channels), None, None, None


class _ToSamples(torch.autograd.Function):
    """Own channels of all samples to own samples."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, source: Lists, _target: Lists, axis: SampleAxis) -> Tensor:
        ctx.axis, ctx.channels, ctx.samples = axis, Cut(1, source), axis.samples
        return axis.exchange(part, cut=ctx.samples, joined=ctx.channels)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.axis.exchange(gradient, cut=ctx.channels, joined=ctx.samples), None, None, None


class _GatherSamples(torch.autograd.Function):
    """Own samples to all samples, for work of which every rank does its channels."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, _source: Lists, _target: Lists, axis: SampleAxis) -> Tensor:
        ctx.axis, ctx.samples = axis, axis.tell(part)
        return axis.gather(part, ctx.samples.lists, dim=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.axis.reduce_scatter(gradient, ctx.samples.lists, dim=0), None, None, None


class _ScatterSamples(torch.autograd.Function):
    """Summands of all samples to own samples of the sum."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, _source: Lists, _target: Lists, axis: SampleAxis) -> Tensor:
        ctx.axis, ctx.samples = axis, axis.samples
        return axis.reduce_scatter(partial, ctx.samples.lists, dim=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.axis.gather(gradient, ctx.samples.lists, dim=0), None, None, None


_FUNCTIONS: dict[str, Any] = {
    "copy": _Copy,
    "gather": _Gather,
    "gather_sum": _GatherSum,
    "slice": _Slice,
    "permute": _Permute,
    "reduce_scatter": _ReduceScatter,
    "all_reduce": _AllReduce,
    "to_channels": _ToChannels,
    "to_samples": _ToSamples,
    "gather_samples": _GatherSamples,
    "scatter_samples": _ScatterSamples,
}

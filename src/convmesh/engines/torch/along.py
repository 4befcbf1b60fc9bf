"""Operators along channels on own ones, with their exact gradients: the table of `convmesh.plan.along`.

Each rank takes what it can of its own channels, and the ranks exchange a number or two per row, in float32 at least.

Legend: R rows, k ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from convmesh.engines.torch.channel_axis import ChannelAxis
from convmesh.engines.torch.recompute import is_repeating
from convmesh.engines.torch.redistribution import check_channels
from convmesh.graph import Node
from convmesh.plan.partitions import Lists

_HALF = (torch.float16, torch.bfloat16)


class Along:
    """An operator along channels, in place of the function that a network calls with all of them.

    Args:
        node: The operator.
        lists: Channels of each rank.
        axis: The channel axis.
        spared: Whether nothing needs its result when a block is recomputed, so that nothing is communicated then.
    """

    def __init__(self, node: Node, lists: Lists, axis: ChannelAxis, *, spared: bool = False) -> None:
        self._node = node
        self._lists = lists
        self._axis = axis
        self._repeating: Any = _Quiet(axis.size) if spared else axis
        self._work: Callable[..., Any] = getattr(self, f"_{node.kind}")

    def __call__(self, function: Callable[..., Any], x: Tensor, *arguments: Any, **options: Any) -> Any:
        """What the function gives of all channels: own ones of it, or the whole of a sum.

        Args:
            function: What the network calls.
            x: (N, own channels, ...).
            arguments: The others.
            options: Those that are named.

        Returns:
            As the plan says.

        Raises:
            ModelError: If the input has other channels than the plan gives this rank.
        """
        check_channels(x, len(self._lists[self._axis.position]))
        return self._work(function, x, *arguments, **options)

    @property
    def _group(self) -> Any:
        return self._repeating if is_repeating() else self._axis

    def _softmax(self, function: Callable[..., Any], x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        result: Tensor = _Softmax.apply(_exact(x), bool(self._node.attributes["log"]), self._group)
        return result.to(_result_type(function, x, *arguments, **options))

    def _layer_norm(
        self,
        _function: Callable[..., Any],
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        num_dims = len(normalized_shape)
        result: Tensor = _LayerNorm.apply(
            _exact(x),
            None if weight is None else _exact(weight),
            None if bias is None else _exact(bias),
            (num_dims, eps, [len(own) for own in self._lists]),
            self._group,
        )
        return result.to(_result_type(F.layer_norm, x, x.shape[-num_dims:], weight, bias, eps))

    def _sum(self, function: Callable[..., Any], x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        own = _exact(x.to(options.get("dtype") or x.dtype))
        total: Tensor = _Total.apply(own.sum(self._dims, keepdim=self._keeps_dims), self._group)
        return total.to(_result_type(function, x, *arguments, **options))

    def _mean(self, function: Callable[..., Any], x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        own = _exact(x.to(options.get("dtype") or x.dtype))
        count = sum(map(len, self._lists)) * math.prod(x.shape[dim] for dim in self._dims if dim != 1)
        total: Tensor = _Total.apply(own.sum(self._dims, keepdim=self._keeps_dims) / count, self._group)
        return total.to(_result_type(function, x, *arguments, **options))

    def _amax(self, _function: Callable[..., Any], x: Tensor, *_arguments: Any, **_options: Any) -> Any:
        if self._node.attributes["ties"] == "all":
            largest: Tensor = _Maximum.apply(_exact(x), self._dims, self._group)
            return self._reduced(largest.to(x.dtype))
        values, places = _FirstMaximum.apply(_exact(x), self._lists[self._axis.position], self._group)
        return torch.return_types.max((self._reduced(values.to(x.dtype)), self._reduced(places)))

    def _split(self, _function: Callable[..., Any], x: Tensor, *_arguments: Any, **_options: Any) -> tuple[Tensor, ...]:
        return tuple(_taken(x, places) for places in self._pieces)

    @property
    def _dims(self) -> tuple[int, ...]:
        return tuple(self._node.attributes["dims"])

    @property
    def _keeps_dims(self) -> bool:
        return bool(self._node.attributes["keep_dims"])

    def _reduced(self, kept: Tensor) -> Tensor:
        """The tensor as the network wants it, from one that has kept all dims."""
        if self._keeps_dims:
            return kept
        return kept.reshape([size for dim, size in enumerate(kept.shape) if dim not in self._dims])

    @cached_property
    def _pieces(self) -> list[list[int]]:
        """The places of own channels of each piece among own ones."""
        own = self._lists[self._axis.position]
        ends = list(itertools.accumulate(self._node.attributes["sizes"]))
        spans = zip([0, *ends[:-1]], ends, strict=True)
        return [[place for place, channel in enumerate(own) if start <= channel < end] for start, end in spans]


class _Softmax(torch.autograd.Function):
    """Softmax, or its logarithm, over dim 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: bool, axis: ChannelAxis) -> Tensor:
        largest = x.amax(1, keepdim=True)
        # Where all own channels are masked by -inf.
        finite = largest.masked_fill(largest == -math.inf, 0.0)
        largest_R, total_R = _told(axis, largest, (x - finite).exp().sum(1, keepdim=True))
        top = largest_R.amax(1)
        total = (total_R * (largest_R - top[:, None]).exp()).sum(1)
        shifted = x - top.view_as(largest)
        result = shifted - total.log().view_as(largest) if log else shifted.exp() / total.view_as(largest)
        ctx.save_for_backward(result)
        ctx.log, ctx.axis = log, axis
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (result,) = ctx.saved_tensors
        own = gradient if ctx.log else gradient * result
        total = ctx.axis.all_reduce(own.sum(1, keepdim=True))
        return (gradient - result.exp() * total if ctx.log else own - result * total), None, None


class _LayerNorm(torch.autograd.Function):
    """Layer norm of the last dims, of which dim 1 is one; weight and bias are own channels' parts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        settings: tuple[int, float, Sequence[int]],
        axis: ChannelAxis,
    ) -> Tensor:
        num_dims, eps, num_channels = settings
        dims = tuple(range(x.ndim - num_dims, x.ndim))
        per_channel = x.shape[-num_dims:].numel() // x.shape[1]
        counts_k = x.new_tensor(num_channels) * per_channel
        num_all = sum(num_channels) * per_channel
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        mean_Rk, squares_Rk = _told(axis, mean, variance * (x.shape[1] * per_channel))
        # Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
        mean_R = (mean_Rk * counts_k).sum(1) / num_all
        squares_R = (squares_Rk + counts_k * (mean_Rk - mean_R[:, None]).square()).sum(1)
        scale = (squares_R / num_all + eps).rsqrt().view_as(mean)
        mean = mean_R.view_as(mean)
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.dims, ctx.num_all, ctx.axis = dims, num_all, axis
        ctx.has_bias = bias is not None
        normal = (x - mean) * scale
        normal = normal if weight is None else normal * weight
        return normal if bias is None else normal + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, mean, scale, weight = ctx.saved_tensors
        normal = (x - mean) * scale
        weighed = gradient if weight is None else gradient * weight
        own = [(entry.sum(ctx.dims, keepdim=True)).reshape(-1) for entry in (weighed, weighed * normal)]
        first, second = (entry.view_as(mean) for entry in ctx.axis.all_reduce(torch.stack(own)) / ctx.num_all)
        x_gradient = (weighed - first - normal * second) * scale
        rows = tuple(range(ctx.dims[0]))
        weight_gradient = None if weight is None else _summed(gradient * normal, rows)
        return x_gradient, weight_gradient, _summed(gradient, rows) if ctx.has_bias else None, None, None


class _Total(torch.autograd.Function):
    """The sum of all ranks' tensors, which all of them use alike."""

    @staticmethod
    def forward(_ctx: Any, own: Tensor, axis: ChannelAxis) -> Tensor:
        return axis.all_reduce(own)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, None


class _Maximum(torch.autograd.Function):
    """The largest along dims, which are kept; equal ones share the gradient evenly, as in ``torch.amax``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...], axis: ChannelAxis) -> Tensor:
        largest = x.amax(dims, keepdim=True)
        number = (x == largest).sum(dims, keepdim=True).to(x.dtype)
        largest_Rk, number_Rk = _told(axis, largest, number)
        top_R = largest_Rk.amax(1)
        number_R = (number_Rk * (largest_Rk == top_R[:, None])).sum(1)
        top = top_R.view_as(largest)
        ctx.save_for_backward(x, top, number_R.view_as(largest))
        return top

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, top, number = ctx.saved_tensors
        return (x == top) * (gradient / number), None, None


class _FirstMaximum(torch.autograd.Function):
    """The largest along dim 1, which is kept, and its place; the first of equal ones gets the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Sequence[int], axis: ChannelAxis) -> tuple[Tensor, Tensor]:
        channels = torch.tensor(own, device=x.device).view(1, -1, *[1] * (x.ndim - 2))
        largest = x.amax(1, keepdim=True)
        place = channels.masked_fill(x != largest, _NOWHERE).amin(1, keepdim=True).to(x.dtype)
        largest_Rk, place_Rk = _told(axis, largest, place)
        top_R = largest_Rk.amax(1)
        place_R = place_Rk.masked_fill(largest_Rk != top_R[:, None], _NOWHERE).amin(1).long()
        place = place_R.view_as(largest)
        ctx.save_for_backward(place, channels)
        ctx.mark_non_differentiable(place)
        return top_R.view_as(largest), place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _of_place: Any) -> tuple[Any, ...]:
        place, channels = ctx.saved_tensors
        return (channels == place) * gradient, None, None


_NOWHERE = 2**24
"""More than any channel's number, and exact in float32."""


class _Quiet:
    """Stands for an axis where nothing needs the results."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, part: Tensor, _lists: Lists) -> Tensor:
        return part.repeat(1, self.size)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor


def _told(axis: ChannelAxis, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two statistics of each row of every rank, as (R, k) each."""
    own_R2 = torch.stack((first.reshape(-1), second.reshape(-1)), dim=1)
    lists = tuple((2 * rank, 2 * rank + 1) for rank in range(axis.size))
    of_ranks = axis.gather(own_R2, lists)
    return of_ranks[:, 0::2], of_ranks[:, 1::2]


def _summed(tensor: Tensor, rows: tuple[int, ...]) -> Tensor:
    return tensor.sum(rows) if rows else tensor


def _taken(x: Tensor, places: Sequence[int]) -> Tensor:
    """Channels of a tensor, as a view where they lie next to each other."""
    first, count = places[0], len(places)
    if list(places) == list(range(first, first + count)):
        return x.narrow(1, first, count)
    return x.index_select(1, torch.tensor(places, device=x.device))


def _exact(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _HALF else x


def _result_type(function: Callable[..., Any], x: Tensor, *arguments: Any, **options: Any) -> torch.dtype:
    """The type that the network's function would give, under autocast too: found with no samples."""
    with torch.no_grad():
        dtype: torch.dtype = function(x[:0], *arguments, **options).dtype
    return dtype

"""Operators along channels on own ones, with their exact gradients: the table of `convmesh.plan.along`.

Softmax and layer norm as cells of their own: what `construct` calls by itself can't be replaced in MindSpore.
Statistics and sums are taken and exchanged in float32.

Legend: R rows, k ranks.
"""

from __future__ import annotations

import math
import types

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from convmesh.engines.mindspore.channel_axis import ChannelAxis, Gather, Sum, hide
from convmesh.graph import Node
from convmesh.plan.partitions import Lists

_LOWEST = -3.0e38
"""Stands for minus infinity, from which nothing can be subtracted."""


def share_along(cell: nn.Cell, node: Node, lists: Lists, axis: ChannelAxis) -> None:
    """Lets a cell work along the channels of all ranks while it has own ones.

    Args:
        cell: A cell that computes nothing else; its parameters are cut already.
        node: The operator, a softmax or layer norm.
        lists: Channels of each rank.
        axis: The channel axis.
    """
    if node.kind == "softmax":
        work: nn.Cell = AlongSoftmax(axis, log=bool(node.attributes["log"]))
        hide(cell, convmesh_along=work, construct=types.MethodType(_softmax_construct, cell))
        return
    work = AlongNorm(axis, node, lists)
    hide(cell, convmesh_along=work, construct=types.MethodType(_norm_construct, cell))


def _softmax_construct(self, x):  # type: ignore[no-untyped-def]
    return self.convmesh_along(x)


def _norm_construct(self, x):  # type: ignore[no-untyped-def]
    return self.convmesh_along(x, self.gamma, self.beta)


class Told(nn.Cell):
    """Two statistics of each row of every rank.

    Args:
        axis: The channel axis.
    """

    def __init__(self, axis: ChannelAxis) -> None:
        super().__init__(auto_prefix=False)
        self.size = axis.size
        hide(self, gather=Gather(axis, tuple((rank, axis.size + rank) for rank in range(axis.size))))
        self.join, self.slice = ops.Concat(1), ops.Slice()

    def construct(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """From tensors of R elements to (R, k) each."""
        own = self.join((ops.reshape(first, (-1, 1)), ops.reshape(second, (-1, 1))))
        told = self.gather(own)
        num_rows = told.shape[0]
        size = (num_rows, self.size)
        return self.slice(told, (0, 0), size), self.slice(told, (0, self.size), size)


class AlongSoftmax(nn.Cell):
    """Softmax over dim 1.

    Args:
        axis: The channel axis.
        log: Whether its logarithm is wanted.
    """

    def __init__(self, axis: ChannelAxis, *, log: bool) -> None:
        super().__init__(auto_prefix=False)
        self.log = log
        hide(self, told=Told(axis), total=Sum(axis))
        self.largest, self.sum = ops.ReduceMax(keep_dims=True), ops.ReduceSum(keep_dims=True)

    def construct(self, x: Tensor) -> Tensor:
        """Own channels of the result; (N, own channels, ...)."""
        exact = ops.cast(x, ms.float32)
        largest = ops.maximum(self.largest(exact, 1), _LOWEST)
        largest_Rk, total_Rk = self.told(largest, self.sum(ops.exp(exact - largest), 1))
        top_R = self.largest(largest_Rk, 1)
        total_R = self.sum(total_Rk * ops.exp(largest_Rk - top_R), 1)
        shifted = exact - ops.reshape(top_R, largest.shape)
        total = ops.reshape(total_R, largest.shape)
        result = shifted - ops.log(total) if self.log else ops.exp(shifted) / total
        return ops.cast(result, x.dtype)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        """The gradient of own channels."""
        result, gradient = ops.cast(out, ms.float32), ops.cast(dout, ms.float32)
        own = gradient if self.log else gradient * result
        total = self.total(self.sum(own, 1))
        of_x = gradient - ops.exp(result) * total if self.log else own - result * total
        return (ops.cast(of_x, x.dtype),)


class AlongNorm(nn.Cell):
    """Layer norm of the last dims, of which dim 1 is one.

    Args:
        axis: The channel axis.
        node: The operator.
        lists: Channels of each rank.
    """

    def __init__(self, axis: ChannelAxis, node: Node, lists: Lists) -> None:
        super().__init__(auto_prefix=False)
        num_dims = len(node.shape)
        first = num_dims - int(node.attributes["num_dims"])
        self.eps = float(node.attributes["eps"])
        self.dims, self.rows = tuple(range(first, num_dims)), tuple(range(first))
        per_channel = math.prod(node.shape[first:]) // node.shape[1]
        counts = [len(own) * per_channel for own in lists]
        self.num_own, self.num_all = float(counts[axis.position]), float(sum(counts))
        self.counts = Tensor(np.array(counts, np.float32).reshape(1, -1))
        hide(self, told=Told(axis), total=Sum(axis))
        self.mean, self.sum = ops.ReduceMean(keep_dims=True), ops.ReduceSum(keep_dims=True)
        self.sum_rows, self.join, self.slice = ops.ReduceSum(), ops.Concat(1), ops.Slice()

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Own channels of the result.

        Args:
            x: (N, own channels, ...).
            weight: Own part, of the shape of the normalised dims.
            bias: The same.

        Returns:
            The shape of the input.
        """
        exact = ops.cast(x, ms.float32)
        mean, scale = self._statistics(exact)
        return ops.cast((exact - mean) * scale * weight + bias, x.dtype)

    def bprop(self, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        """The gradients of own channels, and of own parts of weight and bias.

        Args:
            x: The input.
            weight: Own part.
            bias: Own part.
            out: The result.
            dout: Its gradient.

        Returns:
            The gradients of the three inputs.
        """
        exact, gradient = ops.cast(x, ms.float32), ops.cast(dout, ms.float32)
        mean, scale = self._statistics(exact)
        normal = (exact - mean) * scale
        weighed = gradient * weight
        first, second = self.sum(weighed, self.dims), self.sum(weighed * normal, self.dims)
        own = self.join((ops.reshape(first, (-1, 1)), ops.reshape(second, (-1, 1))))
        totals = self.total(own) / self.num_all
        size = (totals.shape[0], 1)
        first = ops.reshape(self.slice(totals, (0, 0), size), mean.shape)
        second = ops.reshape(self.slice(totals, (0, 1), size), mean.shape)
        of_x = (weighed - first - normal * second) * scale
        of_weight, of_bias = self.sum_rows(gradient * normal, self.rows), self.sum_rows(gradient, self.rows)
        return ops.cast(of_x, x.dtype), ops.cast(of_weight, weight.dtype), ops.cast(of_bias, bias.dtype)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and inverse deviation of each row, from those of every rank's part (Chan, Golub and LeVeque, 1979)."""
        mean = self.mean(x, self.dims)
        squares = self.mean(ops.square(x - mean), self.dims) * self.num_own
        mean_Rk, squares_Rk = self.told(mean, squares)
        mean_R = self.sum(mean_Rk * self.counts, 1) / self.num_all
        squares_R = self.sum(squares_Rk + self.counts * ops.square(mean_Rk - mean_R), 1)
        scale_R = ops.rsqrt(squares_R / self.num_all + self.eps)
        return ops.reshape(mean_R, mean.shape), ops.reshape(scale_R, mean.shape)

"""Convolution and dense layer split along channels, whatever module they replace.

What is computed comes from the operator's attributes, not from the module, so that any module that is nothing but one
convolution or dense layer can be replaced. Channels are dim 1 of inputs and outputs; weights hold this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convmesh.engines.torch.channel_axis import ChannelAxis
from convmesh.engines.torch.recompute import is_repeating
from convmesh.engines.torch.redistribution import check_channels, parts_of, redistribute
from convmesh.engines.torch.sample_axis import Cut
from convmesh.graph import Node, Parameter
from convmesh.plan import Resolved
from convmesh.plan.repetition import Repetition
from convmesh.plan.weighted import Weighted


class ShardedWeighted(nn.Module):
    """A convolution or dense layer of which this rank has a part of the weight.

    Args:
        node: The operator.
        resolved: What becomes of it.
        axis: The axis along which it is split.
        parameters: Its parameters by name, this rank's part.
        again: Which changes of placement are needed again when blocks are recomputed.
    """

    def __init__(
        self,
        node: Node,
        resolved: Resolved,
        axis: ChannelAxis,
        parameters: Mapping[str, nn.Parameter | None],
        *,
        again: Repetition,
    ) -> None:
        super().__init__()
        self._spares_before, self._spares_after = again.spares_before(node.name), again.spares_after(node.name)
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        roles = {entry.role: entry.name.rpartition(".")[2] for entry in node.parameters}
        self._weight_name = roles["weight"]
        self._bias_name = roles.get("bias")
        self._axis = axis
        self._before, self._after = resolved.before, resolved.after
        self._keep_input = resolved.keep_input
        self._operator = operator_of(node, groups=_local_groups(node, resolved, axis))
        self._num_in = _num_entering(node, resolved, axis)
        self._adds_bias_last = resolved.split == "in_channels"
        self._split = resolved.split
        self._name = node.name

    def forward(self, x: Tensor) -> Tensor:
        """Computes this rank's part.

        Args:
            x: (N, channels, ...) as the plan places it.

        Returns:
            (N, channels, ...) as the plan places it.

        Raises:
            ModelError: If the input has other channels than the plan says.
        """
        check_channels(x, self._num_in)
        weight: Tensor = getattr(self, self._weight_name)
        bias: Tensor | None = getattr(self, self._bias_name) if self._bias_name else None
        x, weight, bias = _autocast(x, weight, bias)
        last = bias if self._adds_bias_last else None
        first = None if self._adds_bias_last else bias
        if self._before.kind in ("gather_sum", "gather_samples") and not self._keep_input:
            parts = parts_of(x, self._before, self._axis)
            gather = _blank if self._spares_before and is_repeating() else _gathered
            y: Tensor = _GatheredAgain.apply(x, weight, first, (parts, gather), self._operator, self._axis)
        else:
            x = redistribute(x, self._before, self._axis, spared=self._spares_before)
            y = self._operator(x, weight, first)
        y = redistribute(y, self._after, self._axis, spared=self._spares_after)
        return y if last is None else y + last.view(1, -1, *[1] * (y.ndim - 2))

    def extra_repr(self) -> str:
        """The operator and its split."""
        return f"{self._name}, {self._split}"


class Convolution:
    """A convolution as a function of input and weight, with its backward.

    Args:
        attributes: As `convmesh.graph.kinds.convolution` makes them.
        groups: Groups of this rank.
    """

    def __init__(self, attributes: Mapping[str, Any], groups: int) -> None:
        pairs = attributes["padding"]
        self._transposed = bool(attributes["transposed"])
        even = all(before == after for before, after in pairs)
        self._padding = tuple(before if even else 0 for before, _ in pairs)
        # As F.pad wants it: the last dim first.
        self._extra = () if even else tuple(size for pair in reversed(pairs) for size in pair)
        self._settings: tuple[Any, ...] = (
            tuple(attributes["stride"]),
            self._padding,
            tuple(attributes["dilation"]),
            self._transposed,
            tuple(attributes["output_padding"]),
            groups,
        )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""
        return torch.ops.aten.convolution.default(self._pad(x), weight, bias, *self._settings)

    def backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, *, bias: bool, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients.

        Args:
            gradient: Of the output.
            x: The input.
            weight: The weight.
            bias: Whether there is one.
            wanted: Whether the gradients of input, weight and bias are wanted.

        Returns:
            The gradients of input, weight and bias; None where not wanted.
        """
        padded = self._pad(x)
        sizes = [gradient.shape[1]] if bias else [0]
        x_gradient, weight_gradient, bias_gradient = torch.ops.aten.convolution_backward.default(
            gradient, padded, weight, sizes, *self._settings, list(wanted)
        )
        if x_gradient is not None and self._extra:
            x_gradient = F.pad(x_gradient, [-size for size in self._extra])
        return x_gradient, weight_gradient, bias_gradient

    def _pad(self, x: Tensor) -> Tensor:
        return F.pad(x, self._extra) if self._extra else x


class Dense:
    """A dense layer as a function of input (N, in) and weight (out, in), with its backward."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""
        return F.linear(x, weight, bias)

    def backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, *, bias: bool, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients.

        Args:
            gradient: Of the output.
            x: The input.
            weight: The weight.
            bias: Whether there is one.
            wanted: Whether the gradients of input, weight and bias are wanted.

        Returns:
            The gradients of input, weight and bias; None where not wanted.
        """
        return (
            gradient @ weight if wanted[0] else None,
            gradient.t() @ x if wanted[1] else None,
            gradient.sum(0) if bias and wanted[2] else None,
        )


def operator_of(node: Node, *, groups: int = 1) -> Convolution | Dense:
    """The function that a convolution or dense layer computes on one rank."""
    return Convolution(node.attributes, groups) if node.kind == "convolution" else Dense()


class _GatheredAgain(torch.autograd.Function):
    """Gathers the input, computes own outputs, and forgets the whole input until the backward gathers it again."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gathering: tuple[Cut, Callable[[Tensor, Cut, ChannelAxis], Tensor]],
        operator: Convolution | Dense,
        axis: ChannelAxis,
    ) -> Tensor:
        ctx.save_for_backward(part, weight)
        parts, gather = gathering
        ctx.has_bias, ctx.parts, ctx.operator, ctx.axis = bias is not None, parts, operator, axis
        # When its block is recomputed and only the block's output needs it, any values will do.
        return operator(gather(part, parts, axis), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        part, weight = ctx.saved_tensors
        x_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad[:3]
        whole = (_gathered if weight_wanted else _blank)(part, ctx.parts, ctx.axis)
        x_gradient, weight_gradient, bias_gradient = ctx.operator.backward(
            gradient,
            whole,
            weight,
            bias=ctx.has_bias,
            wanted=(x_wanted, weight_wanted, ctx.has_bias and bias_wanted),
        )
        del whole
        if x_wanted:
            x_gradient = ctx.axis.reduce_scatter(x_gradient, ctx.parts.lists, dim=ctx.parts.dim)
        return x_gradient, weight_gradient, bias_gradient, None, None, None


def _gathered(part: Tensor, parts: Cut, axis: ChannelAxis) -> Tensor:
    """The whole tensor."""
    return axis.gather(part, parts.lists, dim=parts.dim)


def _blank(part: Tensor, parts: Cut, _axis: ChannelAxis) -> Tensor:
    """A tensor of the whole input's shape, for a backward that needs no values of it."""
    shape = list(part.shape)
    shape[parts.dim] = sum(map(len, parts.lists))
    return part.new_zeros(()).expand(shape)


def _autocast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Casts as autocast would, before anything is communicated: half the bytes."""
    tensors = (x, *others)
    if not torch.is_autocast_enabled(x.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(
        tensor.to(dtype)
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        else tensor
        for tensor in tensors
    )


def _num_entering(node: Node, resolved: Resolved, axis: ChannelAxis) -> int:
    """Channels that this rank's input has before anything is changed."""
    if resolved.before.source:
        return len(resolved.before.source[axis.position])
    layer = Weighted(node=node)
    if resolved.before.kind != "none":
        return layer.num_in
    if resolved.split == "groups":
        return layer.num_in // layer.groups * _local_groups(node, resolved, axis)
    shard = resolved.shards[_weight_of(node).name]
    return len(shard.lists[axis.position])


def _local_groups(node: Node, resolved: Resolved, axis: ChannelAxis) -> int:
    groups = int(node.attributes.get("groups", 1))
    if resolved.split != "groups":
        return groups
    shard = resolved.shards[_weight_of(node).name]
    return groups * len(shard.lists[axis.position]) // sum(map(len, shard.lists))


def _weight_of(node: Node) -> Parameter:
    return next(entry for entry in node.parameters if entry.role == "weight")

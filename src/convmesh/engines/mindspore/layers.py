"""Convolution and dense layer split along channels, whatever cell they replace.

What is computed comes from the operator's attributes, not from the cell, so that any cell that is nothing but one
convolution or dense layer can be replaced. Channels are dim 1 of inputs and outputs; weights hold this rank's part, in
the layout that they have in the cell: a 1-D convolution's is that of a 2-D one with one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspore import Parameter, Tensor, nn, ops

from convmesh.engines.mindspore.channel_axis import ChannelAxis, Gather, ReduceScatter, Spread, hide
from convmesh.engines.mindspore.redistribution import redistribution
from convmesh.engines.mindspore.sample_axis import SampleAxis, sample_ways
from convmesh.graph import Node
from convmesh.plan import Resolved
from convmesh.plan.placement import Change


class ShardedWeighted(nn.Cell):
    """A convolution or dense layer of which this rank has a part of the weight.

    Args:
        node: The operator.
        resolved: What becomes of it.
        axis: The channel axis.
        parameters: Its parameters by name, this rank's part.
    """

    def __init__(
        self, node: Node, resolved: Resolved, axis: ChannelAxis, parameters: Mapping[str, Parameter | None]
    ) -> None:
        super().__init__(auto_prefix=False)
        for name, parameter in parameters.items():
            self.insert_param_to_cell(name, parameter, check_name_contain_dot=False)
        roles = {entry.role: entry.name.rpartition(".")[2] for entry in node.parameters}
        weight, bias = parameters[roles["weight"]], parameters.get(roles.get("bias", ""))
        if weight is None:
            raise AssertionError("unreachable: a weighted operator has a weight")
        num_dims = len(node.shape)
        learns = bool(weight.requires_grad)
        operator = operator_of(node, weight, groups=_local_groups(node, resolved, axis))
        gathers = resolved.before.kind in ("gather_sum", "gather_samples")
        self.gathers_again = gathers and not resolved.keep_input
        before: nn.Cell = redistribution(resolved.before, axis)
        if self.gathers_again:
            before = GatheredAgain(operator, resolved, axis, learns=learns)
        after = redistribution(resolved.after, axis)
        hide(self, kernel=weight, shift=bias, before=before, after=after, operator=operator)
        self.has_bias = bias is not None
        self.adds_bias_last = resolved.split == "in_channels"
        self.bias_shape = (1, -1, *[1] * (num_dims - 2))
        self.has_zeros = False
        self.text = f"{node.name}, {resolved.split}"

    def construct(self, x: Tensor) -> Tensor:
        """Computes this rank's part.

        Args:
            x: (N, channels, ...) as the plan places it.

        Returns:
            (N, channels, ...) as the plan places it.
        """
        weight = self.keep_zeros(self.kernel) if self.has_zeros else self.kernel
        # Within branches MindSpore does not cast parameters to the half type in which the layer computes.
        weight = ops.cast(weight, x.dtype)
        y = self.before(x, weight) if self.gathers_again else self.operator(self.before(x), weight)
        if self.has_bias and not self.adds_bias_last:
            y = y + ops.cast(ops.reshape(self.shift, self.bias_shape), y.dtype)
        y = self.after(y)
        if self.has_bias and self.adds_bias_last:
            y = y + ops.cast(ops.reshape(self.shift, self.bias_shape), y.dtype)
        return y

    def keep_zeros_by(self, keeper: nn.Cell) -> None:
        """Passes the weight through a function that keeps some of its zeros."""
        hide(self, keep_zeros=keeper)
        self.has_zeros = True

    def extend_repr(self) -> str:
        """The operator and its split."""
        return self.text


class GatheredAgain(nn.Cell):
    """Gathers the input, computes own outputs, and forgets the whole input until the backward gathers it again.

    Args:
        operator: The function of input and weight.
        resolved: What becomes of the operator.
        axis: The channel axis.
        learns: Whether the weight takes a gradient; without one the backward needs no values of the input.
    """

    def __init__(self, operator: nn.Cell, resolved: Resolved, axis: ChannelAxis, *, learns: bool) -> None:
        super().__init__(auto_prefix=False)
        hide(self, operator=operator, **_gathering(resolved.before, axis, learns=learns))
        self.learns = learns
        self.differentiate = ops.GradOperation(get_all=True, sens_param=True)
        self.depend = ops.Depend()

    def construct(self, part: Tensor, weight: Tensor) -> Tensor:
        """Own outputs from own inputs.

        Args:
            part: (N, own channels, ...).
            weight: This rank's part.

        Returns:
            (N, own output channels, ...).
        """
        return self.operator(self.gather(part), weight)

    def bprop(self, part: Tensor, weight: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        """The gradients of input and weight.

        Args:
            part: The input.
            weight: The weight.
            out: The output.
            dout: Its gradient.

        Returns:
            The gradient of the input, summed and scattered, and that of this rank's part of the weight.
        """
        # Without the dependence the compiler finds that it has gathered this before, and keeps it.
        whole = self.again(self.depend(part, dout))
        of_whole, of_weight = self.differentiate(self.operator)(whole, weight, dout)
        if self.learns:
            # Else the weight's gradient, on which nothing waits, would be left to the end, and the whole input held for
            # it. And all ranks gather before they scatter.
            of_whole = self.depend(of_whole, of_weight)
        return self.scatter(of_whole), of_weight


def _gathering(change: Change, axis: ChannelAxis, *, learns: bool) -> dict[str, nn.Cell]:
    """How an input is gathered, gathered again, and its gradient scattered."""
    if isinstance(axis, SampleAxis) and change.kind == "gather_samples":
        (gather, scatter), (again, _) = (sample_ways(change.kind, (), axis) for _ in range(2))
        return {"gather": gather, "again": again, "scatter": scatter}
    lists = change.source
    return {
        "gather": Gather(axis, lists),
        "again": Gather(axis, lists) if learns else Spread(axis, lists),
        "scatter": ReduceScatter(axis, lists),
    }


class Convolution(nn.Cell):
    """A convolution as a function of input and weight.

    Args:
        attributes: As `convmesh.graph.kinds.convolution` makes them.
        weight: This rank's part; only its shape counts.
        groups: Groups of this rank.
        output_size: Pixels of the output, per spatial dim.
    """

    def __init__(
        self, attributes: Mapping[str, Any], weight: Parameter, *, groups: int, output_size: tuple[int, ...]
    ) -> None:
        super().__init__(auto_prefix=False)
        num_lifted = len(weight.shape) - 2 - len(output_size)
        self.is_lifted = num_lifted > 0
        self.is_transposed = bool(attributes["transposed"])
        self.size = (1,) * num_lifted + output_size
        self.num_out = weight.shape[1] * groups if self.is_transposed else weight.shape[0]
        self.convolve = convolution_primitive(attributes, tuple(weight.shape), groups=groups)

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        """The output without bias.

        Args:
            x: (N, channels, ...).
            weight: In the layout of MindSpore's cells.

        Returns:
            (N, output channels, ...).
        """
        if self.is_lifted:
            x = ops.expand_dims(x, 2)
        if self.is_transposed:
            y = self.convolve(x, weight, (x.shape[0], self.num_out, *self.size))
        else:
            y = self.convolve(x, weight)
        return ops.squeeze(y, 2) if self.is_lifted else y


class Dense(nn.Cell):
    """A dense layer as a function of input (N, in) and weight (out, in)."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.multiply = ops.MatMul(transpose_b=True)

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        """The output without bias, shape (N, out)."""
        return self.multiply(x, weight)


def operator_of(node: Node, weight: Parameter, *, groups: int = 1) -> nn.Cell:
    """The function that a convolution or dense layer computes on one rank, of its input and weight."""
    if node.kind == "dense":
        return Dense()
    return Convolution(node.attributes, weight, groups=groups, output_size=tuple(node.shape[2:]))


def convolution_primitive(attributes: Mapping[str, Any], shape: tuple[int, ...], *, groups: int) -> Any:
    """MindSpore's primitive of a convolution.

    Args:
        attributes: As `convmesh.graph.kinds.convolution` makes them.
        shape: Of this rank's part of the weight, in the layout of MindSpore's cells.
        groups: Groups of this rank.

    Returns:
        The primitive; a 1-D convolution's works on images of one row.
    """
    num_lifted = len(shape) - 2 - len(attributes["kernel"])
    transposed = bool(attributes["transposed"])
    settings: dict[str, Any] = {
        "kernel_size": tuple(shape[2:]),
        "pad_mode": "pad",
        "pad": (0, 0) * num_lifted + tuple(size for pair in attributes["padding"] for size in pair),
        "stride": (1,) * num_lifted + tuple(attributes["stride"]),
        "dilation": (1,) * num_lifted + tuple(attributes["dilation"]),
        "group": groups,
    }
    if len(shape) == 5:
        if transposed:
            return ops.Conv3DTranspose(in_channel=shape[0], out_channel=shape[1] * groups, mode=1, **settings)
        return ops.Conv3D(out_channel=shape[0], mode=1, **settings)
    if transposed:
        return ops.Conv2DTranspose(out_channel=shape[0], mode=1, **settings)
    return ops.Conv2D(out_channel=shape[0], mode=1, **settings)


def _local_groups(node: Node, resolved: Resolved, axis: ChannelAxis) -> int:
    groups = int(node.attributes.get("groups", 1))
    if resolved.split != "groups":
        return groups
    weight = next(entry for entry in node.parameters if entry.role == "weight")
    shard = resolved.shards[weight.name]
    return groups * len(shard.lists[axis.position]) // sum(map(len, shard.lists))

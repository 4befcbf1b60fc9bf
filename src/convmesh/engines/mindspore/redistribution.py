"""Changes of placement on the channel axis with their exact gradients: the table of `convmesh.plan.placement`.

Each is a cell with its own ``bprop``, which MindSpore's collectives lack on CPU. Channels are dim 1 of every tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mindspore import Tensor, nn

from convmesh.engines.mindspore.channel_axis import ChannelAxis, Gather, Keep, Own, ReduceScatter, Sum, hide
from convmesh.engines.mindspore.sample_axis import SampleAxis, sample_ways
from convmesh.plan.placement import Change


def redistribution(change: Change, axis: ChannelAxis) -> nn.Cell:
    """A change of where the channels of a tensor are.

    Args:
        change: The change.
        axis: The channel axis.

    Returns:
        A cell from a tensor as the change's source says to one as its target says.
    """
    if change.kind == "none":
        return Keep()
    source, target = change.source, change.target
    if isinstance(axis, SampleAxis) and change.kind.endswith(("_samples", "to_channels")):
        return Redistribution(*sample_ways(change.kind, source or target, axis))
    gather, own, scatter = partial(Gather, axis), partial(Own, axis), partial(ReduceScatter, axis)
    ways: dict[str, Callable[[], tuple[nn.Cell, nn.Cell]]] = {
        "copy": lambda: (Keep(), Sum(axis)),
        "gather": lambda: (gather(source), own(source)),
        "gather_sum": lambda: (gather(source), scatter(source)),
        "slice": lambda: (own(target), gather(target)),
        "permute": lambda: (_Chain(gather(source), own(target)), _Chain(gather(target), own(source))),
        "reduce_scatter": lambda: (scatter(target), gather(target)),
        "all_reduce": lambda: (Sum(axis), Keep()),
    }
    return Redistribution(*ways[change.kind]())


class Redistribution(nn.Cell):
    """One change, and the way back of its gradient.

    Args:
        there: What the forward does.
        back: What is done with the gradient.
    """

    def __init__(self, there: nn.Cell, back: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        hide(self, there=there, back=back)

    def construct(self, x: Tensor) -> Tensor:
        """Changes the placement; (N, channels, ...)."""
        return self.there(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        """The gradient of the input from that of the output."""
        return (self.back(dout),)


class _Chain(nn.Cell):
    """One after the other."""

    def __init__(self, first: nn.Cell, second: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        hide(self, first=first, second=second)

    def construct(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

"""Where a tensor is on the channel or data axis, and the changes from one placement to another.

What each change does; in the backward the gradient takes the way back, exactly:

| change | from, to | forward | backward |
|---|---|---|---|
| ``none`` | no change | nothing | nothing |
| ``copy`` | whole, into work on own channels | nothing | all-reduce |
| ``gather_sum`` | sharded, into work on own channels with all of the input | all-gather | reduce-scatter |
| ``gather`` | sharded to whole | all-gather | own part, no communication |
| ``slice`` | whole to sharded | own part, no communication | all-gather |
| ``permute`` | sharded to sharded otherwise | all-gather, then own part | the same |
| ``reduce_scatter`` | partial sums to sharded | reduce-scatter | all-gather |
| ``all_reduce`` | partial sums to whole | all-reduce | nothing |
| ``to_channels`` | own samples to own channels of all samples | all-to-all | all-to-all |
| ``to_samples`` | own channels of all samples to own samples | all-to-all | all-to-all |
| ``gather_samples`` | own samples, into work on own channels with all samples | all-gather | reduce-scatter |
| ``scatter_samples`` | partial sums of all samples to own samples | reduce-scatter | all-gather |

The gradient of a whole tensor is whole and equal on all ranks, that of a sharded one, or of own samples, is placed
alike; that of a tensor that is whole for work on own channels is a summand on each rank. The last four are changes on
the data axis; in between, its ranks hold own channels of the samples of all of them, those of the first rank first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from convmesh.plan.partitions import Lists


@dataclass(frozen=True)
class Replicate:
    """Every rank holds all channels, with equal values."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True)
class Lent:
    """Every rank holds all of it, with equal values, and uses it for own channels: gradients are summands."""

    def __str__(self) -> str:
        return "whole, for own channels"


@dataclass(frozen=True)
class Shard:
    """Every rank holds its own channels: of dim 1, or of dim 0 of a parameter's tensor.

    Args:
        lists: The channels of each rank, in order.
    """

    lists: Lists

    def __str__(self) -> str:
        return "sharded " + "+".join(str(len(own)) for own in self.lists)


@dataclass(frozen=True)
class Samples:
    """Every rank holds all channels of its own samples; a parameter is whole."""

    def __str__(self) -> str:
        return "own samples"


Placement = Replicate | Lent | Shard | Samples

ChangeKind = Literal[
    "none",
    "copy",
    "gather_sum",
    "gather",
    "slice",
    "permute",
    "reduce_scatter",
    "all_reduce",
    "to_channels",
    "to_samples",
    "gather_samples",
    "scatter_samples",
]


@dataclass(frozen=True)
class Change:
    """A change of placement at the border of a module.

    Args:
        kind: What it does.
        source: Channels of each rank before; empty where it holds all of them.
        target: Channels of each rank after; empty where it holds all of them.
    """

    kind: ChangeKind = "none"
    source: Lists = ()
    target: Lists = ()


def change_between(source: Placement, target: Placement) -> Change:
    """The change from one placement of a finished tensor to another."""
    if source == target:
        return Change()
    if isinstance(source, Shard):
        if isinstance(target, Shard):
            return Change("permute", source.lists, target.lists)
        if isinstance(target, Lent):
            return Change("gather_sum", source.lists)
        return Change("to_samples" if isinstance(target, Samples) else "gather", source.lists)
    if isinstance(target, Shard):
        return Change("to_channels" if isinstance(source, Samples) else "slice", (), target.lists)
    return Change("copy") if isinstance(target, Lent) else Change()


@dataclass(frozen=True)
class ParameterShard:
    """How a parameter, or a buffer, is split.

    Args:
        dim: The dim that is split.
        lists: Indices of each rank along it, in order.
    """

    dim: int
    lists: Lists

    def num_elements(self, shape: tuple[int, ...], *, position: int) -> int:
        """Elements of a rank's part of a tensor of a shape."""
        return math.prod(shape) // shape[self.dim] * len(self.lists[position])

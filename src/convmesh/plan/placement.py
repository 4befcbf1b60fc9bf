"""Where the channels of a tensor are on the channel axis, and the changes from one placement to another.

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

The gradient of a whole tensor is whole and equal on all ranks, that of a sharded one is sharded alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from convmesh.plan.partitions import Lists


@dataclass(frozen=True)
class Replicate:
    """Every rank holds all channels, with equal values."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True)
class Shard:
    """Every rank holds its own channels: of dim 1, or of dim 0 of a parameter's tensor.

    Args:
        lists: The channels of each rank, in order.
    """

    lists: Lists

    def __str__(self) -> str:
        return "sharded " + "+".join(str(len(own)) for own in self.lists)


Placement = Replicate | Shard

ChangeKind = Literal["none", "copy", "gather_sum", "gather", "slice", "permute", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class Change:
    """A change of placement at the border of a module.

    Args:
        kind: What it does.
        source: Channels of each rank before; empty where the tensor is whole or a partial sum.
        target: Channels of each rank after; empty where the tensor is whole.
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
        return Change("gather", source.lists)
    return Change("slice", (), target.lists) if isinstance(target, Shard) else Change()


@dataclass(frozen=True)
class ParameterShard:
    """How a parameter, or a buffer, is split.

    Args:
        dim: The dim that is split.
        lists: Indices of each rank along it, in order.
    """

    dim: int
    lists: Lists

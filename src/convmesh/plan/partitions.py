"""Channel partitions as ordered lists of channel numbers, one per rank, and what operators make of them.

The order of a rank's list is the order in which it holds the channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from convmesh.geometry.channel_partition import ChannelPartition

Lists = tuple[tuple[int, ...], ...]
"""The channels of each rank, in the order in which it holds them."""


def concatenated(parts: Sequence[Lists]) -> Lists:
    """What every rank holds of a concatenation when it concatenates its own channels."""
    first, *others = (ChannelPartition(lists) for lists in parts)
    return first.concat(*others).owned


def flattened(lists: Lists, num_pixels: int) -> Lists:
    """The features that a rank holds when channels and pixels become one dim."""
    return ChannelPartition(lists).flatten(num_pixels).owned


def shuffled(lists: Lists, groups: int) -> Lists | None:
    """What every rank holds of a channel shuffle when it shuffles its own channels; None if they don't divide.

    So does a shuffle written in ``forward``, which sees own channels only. The shuffle of C channels in g groups puts
    channel ``a * (C/g) + b`` at ``b * g + a``.
    """
    num_per_group = sum(map(len, lists)) // groups
    if any(len(own) % groups for own in lists):
        return None
    return tuple(
        tuple(
            _shuffle_place(own[a * (len(own) // groups) + b], groups, num_per_group)
            for b in range(len(own) // groups)
            for a in range(groups)
        )
        for own in lists
    )


def _shuffle_place(channel: int, groups: int, num_per_group: int) -> int:
    group, place = divmod(channel, num_per_group)
    return place * groups + group


def by_groups(num_channels: int, groups: int, num_ranks: int) -> Lists:
    """Whole groups of neighbouring channels, as evenly as possible."""
    return expanded(contiguous(groups, num_ranks), num_channels // groups)


@lru_cache(maxsize=4096)
def contiguous(num_channels: int, num_ranks: int) -> Lists:
    """Neighbouring channels together, as evenly as possible."""
    return ChannelPartition.contiguous(num_channels, num_ranks).owned


def expanded(lists: Lists, size: int) -> Lists:
    """The channels of groups of equal size."""
    return tuple(tuple(group * size + place for group in own for place in range(size)) for own in lists)


def whole_groups(lists: Lists, group_size: int) -> Lists | None:
    """The groups that each rank holds, in order; None if it holds a part of one, or one in another order."""
    found = []
    for own in lists:
        groups = tuple(channel // group_size for channel in own[::group_size])
        if own != expanded((groups,), group_size)[0]:
            return None
        found.append(groups)
    return tuple(found)


def is_partition(lists: Lists, num_channels: int) -> bool:
    """Whether every channel stands exactly once."""
    return sorted(itertools.chain.from_iterable(lists)) == list(range(num_channels))

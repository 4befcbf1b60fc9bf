"""Channel partitions: which channels each rank of an axis owns, as an explicit ordered list per rank.

Contiguous, round-robin and uneven partitions are all of this kind, and so is what a concatenation, a channel shuffle, a
split or a flatten makes of one when every rank does it on its own channels alone. A rank's local channel i is the whole
tensor's channel ``owned[rank][i]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from convmesh.errors import ConfigError, raise_all
from convmesh.geometry.checks import check_counts, check_groups, find_mistakes


@dataclass(frozen=True)
class ChannelPartition:
    """Every channel of a tensor on exactly one rank of an axis.

    Args:
        owned: For each rank the channels that it owns, in the order in which it holds them; a rank may own none.

    Raises:
        ConfigError: If a channel stands twice or is missing.
        MistakeList: If several do; all are listed.
    """

    owned: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "owned", tuple(tuple(channels) for channels in self.owned))
        raise_all(find_mistakes(self.owned))

    @classmethod
    def contiguous(cls, num_channels: int, num_ranks: int) -> ChannelPartition:
        """Runs of neighbouring channels, as even as can be: 10 channels over 4 ranks are 3, 3, 2, 2.

        Args:
            num_channels: Channels of the tensor.
            num_ranks: Ranks of the axis.

        Returns:
            The partition; with fewer channels than ranks the last ranks own none.

        Raises:
            ConfigError: If a number is negative, or there is no rank.
        """
        check_counts(num_channels, num_ranks)
        smallest, num_larger = divmod(num_channels, num_ranks)
        return cls.of_sizes([smallest + (rank < num_larger) for rank in range(num_ranks)])

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> ChannelPartition:
        """Runs of neighbouring channels of given lengths.

        Args:
            sizes: Channels per rank.

        Returns:
            The partition.

        Raises:
            ConfigError: If a size is negative, or there is none.
        """
        check_counts(min(sizes, default=0), len(sizes))
        bounds = list(itertools.accumulate(sizes, initial=0))
        return cls(tuple(tuple(range(start, stop)) for start, stop in itertools.pairwise(bounds)))

    @classmethod
    def round_robin(cls, num_channels: int, num_ranks: int) -> ChannelPartition:
        """Channels dealt out in turn: channel c belongs to rank ``c % num_ranks``.

        Args:
            num_channels: Channels of the tensor.
            num_ranks: Ranks of the axis.

        Returns:
            The partition.

        Raises:
            ConfigError: If a number is negative, or there is no rank.
        """
        check_counts(num_channels, num_ranks)
        return cls(tuple(tuple(range(rank, num_channels, num_ranks)) for rank in range(num_ranks)))

    @classmethod
    def explicit(cls, owned: Sequence[Sequence[int]], *, num_channels: int) -> ChannelPartition:
        """Given channels per rank, checked against the number of channels.

        Args:
            owned: Channels per rank.
            num_channels: Channels of the tensor.

        Returns:
            The partition.

        Raises:
            ConfigError: If a channel stands twice, is missing or doesn't exist.
            MistakeList: If several do; all are listed.
        """
        raise_all(find_mistakes(owned, num_channels=num_channels))
        return cls(tuple(tuple(channels) for channels in owned))

    @property
    def num_ranks(self) -> int:
        """Ranks of the axis."""
        return len(self.owned)

    @property
    def num_channels(self) -> int:
        """Channels of the whole tensor."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Channels per rank."""
        return tuple(len(channels) for channels in self.owned)

    @property
    def is_even(self) -> bool:
        """Whether all ranks own equally many channels."""
        return len(set(self.sizes)) == 1

    @property
    def is_in_order(self) -> bool:
        """Whether the ranks' channels, one rank after the other, are the whole tensor's as they stand in it."""
        return self.gathered_order == tuple(range(self.num_channels))

    @property
    def gathered_order(self) -> tuple[int, ...]:
        """The channel at each position of all ranks' channels, one rank after the other."""
        return tuple(itertools.chain.from_iterable(self.owned))

    @property
    def restoring_order(self) -> tuple[int, ...]:
        """For each channel of the whole tensor its position among all ranks' channels, one rank after the other.

        ``gathered[..., restoring_order]`` is the whole tensor.
        """
        positions = {channel: position for position, channel in enumerate(self.gathered_order)}
        return tuple(positions[channel] for channel in range(self.num_channels))

    def to_local(self, channel: int) -> tuple[int, int]:
        """Where a channel is.

        Args:
            channel: A channel of the whole tensor.

        Returns:
            Its rank, and its place among that rank's channels.

        Raises:
            ConfigError: If there is no such channel.
        """
        for rank, channels in enumerate(self.owned):
            if channel in channels:
                return rank, channels.index(channel)
        raise ConfigError("there is no such channel", got=channel, expected=f"0 to {self.num_channels - 1}")

    def to_global(self, rank: int, local: int) -> int:
        """The whole tensor's channel that a rank holds.

        Args:
            rank: A rank of the axis.
            local: A place among its channels.

        Returns:
            The channel.

        Raises:
            ConfigError: If there is no such rank or it holds fewer channels.
        """
        if not 0 <= rank < self.num_ranks:
            raise ConfigError("there is no such rank", got=rank, expected=f"0 to {self.num_ranks - 1}")
        if not 0 <= local < len(self.owned[rank]):
            raise ConfigError(f"rank {rank} has no such channel", got=local, expected=f"below {len(self.owned[rank])}")
        return self.owned[rank][local]

    def concat(self, *others: ChannelPartition) -> ChannelPartition:
        """What a concatenation along channels makes when every rank concatenates its own parts.

        Args:
            *others: Partitions of the tensors that follow, over the same ranks.

        Returns:
            The partition of the result: each rank holds its channels of the first tensor, then of the second...

        Raises:
            ConfigError: If the numbers of ranks differ.
        """
        parts = (self, *others)
        if len({part.num_ranks for part in parts}) != 1:
            raise ConfigError(
                "tensors that are concatenated are split over different numbers of ranks",
                got=", ".join(str(part.num_ranks) for part in parts),
            )
        offsets = list(itertools.accumulate((part.num_channels for part in parts), initial=0))
        return ChannelPartition(
            tuple(
                tuple(
                    offset + channel
                    for part, offset in zip(parts, offsets, strict=False)
                    for channel in part.owned[rank]
                )
                for rank in range(self.num_ranks)
            )
        )

    def shuffle(self, groups: int) -> ChannelPartition:
        """What a channel shuffle makes when no channel changes its rank.

        The shuffle writes C channels as (groups, C / groups), transposes and flattens: channel c, place p of group g,
        goes to ``p * groups + g``. Each rank's own channels are put in the order of their new positions.

        Args:
            groups: Groups of the shuffle.

        Returns:
            The partition of the result.

        Raises:
            ConfigError: If the channels don't divide into the groups.
        """
        check_groups(self.num_channels, groups)
        return ChannelPartition(
            tuple(tuple(sorted(self._shuffled(channel, groups) for channel in channels)) for channels in self.owned)
        )

    def shuffle_order(self, groups: int) -> tuple[tuple[int, ...], ...]:
        """For each rank which of its local channels stands at each place after ``shuffle``.

        Args:
            groups: Groups of the shuffle.

        Returns:
            Per rank the local channels in their new order.

        Raises:
            ConfigError: If the channels don't divide into the groups.
        """
        check_groups(self.num_channels, groups)
        order = []
        for channels in self.owned:
            moved = [self._shuffled(channel, groups) for channel in channels]
            order.append(tuple(sorted(range(len(moved)), key=moved.__getitem__)))
        return tuple(order)

    def _shuffled(self, channel: int, groups: int) -> int:
        group, place = divmod(channel, self.num_channels // groups)
        return place * groups + group

    def split(self, sizes: Sequence[int]) -> tuple[ChannelPartition, ...]:
        """What a split along channels makes when every rank splits its own part.

        Args:
            sizes: Channels of each part of the whole tensor.

        Returns:
            One partition per part; a rank may own unequal shares of them.

        Raises:
            ConfigError: If the sizes don't sum up to the channels.
        """
        if sum(sizes) != self.num_channels or min(sizes, default=0) < 0:
            raise ConfigError(
                "the parts of a split are not all channels", got=f"{tuple(sizes)}", expected=self.num_channels
            )
        bounds = list(itertools.accumulate(sizes, initial=0))
        return tuple(
            ChannelPartition(tuple(tuple(c - start for c in channels if start <= c < stop) for channels in self.owned))
            for start, stop in itertools.pairwise(bounds)
        )

    def split_places(self, sizes: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each part of a ``split`` and rank the places of the local channels that it takes.

        Args:
            sizes: Channels of each part of the whole tensor.

        Returns:
            Per part, per rank, places among the rank's channels.
        """
        bounds = list(itertools.accumulate(sizes, initial=0))
        return tuple(
            tuple(
                tuple(place for place, channel in enumerate(channels) if start <= channel < stop)
                for channels in self.owned
            )
            for start, stop in itertools.pairwise(bounds)
        )

    def flatten(self, num_pixels: int) -> ChannelPartition:
        """What flattening (C, pixels) into features makes: feature ``c * num_pixels + p`` goes with channel c.

        Args:
            num_pixels: Pixels per channel, over all spatial dims; at least 1.

        Returns:
            The partition of the features.

        Raises:
            ConfigError: If there are no pixels.
        """
        if num_pixels < 1:
            raise ConfigError("a channel has no pixels", got=num_pixels)
        return ChannelPartition(
            tuple(
                tuple(channel * num_pixels + pixel for channel in channels for pixel in range(num_pixels))
                for channels in self.owned
            )
        )

    def split_groups(self, groups: int) -> tuple[int, ...]:
        """Groups of channels that no single rank holds whole and in order.

        A grouped convolution or a group norm can be split by channels exactly if there are none.

        Args:
            groups: Groups of ``num_channels / groups`` neighbouring channels.

        Returns:
            The groups that are torn apart or out of order.

        Raises:
            ConfigError: If the channels don't divide into the groups.
        """
        check_groups(self.num_channels, groups)
        width = self.num_channels // groups
        whole: set[int] = set()
        for channels in self.owned:
            for start in range(0, len(channels), width):
                run = channels[start : start + width]
                if run[0] % width == 0 and run == tuple(range(run[0], run[0] + width)):
                    whole.add(run[0] // width)
        return tuple(group for group in range(groups) if group not in whole)

    def of_groups(self, groups: int) -> ChannelPartition:
        """Which groups each rank holds, of channels that are split by whole groups.

        Args:
            groups: Groups of neighbouring channels.

        Returns:
            The partition of the groups.

        Raises:
            ConfigError: If a group is not whole on one rank.
        """
        torn = self.split_groups(groups)
        if torn:
            raise ConfigError(
                "channels are not split by whole groups",
                got=f"{self.num_channels} channels in {groups} groups over {self.num_ranks} ranks as {self.sizes}",
                expected="every group on one rank, in order",
                fix=f"Split groups instead: {_nearest_groups(groups, self.num_ranks)}",
            )
        width = self.num_channels // groups
        return ChannelPartition(tuple(tuple(c // width for c in channels[::width]) for channels in self.owned))

    def to_channels(self, width: int) -> ChannelPartition:
        """The partition of channels that follows from one of groups.

        Args:
            width: Channels per group.

        Returns:
            The partition of ``width`` times as many channels, each group's in order.

        Raises:
            ConfigError: If a group has no channels.
        """
        return self.flatten(width)


def _nearest_groups(groups: int, num_ranks: int) -> str:
    sizes = ChannelPartition.contiguous(groups, num_ranks).sizes
    return f"{groups} groups over {num_ranks} ranks as {sizes}"

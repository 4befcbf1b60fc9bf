"""What makes lists of channels a partition, and what is told when they are none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from convmesh.errors import ConfigError, ConvMeshError


def find_mistakes(owned: Sequence[Iterable[int]], *, num_channels: int | None = None) -> list[ConvMeshError]:
    """Everything that keeps lists of channels from being a partition.

    Args:
        owned: Channels per rank.
        num_channels: Channels of the tensor; default one more than the highest that is owned.

    Returns:
        The errors, none for a partition.
    """
    if not owned:
        return [ConfigError("a channel partition has no ranks", expected="at least 1")]
    ranks: dict[int, list[int]] = {}
    for rank, channels in enumerate(owned):
        for channel in channels:
            ranks.setdefault(channel, []).append(rank)
    highest = max(ranks, default=-1) if num_channels is None else num_channels - 1
    errors: list[ConvMeshError] = [
        ConfigError(f"channel {channel} is owned more than once", got=f"ranks {found}", expected="one rank")
        for channel, found in sorted(ranks.items())
        if len(found) > 1
    ]
    outside = sorted(channel for channel in ranks if not 0 <= channel <= highest)
    if outside:
        errors.append(ConfigError(f"there are no channels {_listed(outside)}", expected=f"0 to {highest}"))
    missing = [channel for channel in range(highest + 1) if channel not in ranks]
    if missing:
        errors.append(
            ConfigError(f"channels {_listed(missing)} are owned by no rank", expected=f"each of 0 to {highest} once")
        )
    return errors


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"


def check_counts(num_channels: int, num_ranks: int) -> None:
    """Refuses numbers that can't be split.

    Raises:
        ConfigError: If there is no rank or a negative number of channels.
    """
    if num_ranks < 1:
        raise ConfigError("channels are split over no ranks", got=num_ranks, expected="at least 1")
    if num_channels < 0:
        raise ConfigError("there are negative channels", got=num_channels, expected="0 or more")


def check_groups(num_channels: int, groups: int) -> None:
    """Refuses groups that channels don't divide into.

    Raises:
        ConfigError: If there is no group or a remainder.
    """
    if groups < 1 or num_channels % groups:
        raise ConfigError("channels don't divide into the groups", got=f"{num_channels} channels, {groups} groups")

"""Mesh: the grid of ranks, slowest to fastest axis first."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from convmesh.errors import ConfigError

AXES = ("stage", "data", "channel", "depth", "height", "width")
"""Axis names with a default meaning. Any other name is free and splits nothing by itself."""

_SLOWEST = ("stage", "data")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks with named axes.

    ``stage`` and ``data`` come first whatever order they were written in, so that the axes that communicate most sit on
    neighbouring devices; the others keep their order. The last axis varies fastest: on ``data=2, channel=2`` the ranks
    0, 1, 2, 3 have the coordinates (0, 0), (0, 1), (1, 0), (1, 1).

    Args:
        sizes: Axis name to size, each at least 1.

    Raises:
        ConfigError: If an axis name or a size is not valid.
    """

    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if not _NAME.fullmatch(str(name)):
                raise ConfigError(
                    "a mesh axis has a bad name", got=repr(name), expected="lower-case letters, digits, _"
                )
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(
                    f"mesh axis '{name}' has a bad size", got=repr(size), expected="a whole number from 1"
                )
        ordered = [name for name in _SLOWEST if name in self.sizes]
        ordered += [name for name in self.sizes if name not in _SLOWEST]
        object.__setattr__(self, "sizes", {name: self.sizes[name] for name in ordered})

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the whole mesh."""
        return math.prod(self.sizes.values())

    def size(self, axis: str) -> int:
        """The size of an axis; 1 for an axis that the mesh does not name."""
        return self.sizes.get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank sits.

        Args:
            rank: From 0 to ``num_ranks - 1``.

        Returns:
            Axis name to position on that axis.

        Raises:
            ConfigError: If there is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ConfigError("there is no such rank", got=rank, expected=f"0 to {self.num_ranks - 1}")
        position: dict[str, int] = {}
        for name in reversed(list(self.sizes)):
            rank, position[name] = divmod(rank, self.sizes[name])
        return {name: position[name] for name in self.sizes}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate; axes left out count as 0."""
        number = 0
        for name, size in self.sizes.items():
            number = number * size + coordinate.get(name, 0)
        return number

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only in their position on one axis.

        Args:
            axis: The axis along which a group lies; one the mesh does not name gives groups of one.

        Returns:
            One tuple of ranks per group, in order of position, groups in order of their first rank.
        """
        groups: dict[int, list[int]] = {}
        for rank in range(self.num_ranks):
            first = self.rank({**self.coordinate(rank), axis: 0})
            groups.setdefault(first, []).append(rank)
        return tuple(tuple(groups[first]) for first in sorted(groups))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.sizes.items()) or "data=1"


def parse_mesh(text: str) -> Mesh:
    """Reads a mesh as written on the command line.

    Args:
        text: For example ``"data=2,channel=4"``.

    Returns:
        The mesh.

    Raises:
        ConfigError: If the text is not of this form.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, size = part.partition("=")
        if not size.strip().isdigit():
            raise ConfigError("a mesh is not written as axis=size", got=repr(part), expected='like "data=2,channel=4"')
        if name.strip() in sizes:
            raise ConfigError("a mesh axis is written twice", got=repr(name.strip()))
        sizes[name.strip()] = int(size)
    return Mesh(sizes)

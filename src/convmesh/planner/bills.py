"""Bills: what many ways cost, as a list of work and messages that is priced for any number of samples at once.

FLOPs and bytes of an operator, bytes of its messages and of what it keeps grow along straight lines with the samples of
a micro-batch. Two numbers of samples tell these lines; curves and links then price all operators together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convmesh.planner.curves import Floats
from convmesh.planner.links import GroupShape
from convmesh.planner.seconds import CostModel
from convmesh.planner.signature import Piece


@dataclass(frozen=True)
class Bill:
    """What one way costs a rank per micro-batch of some number of samples.

    Args:
        pieces: Work that is looked up on curves.
        messages: Kind and bytes of each collective over the channel axis, and how often it is sent.
        seconds: Work that was measured at exactly its shapes.
        kept_bytes: What is kept for the backward.
    """

    pieces: tuple[Piece, ...] = ()
    messages: tuple[tuple[str, int, int], ...] = ()
    seconds: float = 0.0
    kept_bytes: float = 0.0


@dataclass(frozen=True)
class WayCosts:
    """What ways cost per micro-batch, one entry per way, operator after operator.

    Args:
        seconds: Forward, backward, communication over the channel axis; what recomputing all blocks costs besides.
        kept_bytes: Floor of what is kept for the backward; where all blocks are recomputed, of what is still kept.
    """

    seconds: Floats
    kept_bytes: Floats


class Bills:
    """The bills of many ways.

    Args:
        bills: Samples of a micro-batch to the bill of each way; of two numbers all others follow.
    """

    def __init__(self, bills: Mapping[int, Sequence[Bill]]) -> None:
        first, last = min(bills), max(bills)
        low, high = bills[first], bills[last]
        self._first, self._step = first, max(last - first, 1)
        self._num_ways = len(low)
        self._seconds = np.asarray([bill.seconds for bill in low])
        self._kept = _Line(low=[bill.kept_bytes for bill in low], high=[bill.kept_bytes for bill in high])
        self._pieces = self._sorted_pieces(low, high)
        self._messages = self._sorted_messages(low, high)

    @staticmethod
    def _sorted_pieces(low: Sequence[Bill], high: Sequence[Bill]) -> list[_Pieces]:
        found: dict[tuple[str, str, str], list[tuple[int, Piece, Piece]]] = defaultdict(list)
        for way, (one, other) in enumerate(zip(low, high, strict=True)):
            for small, large in zip(one.pieces, other.pieces, strict=True):
                found[small.operator, small.dtype, small.direction].append((way, small, large))
        return [_Pieces.of(entries) for entries in found.values()]

    @staticmethod
    def _sorted_messages(low: Sequence[Bill], high: Sequence[Bill]) -> dict[str, _Messages]:
        found: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
        for way, (one, other) in enumerate(zip(low, high, strict=True)):
            for (kind, small, times), (_, large, _) in zip(one.messages, other.messages, strict=True):
                found[kind].append((way, times, small, large))
        return {kind: _Messages.of(entries) for kind, entries in found.items()}

    def priced(self, model: CostModel, group: GroupShape, num_samples: int) -> WayCosts:
        """What the ways cost.

        Args:
            model: The devices.
            group: The ranks of the channel axis.
            num_samples: Of a micro-batch.

        Returns:
            The costs.
        """
        place = (num_samples - self._first) / self._step
        seconds = self._seconds.copy()
        for pieces in self._pieces:
            found = model.many_seconds(
                pieces.example, flops=pieces.flops.at(place), num_bytes=pieces.num_bytes.at(place)
            )
            seconds += np.bincount(pieces.ways, pieces.times * found, minlength=self._num_ways)
        for kind, messages in self._messages.items():
            alpha = model.collectives.seconds(kind, 0, group)
            beta = model.collectives.seconds(kind, 1, group) - alpha
            found = alpha + beta * messages.num_bytes.at(place)
            seconds += np.bincount(messages.ways, messages.times * found, minlength=self._num_ways)
        return WayCosts(seconds, self._kept.at(place))


class _Line:
    """Values at two places, and at all others."""

    def __init__(self, *, low: Sequence[float], high: Sequence[float]) -> None:
        self._low: Floats = np.asarray(low, dtype=float)
        self._rise: Floats = np.asarray(high, dtype=float) - self._low

    def at(self, place: float) -> Floats:
        """The values, ``place`` being 0 at the first and 1 at the second."""
        found: Floats = self._low + place * self._rise
        return found


@dataclass(frozen=True)
class _Pieces:
    """All pieces that are looked up on one curve."""

    example: Piece
    ways: npt.NDArray[np.intp]
    times: npt.NDArray[np.intp]
    flops: _Line
    num_bytes: _Line

    @classmethod
    def of(cls, entries: Sequence[tuple[int, Piece, Piece]]) -> _Pieces:
        """Of the number of the way and the piece at both numbers of samples."""
        ways, low, high = zip(*entries, strict=True)
        return cls(
            example=low[0],
            ways=np.asarray(ways),
            times=np.asarray([piece.times for piece in low]),
            flops=_Line(low=[piece.flops for piece in low], high=[piece.flops for piece in high]),
            num_bytes=_Line(low=[piece.num_bytes for piece in low], high=[piece.num_bytes for piece in high]),
        )


@dataclass(frozen=True)
class _Messages:
    """All collectives of one kind."""

    ways: npt.NDArray[np.intp]
    times: npt.NDArray[np.intp]
    num_bytes: _Line

    @classmethod
    def of(cls, entries: Sequence[tuple[int, int, int, int]]) -> _Messages:
        """Of the number of the way, how often it is sent, and bytes at both numbers of samples."""
        ways, times, low, high = zip(*entries, strict=True)
        return cls(np.asarray(ways), np.asarray(times), _Line(low=low, high=high))

"""What a rank does and when, noted while it runs: cheap enough to be always on.

One process is one rank, so there is one recorder per process, ``RECORDER``. It always adds up how long each kind of
thing blocked the rank, and between ``start`` and ``stop`` it keeps every event. Times are those of the host: on a CPU
that is when things happen; a GPU or NPU works later than it was told to, so there the engine's own profiler has to be
asked (``detail`` in `convmesh.training.profiling`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import TracebackType

import numpy as np
import numpy.typing as npt

from convmesh.profiling.events import NONE, EventBuilder, Kind, RankEvents

Bools = npt.NDArray[np.bool_]

MAIN = "main"
"""Lane of what blocks the rank; other lanes run beside it."""

SKIPPED_UPDATE = "skipped update"
"""Name of what notes that an update was skipped because a gradient overflowed."""


class Recorder:
    """Notes what a rank does.

    Args:
        clock: Seconds; of one machine's ranks all on one clock.

    Attributes:
        layer: Module path of the layer that computes now, where that is known: collectives that block it are its own.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = clock
        self._totals: dict[tuple[Kind, str], float] = defaultdict(float)
        self._events: list[_Noted] | None = None
        self._steps: list[tuple[int, float, float, int]] = []
        self._memory: list[tuple[float, int]] = []
        self.layer = ""

    @property
    def keeps_events(self) -> bool:
        """Whether every event is kept."""
        return self._events is not None

    def span(self, kind: Kind, name: str, *, layer: str = "", axis: str = "", num_bytes: int = 0) -> _Span:
        """Notes how long the body of a ``with`` takes, as something that blocks the rank.

        Args:
            kind: What it is.
            name: What runs.
            layer: Module path in the network.
            axis: Mesh axis of a collective.
            num_bytes: Bytes of a collective's input.

        Returns:
            A context manager.
        """
        return _Span(self, (kind, name, layer, axis, num_bytes))

    def add(self, kind: Kind, name: str, *, start: float, end: float, axis: str = "", layer: str = "") -> None:
        """Notes something that blocked the rank.

        Args:
            kind: What it was.
            name: What ran.
            start: When it began, in seconds of ``now``.
            end: When it ended.
            axis: Mesh axis of a collective.
            layer: Module path in the network.
        """
        self._totals[kind, axis] += end - start
        if self._events is not None:
            self._events.append((kind, name, layer, axis, 0, start, end, MAIN))

    def add_layer(self, name: str, *, start: float, end: float, layer: str) -> None:
        """Notes which part of a computing, that is noted as a whole too, was a layer's; sums don't count it again.

        Args:
            name: What ran.
            start: When it began, in seconds of ``now``.
            end: When it ended.
            layer: Module path in the network.
        """
        if self._events is not None:
            self._events.append(("compute", name, layer, "", 0, start, end, MAIN))

    def note(self, kind: Kind, name: str) -> None:
        """Notes that something happened now, which took no time."""
        now = self.now()
        self.add(kind, name, start=now, end=now)

    def add_beside(self, name: str, *, start: float, end: float, axis: str, num_bytes: int, lane: str) -> None:
        """Notes a collective that ran beside the rank's own work; may be called from any thread.

        Args:
            name: What ran.
            start: When it began, in seconds of ``now``.
            end: When it ended.
            axis: Mesh axis.
            num_bytes: Bytes of its input.
            lane: What it ran on; not ``MAIN``.
        """
        if self._events is not None:
            self._events.append(("communication", name, "", axis, num_bytes, start, end, lane))

    def count(self, kind: Kind, seconds: float, *, axis: str = "") -> None:
        """Adds to the sums alone."""
        self._totals[kind, axis] += seconds

    def take_totals(self) -> Mapping[tuple[Kind, str], float]:
        """Seconds by kind and axis since the last call: only what blocked the rank."""
        totals, self._totals = self._totals, defaultdict(float)
        return totals

    def start(self) -> None:
        """Begins to keep every event."""
        self._events, self._steps, self._memory = [], [], []

    def add_step(self, number: int, *, start: float, end: float, num_samples: int, memory_bytes: int = 0) -> None:
        """Notes a whole step.

        Args:
            number: Its number.
            start: When it began, waiting for data included.
            end: When it was done.
            num_samples: Samples that this rank computed.
            memory_bytes: Memory in use at its end; 0 if not known.
        """
        if self._events is not None:
            self._steps.append((number, start, end, num_samples))
            if memory_bytes:
                self._memory.append((end, memory_bytes))

    def stop(self, rank: int) -> RankEvents:
        """Ends keeping events.

        Args:
            rank: Number of this rank.

        Returns:
            What was kept. Where a layer or a collective was noted within a computing, the computing is what is left.
        """
        builder = EventBuilder(rank)
        for kind, name, layer, axis, num_bytes, begin, end, lane in self._events or ():
            builder.add(kind, name, start=begin, end=end, layer=layer, axis=axis, lane=lane, num_bytes=num_bytes)
        for number, begin, end, num_samples in self._steps:
            builder.add_step(number, start=begin, end=end, num_samples=num_samples)
        for moment, num_bytes in self._memory:
            builder.add_memory(moment, num_bytes)
        self._events = None
        return cut_out_collectives(cut_out_layers(builder.build()))

    def _leave(self, about: tuple[Kind, str, str, str, int], begin: float, end: float) -> None:
        kind, name, layer, axis, num_bytes = about
        self._totals[kind, axis] += end - begin
        if self._events is not None:
            self._events.append((kind, name, layer or self.layer, axis, num_bytes, begin, end, MAIN))


_Noted = tuple[Kind, str, str, str, int, float, float, str]


class _Span:
    """One ``with``; a class, since a generator's context manager costs several times as much."""

    __slots__ = ("_about", "_begin", "_recorder")

    def __init__(self, recorder: Recorder, about: tuple[Kind, str, str, str, int]) -> None:
        self._recorder = recorder
        self._about = about

    def __enter__(self) -> None:
        self._begin = self._recorder.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder._leave(self._about, self._begin, self._recorder.now())


def cut_out_collectives(events: RankEvents) -> RankEvents:
    """Takes collectives that blocked a rank out of the computing, or the update, in which they happened.

    Args:
        events: Of one rank.

    Returns:
        The same with such events divided into the pieces between the collectives.
    """
    return _cut(events, outer_E=events.of_kind("compute", "optimizer"), inner_E=events.of_kind("communication"))


def cut_out_layers(events: RankEvents) -> RankEvents:
    """Takes layers out of the computing in which they ran.

    Args:
        events: Of one rank.

    Returns:
        The same with computing that names no layer divided into the pieces between those that do.
    """
    computes, named = events.of_kind("compute"), events.layer_E != NONE
    return _cut(events, outer_E=computes & ~named, inner_E=computes & named)


def _cut(events: RankEvents, *, outer_E: Bools, inner_E: Bools) -> RankEvents:
    """Divides events of the main lane at others of it, that lie within them one after the other."""
    lane = events.names.index(MAIN) if MAIN in events.names else NONE
    main_E = events.lane_E == lane
    blocking, outer_E = np.flatnonzero(main_E & inner_E), main_E & outer_E
    if lane == NONE or not len(blocking):
        return events
    begins, ends = events.start_E[blocking], events.end_E[blocking]
    first_E, last_E = np.searchsorted(begins, events.start_E), np.searchsorted(begins, events.end_E)
    divided_E = outer_E & (last_E > first_E)
    kept = [np.flatnonzero(~divided_E)]
    starts, stops = [events.start_E[~divided_E]], [events.end_E[~divided_E]]
    for index in np.flatnonzero(divided_E):
        first, last = first_E[index], last_E[index]
        piece_starts = np.concatenate([[events.start_E[index]], ends[first:last]])
        piece_ends = np.concatenate([begins[first:last], [events.end_E[index]]])
        whole = piece_ends > piece_starts
        kept.append(np.full(int(whole.sum()), index))
        starts.append(piece_starts[whole])
        stops.append(piece_ends[whole])
    index_P, start_P, end_P = (np.concatenate(parts) for parts in (kept, starts, stops))
    order = np.argsort(start_P, kind="stable")
    columns = {
        name: getattr(events, name)[index_P[order]]
        for name in ("kind_E", "name_E", "layer_E", "axis_E", "lane_E", "num_bytes_E")
    }
    return events.replaced(**columns, start_E=start_P[order], end_E=end_P[order])


RECORDER = Recorder()
"""The recorder of this process."""

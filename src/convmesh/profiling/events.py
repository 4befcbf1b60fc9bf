"""One model for what ranks do over time, wherever it was measured: in a run of ours or in another tool's trace.

Events are kept as columns, one array per property: a trace of 256 ranks and 100 steps has millions of them.

Legend: E events, S steps, M samples of memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from convmesh.errors import ProfileError

KINDS = ("compute", "optimizer", "communication", "data")
"""What a rank can be busy with: forward and backward, the optimizer, a collective, waiting for data."""

NONE = -1
"""Index of a layer or axis that is not known."""

Kind = Literal["compute", "optimizer", "communication", "data"]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_COLUMNS: Mapping[str, type] = {
    "kind_E": np.uint8,
    "name_E": np.int32,
    "layer_E": np.int32,
    "axis_E": np.int32,
    "lane_E": np.int32,
    "num_bytes_E": np.int64,
    "start_E": np.float64,
    "end_E": np.float64,
    "step_S": np.int64,
    "step_start_S": np.float64,
    "step_end_S": np.float64,
    "num_samples_S": np.int64,
    "memory_time_M": np.float64,
    "memory_bytes_M": np.int64,
}
_CODES: Mapping[type, Literal["B", "i", "q", "d"]] = {np.uint8: "B", np.int32: "i", np.int64: "q", np.float64: "d"}

COLUMNS = tuple(_COLUMNS)
"""Names of the columns, as files of events hold them."""


@dataclass(frozen=True, kw_only=True)
class RankEvents:
    """What one rank did, in seconds of its clock.

    Args:
        rank: Its number.
        names: Texts that the columns refer to by index: names of events, layers, axes and lanes.
        kind_E: Index into ``KINDS``.
        name_E: What ran, for example a kernel or a collective.
        layer_E: Module path in the network, or ``NONE``.
        axis_E: Mesh axis of a collective, or ``NONE``.
        lane_E: Stream or thread.
        num_bytes_E: Bytes of a collective's input on this rank; 0 if not known.
        start_E: Start.
        end_E: End.
        step_S: Number of each step, rising.
        step_start_S: Its start.
        step_end_S: Its end.
        num_samples_S: Samples that this rank computed in it; 0 if not known.
        memory_time_M: Times at which memory was sampled.
        memory_bytes_M: Memory in use then.

    Raises:
        ProfileError: If columns differ in length or something ends before it starts.
    """

    rank: int
    names: tuple[str, ...]
    kind_E: npt.NDArray[np.uint8]
    name_E: npt.NDArray[np.int32]
    layer_E: npt.NDArray[np.int32]
    axis_E: npt.NDArray[np.int32]
    lane_E: npt.NDArray[np.int32]
    num_bytes_E: Integers
    start_E: Floats
    end_E: Floats
    step_S: Integers
    step_start_S: Floats
    step_end_S: Floats
    num_samples_S: Integers
    memory_time_M: Floats
    memory_bytes_M: Integers

    def __post_init__(self) -> None:
        for suffix in ("_E", "_S", "_M"):
            lengths = {len(getattr(self, name)) for name in COLUMNS if name.endswith(suffix)}
            if len(lengths) != 1:
                raise ProfileError(f"columns of rank {self.rank} differ in length", got=sorted(lengths))
        for start, end in ((self.start_E, self.end_E), (self.step_start_S, self.step_end_S)):
            if not (np.isfinite(start).all() and np.isfinite(end).all() and (start <= end).all()):
                raise ProfileError(f"an event of rank {self.rank} ends before it starts, or has no time")
        indices = (self.name_E, self.layer_E, self.axis_E, self.lane_E)
        if any(len(column) and not (column.min() >= NONE and column.max() < len(self.names)) for column in indices):
            raise ProfileError(f"an event of rank {self.rank} names a text that the file does not hold")
        if len(self.kind_E) and self.kind_E.max() >= len(KINDS):
            raise ProfileError(f"an event of rank {self.rank} is of an unknown kind", expected=", ".join(KINDS))
        if (np.diff(self.step_S) <= 0).any():
            raise ProfileError(f"the steps of rank {self.rank} are not in order")

    @property
    def num_events(self) -> int:
        """Number of events."""
        return len(self.kind_E)

    def of_kind(self, *kinds: Kind) -> npt.NDArray[np.bool_]:
        """Which events are of one of these kinds, as a mask of shape (E,)."""
        return np.isin(self.kind_E, [KINDS.index(kind) for kind in kinds])

    def text(self, index: int) -> str:
        """A text by index; empty for ``NONE``."""
        return self.names[index] if index != NONE else ""

    def shifted(self, seconds: float) -> RankEvents:
        """The same events, later by some seconds."""
        times = ("start_E", "end_E", "step_start_S", "step_end_S", "memory_time_M")
        return self.replaced(**{name: getattr(self, name) + seconds for name in times})

    def kept(self, keep_E: npt.NDArray[np.bool_]) -> RankEvents:
        """Only some of the events."""
        return self.replaced(**{name: getattr(self, name)[keep_E] for name in COLUMNS if name.endswith("_E")})

    def replaced(self, **columns: Any) -> RankEvents:
        """The same events with other columns."""
        kept = {name: getattr(self, name) for name in ("rank", "names", *COLUMNS)}
        return RankEvents(**{**kept, **columns})


@dataclass(frozen=True, kw_only=True)
class About:
    """Where a profile comes from.

    Args:
        source: Where it was measured, in words.
        engine: ``"mindspore"``, ``"torch"``, or empty if not known.
        mesh: Axis name to size, slowest first; empty if not known: then all ranks are one group.
        remarks: What a reader of the figures should know.
        figures: What else was measured, by name; a name is missing where it was not.
    """

    source: str
    engine: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trace(About):
    """What all ranks did.

    Args:
        ranks: Their events, in the order of their numbers.
    """

    ranks: tuple[RankEvents, ...]

    def __post_init__(self) -> None:
        numbers = [events.rank for events in self.ranks]
        if not numbers:
            raise ProfileError("a profile without ranks", expected="at least one")
        if len(set(numbers)) != len(numbers):
            raise ProfileError("two profiles of the same rank", got=sorted(numbers))
        object.__setattr__(self, "ranks", tuple(sorted(self.ranks, key=lambda events: events.rank)))


class EventBuilder:
    """Collects the events of one rank, one by one, in about 60 bytes each.

    Args:
        rank: Its number.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._texts: dict[str, int] = {}
        self._columns: dict[str, array[Any]] = {name: array(_CODES[kind]) for name, kind in _COLUMNS.items()}

    def __len__(self) -> int:
        return len(self._columns["kind_E"])

    def add(  # noqa: PLR0913 - the columns of an event
        self,
        kind: Kind,
        name: str,
        *,
        start: float,
        end: float,
        layer: str = "",
        axis: str = "",
        lane: str = "",
        num_bytes: int = 0,
    ) -> None:
        """Adds an event.

        Args:
            kind: One of ``KINDS``.
            name: What ran.
            start: In seconds.
            end: In seconds; a time before the start counts as the start.
            layer: Module path in the network.
            axis: Mesh axis of a collective.
            lane: Stream or thread.
            num_bytes: Bytes of a collective's input on this rank.
        """
        index = self._index
        self._append(
            kind_E=KINDS.index(kind),
            name_E=index(name),
            layer_E=index(layer),
            axis_E=index(axis),
            lane_E=index(lane),
            num_bytes_E=num_bytes,
            start_E=start,
            end_E=max(start, end),
        )

    def add_step(self, number: int, *, start: float, end: float, num_samples: int = 0) -> None:
        """Adds a step.

        Args:
            number: Its number.
            start: In seconds.
            end: In seconds.
            num_samples: Samples that this rank computes in it; 0 if not known.
        """
        self._append(step_S=number, step_start_S=start, step_end_S=max(start, end), num_samples_S=num_samples)

    def add_memory(self, time: float, num_bytes: int) -> None:
        """Adds a sample of the memory in use."""
        self._append(memory_time_M=time, memory_bytes_M=num_bytes)

    def build(self) -> RankEvents:
        """The events, sorted by start; steps by number.

        Raises:
            ProfileError: If they contradict each other.
        """
        columns: dict[str, Any] = {name: np.array(values, _COLUMNS[name]) for name, values in self._columns.items()}
        for suffix, key in (("_E", "start_E"), ("_S", "step_S"), ("_M", "memory_time_M")):
            order = np.argsort(columns[key], kind="stable")
            columns |= {name: values[order] for name, values in columns.items() if name.endswith(suffix)}
        return RankEvents(rank=self.rank, names=tuple(self._texts), **columns)

    def _append(self, **values: float) -> None:
        for name, value in values.items():
            self._columns[name].append(value)

    def _index(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts)) if text else NONE

"""Which events of different ranks are the same collective, and how long each rank waited for the others in it.

Ranks of a group meet in a collective: the last one to arrive keeps the others waiting, and only from then on are bytes
moved. The n-th collective of an axis within a step is the same on all ranks of a group, since all of them run the same
program. Where they don't (numbers differ), the step is left out and counted.

Legend: R ranks of a group, C collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from convmesh.mesh import Mesh
from convmesh.profiling.breakdown import axes_of, common_steps, step_bounds
from convmesh.profiling.events import NONE, Floats, Integers, RankEvents, Trace


@dataclass(frozen=True, kw_only=True)
class Matched:
    """The collectives of one group of ranks.

    Args:
        axis: Mesh axis; empty if not known.
        ranks: The ranks of the group.
        event_RC: Index of each rank's event.
        step_C: Step that it belongs to.
        start_RC: When each rank arrived.
        end_RC: When it was done there.
        num_bytes_C: Input bytes on a rank, the largest of the group; 0 if not known.
        num_unmatched_steps: Steps left out because ranks communicated a different number of times.
    """

    axis: str
    ranks: tuple[int, ...]
    event_RC: Integers
    step_C: Integers
    start_RC: Floats
    end_RC: Floats
    num_bytes_C: Integers
    num_unmatched_steps: int = 0

    @property
    def begin_times(self) -> Floats:
        """When each rank could begin: when it came, or was through with the one before if that is later, shape (R, C).

        Buckets of gradients are handed over while earlier ones still travel; that they queue is nobody's lateness.
        """
        if not len(self.step_C):
            return self.start_RC
        order = np.argsort(self.end_RC.max(axis=0), kind="stable")
        free_RC = np.maximum.accumulate(self.end_RC[:, order], axis=1)
        begin_RC = self.start_RC.copy()
        begin_RC[:, order[1:]] = np.maximum(self.start_RC[:, order[1:]], free_RC[:, :-1])
        begun_RC: Floats = np.minimum(begin_RC, self.end_RC)
        return begun_RC

    @property
    def waiting_seconds(self) -> Floats:
        """Seconds that each rank waited for the last to arrive, at most those it spent there, shape (R, C)."""
        begin_RC = self.begin_times
        late_RC = self.start_RC.max(axis=0) - begin_RC
        waiting_RC: Floats = np.clip(late_RC, 0.0, self.end_RC - begin_RC)
        return waiting_RC

    @property
    def transfer_seconds(self) -> Floats:
        """Seconds from when all could begin to the last end: what moving the bytes took, shape (C,)."""
        transfer_C: Floats = np.maximum(self.end_RC.max(axis=0) - self.begin_times.max(axis=0), 0.0)
        return transfer_C

    @property
    def service_seconds(self) -> Floats:
        """What each collective took by itself: from when all had come and the one before was through, shape (C,).

        Buckets of gradients are sent off one after the other and wait for each other; from sending to the end that
        waiting would count once for each of them.
        """
        begin_C, end_C = self.start_RC.max(axis=0, initial=-np.inf), self.end_RC.max(axis=0, initial=-np.inf)
        order = np.argsort(end_C, kind="stable")
        free_C = np.concatenate([[-np.inf], end_C[order][:-1]])[: len(order)]
        seconds_C = np.zeros(len(order))
        seconds_C[order] = np.maximum(end_C[order] - np.maximum(begin_C[order], free_C), 0.0)
        return seconds_C


def match(trace: Trace) -> list[Matched]:
    """Matches the collectives of all groups of at least two ranks.

    Args:
        trace: What the ranks did, on one clock.

    Returns:
        One entry per axis and group, axes sorted; groups with ranks that are not in the trace are left out.
    """
    step_S = common_steps(trace)
    by_rank = {events.rank: events for events in trace.ranks}
    axes = sorted({axis for events in trace.ranks for axis in axes_of(events)})
    return [
        _match_group(axis, [by_rank[rank] for rank in group], step_S)
        for axis in axes
        for group in _groups(trace, axis)
        if len(group) > 1 and all(rank in by_rank for rank in group)
    ]


def by_name(
    trace: Trace, matched: Sequence[Matched], step_S: Integers
) -> Iterator[tuple[Matched, list[tuple[str, npt.NDArray[np.bool_]]]]]:
    """Tells the collectives of each group apart by what they are called.

    Args:
        trace: What the ranks did.
        matched: Its collectives.
        step_S: Steps to count.

    Yields:
        Each group, and for each name which of its collectives are called so and lie in these steps, shape (C,).
    """
    by_rank = {events.rank: events for events in trace.ranks}
    for group in matched:
        events = by_rank[group.ranks[0]]
        keep_C, name_C = np.isin(group.step_C, step_S), events.name_E[group.event_RC[0]]
        yield group, [(events.text(index), keep_C & (name_C == index)) for index in np.unique(name_C[keep_C])]


def align(trace: Trace) -> Trace:
    """Puts all ranks on the clock of the first one.

    Ranks leave a collective at nearly the same moment, whenever they arrived. So the clock of a rank is off by the
    median, over all collectives of the whole mesh, of the difference of their ends.

    Args:
        trace: What the ranks did, each on its own clock.

    Returns:
        The same on one clock; unchanged, with a remark, where ranks never communicate together.
    """
    if len(trace.ranks) < 2:
        return trace
    step_S = common_steps(trace)
    aligned = {trace.ranks[0].rank: trace.ranks[0]}
    waiting = list(trace.ranks[1:])
    groups = {axis: _groups(trace, axis) for events in trace.ranks for axis in axes_of(events)}
    while waiting:
        later = []
        for events in waiting:
            seconds = _lag(events, aligned, groups, step_S)
            if seconds is None:
                later.append(events)
            else:
                aligned[events.rank] = events.shifted(seconds)
        if len(later) == len(waiting):
            remark = "the clocks of the ranks could not be compared: waiting and moving bytes are not told apart"
            return replace(trace, remarks=(*trace.remarks, remark))
        waiting = later
    return replace(trace, ranks=tuple(aligned.values()))


def _lag(
    events: RankEvents,
    aligned: Mapping[int, RankEvents],
    groups: Mapping[str, tuple[tuple[int, ...], ...]],
    step_S: Integers,
) -> float | None:
    """Seconds by which a rank's clock is behind, by the first aligned rank that it communicates with."""
    for axis in sorted(axes_of(events)):
        group = next((ranks for ranks in groups[axis] if events.rank in ranks), ())
        peer = next((aligned[rank] for rank in group if rank in aligned), None)
        if peer is None:
            continue
        found = _match_group(axis, [peer, events], step_S)
        if found.end_RC.shape[1]:
            return float(np.median(found.end_RC[0] - found.end_RC[1]))
    return None


def _groups(trace: Trace, axis: str) -> tuple[tuple[int, ...], ...]:
    sizes: Mapping[str, int] = trace.mesh
    if axis in sizes:
        return Mesh(sizes).groups(axis)
    return (tuple(events.rank for events in trace.ranks),)


def _match_group(axis: str, group: list[RankEvents], step_S: Integers) -> Matched:
    found = [_collectives(events, axis, step_S) for events in group]
    counts_RS = np.stack([np.bincount(step, minlength=len(step_S)) for _, step in found])
    equal_S = (counts_RS == counts_RS[0]).all(axis=0)
    kept = [event[equal_S[step]] for event, step in found]
    step_C = found[0][1][equal_S[found[0][1]]]
    event_RC = np.stack(kept)
    columns = {
        name: np.stack([getattr(events, name)[event] for events, event in zip(group, kept, strict=True)])
        for name in ("start_E", "end_E", "num_bytes_E")
    }
    return Matched(
        axis=axis,
        ranks=tuple(events.rank for events in group),
        event_RC=event_RC,
        step_C=step_S[step_C],
        start_RC=columns["start_E"],
        end_RC=columns["end_E"],
        num_bytes_C=columns["num_bytes_E"].max(axis=0),
        num_unmatched_steps=int((~equal_S).sum()),
    )


def _collectives(events: RankEvents, axis: str, step_S: Integers) -> tuple[Integers, Integers]:
    """Index of each collective of an axis that starts within a step, and the place of its step in ``step_S``."""
    index = {**{text: place for place, text in enumerate(events.names)}, "": NONE}.get(axis, len(events.names))
    event = np.flatnonzero(events.of_kind("communication") & (events.axis_E == index))
    start_S, end_S = step_bounds(events, step_S)
    place = np.searchsorted(start_S, events.start_E[event], side="right") - 1
    inside = (place >= 0) & (events.start_E[event] < end_S[np.maximum(place, 0)])
    return event[inside], place[inside]

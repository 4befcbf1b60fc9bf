"""What a profile says, all together: the one place that reports, advice and comparisons start from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from convmesh.profiling.breakdown import Breakdown, break_down
from convmesh.profiling.events import Floats, Integers, RankEvents, Trace
from convmesh.profiling.intervals import Cover
from convmesh.profiling.matching import Matched, align, match
from convmesh.profiling.recorder import SKIPPED_UPDATE
from convmesh.profiling.steps import Spread, spread_of, steady_steps
from convmesh.profiling.stragglers import Straggler, find_stragglers
from convmesh.profiling.tables import CollectiveRow, Row, collective_table, layer_table
from convmesh.profiling.traffic import Traffic, traffic_of


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What a profile says.

    Args:
        trace: The events, all ranks on one clock.
        breakdown: Where the time of all steps went.
        steady: The same without the first steps that were set apart.
        warmup_S: Numbers of the steps set apart.
        waiting_RS: Seconds that each rank waited in collectives for the last to arrive while it computed nothing, of
            all steps, shape (R, S).
        matched: Collectives of all groups, matched over their ranks.
        spread: How the steady steps vary.
        stragglers: Ranks that keep others waiting.
        layers: Costs by layer or operation, costliest first.
        collectives: Costs by collective.
        traffic: How each axis communicates.
        peak_memory_bytes: Largest sampled memory of each rank; 0 if not known.
        num_unmatched_steps: Steps in which ranks of a group communicated a different number of times.
        num_skipped_updates: Updates skipped because a gradient overflowed.
    """

    trace: Trace
    breakdown: Breakdown
    steady: Breakdown
    warmup_S: Integers
    waiting_RS: Floats
    matched: tuple[Matched, ...]
    spread: Spread
    stragglers: tuple[Straggler, ...]
    layers: tuple[Row, ...]
    collectives: tuple[CollectiveRow, ...]
    traffic: tuple[Traffic, ...]
    peak_memory_bytes: tuple[int, ...]
    num_unmatched_steps: int
    num_skipped_updates: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of the ranks."""
        return tuple(events.rank for events in self.trace.ranks)

    @property
    def steady_waiting(self) -> Floats:
        """``waiting_RS`` of the steady steps, of shape (R, S)."""
        waiting_RS: Floats = self.waiting_RS[:, np.isin(self.breakdown.step_S, self.steady.step_S)]
        return waiting_RS

    def summary(self) -> dict[str, Any]:
        """The main figures as plain values: shares from 0 to 1, seconds per steady step on an average rank."""
        steady = self.steady
        parts = ("step", "compute", "optimizer", "exposed", "hidden", "data", "idle")
        seconds = {name: float(getattr(steady, f"{name}_RS").mean()) for name in parts}
        by_axis = {axis: float(steady.exposed_ARS[place].mean()) for place, axis in enumerate(steady.axes)}
        return {
            "source": self.trace.source,
            "engine": self.trace.engine,
            "mesh": dict(self.trace.mesh),
            "num_ranks": len(self.ranks),
            "num_steps": len(self.breakdown.step_S),
            "num_warmup_steps": len(self.warmup_S),
            "seconds_per_step": seconds,
            "waiting_seconds_per_step": float(self.steady_waiting.mean()),
            "communication_share": steady.communication_share,
            "data_share": steady.data_share,
            "exposed_seconds_by_axis": by_axis,
            "spread": asdict(self.spread),
            "stragglers": [asdict(straggler) for straggler in self.stragglers],
            "collectives": [asdict(row) for row in self.collectives],
            "traffic": [
                {**asdict(row), "latency_share": row.latency_share, "is_latency_bound": row.is_latency_bound}
                for row in self.traffic
            ],
            "layers": [asdict(row) for row in self.layers[:50]],
            "peak_memory_bytes": list(self.peak_memory_bytes),
            "num_unmatched_steps": self.num_unmatched_steps,
            "num_skipped_updates": self.num_skipped_updates,
            "remarks": list(self.trace.remarks),
        }


def analyse(trace: Trace, *, one_clock: bool = False) -> Analysis:
    """Analyses a profile.

    Args:
        trace: What the ranks did.
        one_clock: Whether their times are of one clock already, as on one machine.

    Returns:
        What it says.

    Raises:
        ProfileError: If the ranks have no step in common.
    """
    if not one_clock:
        trace = align(trace)
    breakdown = break_down(trace)
    steady_S = steady_steps(breakdown.step_RS)
    steady = breakdown.of_steps(steady_S)
    matched = match(trace)
    ranks = tuple(events.rank for events in trace.ranks)
    return Analysis(
        trace=trace,
        breakdown=breakdown,
        steady=steady,
        warmup_S=breakdown.step_S[~steady_S],
        waiting_RS=_waiting(trace, matched, breakdown),
        matched=tuple(matched),
        spread=spread_of(steady.step_RS),
        stragglers=tuple(find_stragglers(steady, ranks, matched)),
        layers=tuple(layer_table(trace, steady.step_S)),
        collectives=tuple(collective_table(trace, matched, steady.step_S)),
        traffic=tuple(traffic_of(steady, matched)),
        peak_memory_bytes=tuple(int(events.memory_bytes_M.max(initial=0)) for events in trace.ranks),
        num_unmatched_steps=sum(group.num_unmatched_steps for group in matched),
        num_skipped_updates=max((_num_named(events, SKIPPED_UPDATE) for events in trace.ranks), default=0),
    )


def _num_named(events: RankEvents, name: str) -> int:
    """Events of a name; those of an update are skipped on all ranks alike."""
    return int((events.name_E == events.names.index(name)).sum()) if name in events.names else 0


def _waiting(trace: Trace, matched: list[Matched], breakdown: Breakdown) -> Floats:
    """Seconds of each rank and step in which it waits for others and computes nothing."""
    place = {events.rank: index for index, events in enumerate(trace.ranks)}
    computes = [events.of_kind("compute", "optimizer") for events in trace.ranks]
    covers = [
        Cover(events.start_E[mask], events.end_E[mask]) for events, mask in zip(trace.ranks, computes, strict=True)
    ]
    waiting_RS = np.zeros(breakdown.step_RS.shape)
    for group in matched:
        place_C = np.searchsorted(breakdown.step_S, group.step_C)
        for rank, begin_C, waiting_C in zip(group.ranks, group.begin_times, group.waiting_seconds, strict=True):
            hidden_C = covers[place[rank]].within(begin_C, begin_C + waiting_C)
            np.add.at(waiting_RS[place[rank]], place_C, waiting_C - hidden_C)
    # Where collectives overlap, waiting counts in each: no more of it than is exposed costs time.
    return np.minimum(waiting_RS, breakdown.exposed_RS)

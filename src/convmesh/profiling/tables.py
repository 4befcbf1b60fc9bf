"""Tables of a profile: what layers, operations and collectives cost in a typical step.

Legend: E events, C collectives.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from convmesh.profiling.breakdown import step_bounds
from convmesh.profiling.events import Floats, Integers, Kind, RankEvents, Trace
from convmesh.profiling.intervals import Cover
from convmesh.profiling.matching import Matched, by_name


@dataclass(frozen=True, kw_only=True)
class Row:
    """What something costs on an average rank in an average step.

    Args:
        name: Layer or operation.
        kind: What it is.
        seconds: Sum of its events; those that run at once count each.
        exposed_seconds: For communication the part in which nothing computes; else the same as ``seconds``.
        num_events: Events.
        num_bytes: Bytes communicated.
    """

    name: str
    kind: Kind
    seconds: float
    exposed_seconds: float
    num_events: float
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """Collectives of one name and axis over all groups, on average.

    Args:
        name: What it is called.
        axis: Mesh axis; empty if not known.
        num_ranks: Ranks of a group.
        num_per_step: Collectives in a step.
        num_bytes: Input bytes of one; 0 if not known.
        transfer_seconds: From when all ranks could begin to the end, median.
        waiting_seconds: That a rank waits for the last to arrive, mean.
        bytes_per_second: Input bytes over ``transfer_seconds``; 0 if bytes are not known.
    """

    name: str
    axis: str
    num_ranks: int
    num_per_step: float
    num_bytes: float
    transfer_seconds: float
    waiting_seconds: float
    bytes_per_second: float


def layer_table(trace: Trace, step_S: Integers) -> list[Row]:
    """Costs by layer, or by operation where the layer is not known; the costliest first.

    Args:
        trace: What the ranks did.
        step_S: Steps to count.

    Returns:
        One row per name and kind.
    """
    sums: dict[tuple[str, Kind], Floats] = defaultdict(lambda: np.zeros(4))
    for events in trace.ranks:
        _add_events(sums, events, step_S)
    times = len(trace.ranks) * len(step_S)
    rows = [
        Row(
            name=name,
            kind=kind,
            seconds=total[0] / times,
            exposed_seconds=total[1] / times,
            num_events=total[2] / times,
            num_bytes=total[3] / times,
        )
        for (name, kind), total in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.exposed_seconds, -row.seconds, row.name))


def collective_table(trace: Trace, matched: list[Matched], step_S: Integers) -> list[CollectiveRow]:
    """Costs by collective, with the bandwidth that was reached.

    Args:
        trace: What the ranks did.
        matched: Its collectives, on one clock.
        step_S: Steps to count.

    Returns:
        One row per name and axis, the costliest first.
    """
    pieces: dict[tuple[str, str, int], list[Floats]] = defaultdict(list)
    for group, chosen in by_name(trace, matched, step_S):
        figures = np.stack(
            [group.transfer_seconds, group.waiting_seconds.mean(axis=0), group.num_bytes_C.astype(float)]
        )
        for name, chosen_C in chosen:
            pieces[name, group.axis, len(group.ranks)].append(figures[:, chosen_C])
    rows = [
        _collective_row(key, np.concatenate(found, axis=1), times=len(found) * len(step_S))
        for key, found in pieces.items()
    ]
    return sorted(rows, key=lambda row: -row.num_per_step * (row.transfer_seconds + row.waiting_seconds))


def _collective_row(key: tuple[str, str, int], figures: Floats, *, times: int) -> CollectiveRow:
    transfer_C, waiting_C, bytes_C = figures
    name, axis, num_ranks = key
    total = float(transfer_C.sum())
    return CollectiveRow(
        name=name,
        axis=axis,
        num_ranks=num_ranks,
        num_per_step=len(transfer_C) / times,
        num_bytes=float(bytes_C.mean()),
        transfer_seconds=float(np.median(transfer_C)),
        waiting_seconds=float(waiting_C.mean()),
        bytes_per_second=float(bytes_C.sum()) / total if total else 0.0,
    )


def _add_events(sums: dict[tuple[str, Kind], Floats], events: RankEvents, step_S: Integers) -> None:
    start_S, end_S = step_bounds(events, step_S)
    place_E = np.searchsorted(start_S, events.start_E, side="right") - 1
    inside_E = (place_E >= 0) & (events.start_E < end_S[np.maximum(place_E, 0)])
    label_E = np.where(events.layer_E >= 0, events.layer_E, events.name_E)
    length_E = events.end_E - events.start_E
    computes = events.of_kind("compute", "optimizer")
    compute = Cover(events.start_E[computes], events.end_E[computes])
    kinds: tuple[Kind, ...] = ("compute", "optimizer", "communication", "data")
    for kind in kinds:
        chosen = np.flatnonzero(inside_E & events.of_kind(kind))
        if not len(chosen):
            continue
        length = length_E[chosen]
        exposed = length
        if kind in ("communication", "data"):
            exposed = length - compute.within(events.start_E[chosen], events.end_E[chosen])
        figures = np.stack([length, exposed, np.ones(len(chosen)), events.num_bytes_E[chosen].astype(float)])
        for index in np.unique(label_E[chosen]):
            sums[events.text(index), kind] += figures[:, label_E[chosen] == index].sum(axis=1)

"""What all importers need: counting nested events once, and telling apart what lies inside of what.

Legend: E events.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from convmesh.profiling.events import KINDS, Kind, RankEvents
from convmesh.profiling.intervals import Cover

_SLACK_SECONDS = 1e-7
"""Traces round times to a fraction of a microsecond."""


def outermost(events: RankEvents, *kinds: Kind) -> RankEvents:
    """Leaves out events of some kinds that lie within another of the same lane, as operators within operators."""
    keep_E = np.ones(events.num_events, bool)
    chosen = events.of_kind(*kinds)
    for lane in np.unique(events.lane_E[chosen]):
        index = np.flatnonzero(chosen & (events.lane_E == lane))
        index = index[np.lexsort((-events.end_E[index], events.start_E[index]))]
        reach = np.maximum.accumulate(events.end_E[index])
        nested = np.concatenate([[False], events.end_E[index][1:] <= reach[:-1] + _SLACK_SECONDS])
        keep_E[index[nested]] = False
    return events.kept(keep_E)


def inside(events: RankEvents, cover: Cover) -> npt.NDArray[np.bool_]:
    """Which events lie within a cover, as a mask of shape (E,)."""
    length_E = events.end_E - events.start_E
    middle_E = (events.start_E + events.end_E) / 2
    covered_E = cover.within(events.start_E, events.end_E)
    # A moment has no length: it lies inside if time is covered around it.
    around_E = cover.within(middle_E - _SLACK_SECONDS, middle_E + _SLACK_SECONDS)
    return np.where(length_E > 0, covered_E >= length_E - _SLACK_SECONDS, around_E > 0)


def relabelled(events: RankEvents, mask_E: npt.NDArray[np.bool_], kind: Kind) -> RankEvents:
    """Changes the kind of some events."""
    return events.replaced(kind_E=np.where(mask_E, KINDS.index(kind), events.kind_E).astype(np.uint8))

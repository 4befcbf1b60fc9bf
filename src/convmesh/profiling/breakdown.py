"""Where the time of a step goes, per rank: compute, exposed communication, waiting for data, idle.

The four add up to the step's time exactly, by counting each moment once: as compute if anything computes (the optimizer
too), else as exposed communication if a collective runs, else as waiting for data if a loader is waited for, else as
idle. Communication that runs while something computes is *hidden*: it costs no time and is told apart.

Legend: R ranks, S steps, A axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.errors import ProfileError
from convmesh.profiling.events import NONE, Floats, Integers, RankEvents, Trace
from convmesh.profiling.intervals import Cover


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Seconds per rank and step, each of shape (R, S).

    Args:
        step_S: Number of each step; those that all ranks have.
        step_RS: Whole time of the step.
        compute_RS: Something computes, the optimizer included.
        optimizer_RS: The part of it in which the optimizer runs.
        exposed_RS: A collective runs and nothing computes.
        hidden_RS: A collective runs while something computes; part of ``compute_RS``.
        data_RS: Only data is waited for.
        idle_RS: Nothing is known to happen.
        axes: Names of the mesh axes that communicate; empty for a collective whose axis is not known.
        exposed_ARS: The exposed communication, axis by axis; where several communicate at once, the first counts.
        num_samples_RS: Samples computed; 0 if not known.
    """

    step_S: Integers
    step_RS: Floats
    compute_RS: Floats
    optimizer_RS: Floats
    exposed_RS: Floats
    hidden_RS: Floats
    data_RS: Floats
    idle_RS: Floats
    axes: tuple[str, ...]
    exposed_ARS: Floats
    num_samples_RS: Integers

    def of_steps(self, keep_S: npt.NDArray[np.bool_]) -> Breakdown:
        """Only some of the steps."""
        columns = {
            name: getattr(self, name)[..., keep_S]
            for name in ("step_S", "step_RS", "compute_RS", "optimizer_RS", "exposed_RS", "hidden_RS", "data_RS")
        }
        more = {name: getattr(self, name)[..., keep_S] for name in ("idle_RS", "exposed_ARS", "num_samples_RS")}
        return Breakdown(axes=self.axes, **columns, **more)

    @property
    def communication_share(self) -> float:
        """Exposed communication as a share of all ranks' time, from 0 to 1."""
        return _share(self.exposed_RS, self.step_RS)

    @property
    def data_share(self) -> float:
        """Waiting for data as a share of all ranks' time, from 0 to 1."""
        return _share(self.data_RS, self.step_RS)


def break_down(trace: Trace) -> Breakdown:
    """Divides the time of every step.

    Args:
        trace: What the ranks did.

    Returns:
        The division, for the steps that all ranks have.

    Raises:
        ProfileError: If the ranks have no step in common.
    """
    step_S = common_steps(trace)
    axes = tuple(sorted({axis for events in trace.ranks for axis in axes_of(events)}))
    rows = [_of_rank(events, step_S, axes) for events in trace.ranks]
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    exposed_ARS = np.moveaxis(stacked.pop("exposed_AS"), 0, 1)
    columns: dict[str, Any] = {f"{name}_RS": value for name, value in stacked.items()}
    return Breakdown(step_S=step_S, axes=axes, exposed_ARS=exposed_ARS, **columns)


def common_steps(trace: Trace) -> Integers:
    """Numbers of the steps that all ranks have, rising.

    Raises:
        ProfileError: If there is none.
    """
    common = trace.ranks[0].step_S
    for events in trace.ranks[1:]:
        common = np.intersect1d(common, events.step_S)
    if not len(common):
        raise ProfileError(
            "the ranks have no step in common",
            got=", ".join(f"rank {events.rank}: {len(events.step_S)} steps" for events in trace.ranks[:8]),
            fix="Profile all ranks over the same steps",
        )
    return common


def axes_of(events: RankEvents) -> set[str]:
    """The axes on which a rank communicates."""
    return {events.text(index) for index in np.unique(events.axis_E[events.of_kind("communication")])}


def step_bounds(events: RankEvents, step_S: Integers) -> tuple[Floats, Floats]:
    """Start and end of steps of a rank, each of shape (S,)."""
    index_S = np.searchsorted(events.step_S, step_S)
    return events.step_start_S[index_S], events.step_end_S[index_S]


def _of_rank(events: RankEvents, step_S: Integers, axes: tuple[str, ...]) -> dict[str, Floats]:
    start_S, end_S = step_bounds(events, step_S)

    def covered(mask_E: npt.NDArray[np.bool_]) -> Floats:
        return Cover(events.start_E[mask_E], events.end_E[mask_E]).within(start_S, end_S)

    computes = events.of_kind("compute", "optimizer")
    communicates = events.of_kind("communication")
    compute = covered(computes)
    both = covered(computes | communicates)
    busy = covered(events.of_kind("compute", "optimizer", "communication", "data"))
    texts = {text: index for index, text in enumerate(events.names)}
    exposed, seen, before = [], computes, compute
    for axis in axes:
        seen = seen | (communicates & (events.axis_E == texts.get(axis, NONE)))
        after = covered(seen)
        exposed.append(after - before)
        before = after
    index_S = np.searchsorted(events.step_S, step_S)
    return {
        "step": end_S - start_S,
        "compute": compute,
        "optimizer": covered(events.of_kind("optimizer")),
        "exposed": both - compute,
        "hidden": compute + covered(communicates) - both,
        "data": busy - both,
        "idle": (end_S - start_S) - busy,
        "exposed_AS": np.array(exposed).reshape(len(axes), len(step_S)),
        "num_samples": events.num_samples_S[index_S],
    }


def _share(part_RS: Floats, whole_RS: Floats) -> float:
    whole = float(whole_RS.sum())
    return float(part_RS.sum()) / whole if whole else 0.0

"""The recorder: what blocked a rank, and what happened within what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convmesh.profiling.breakdown import break_down
from convmesh.profiling.events import EventBuilder, Trace
from convmesh.profiling.recorder import Recorder, cut_out_collectives


class _Clock:
    """A clock that goes on by a second at every look."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1
        return self.time


def test_sums_are_kept_always_and_events_between_start_and_stop() -> None:
    recorder = Recorder(_Clock())
    with recorder.span("communication", "all-reduce", axis="data"):
        pass
    recorder.start()
    with recorder.span("compute", "forward"), recorder.span("communication", "gather", axis="channel", num_bytes=8):
        pass
    recorder.add_beside("all-reduce", start=3, end=9, axis="data", num_bytes=4, lane="background")
    recorder.count("communication", 0.5, axis="data")
    recorder.add_step(7, start=3, end=10, num_samples=5, memory_bytes=100)

    events = recorder.stop(2)

    assert dict(recorder.take_totals()) == {
        ("communication", "data"): 1.5,
        ("communication", "channel"): 1.0,
        ("compute", ""): 3.0,
    }
    assert dict(recorder.take_totals()) == {}
    assert not recorder.keeps_events
    assert (events.rank, events.step_S.tolist(), events.num_samples_S.tolist()) == (2, [7], [5])
    parts = break_down(Trace(ranks=(events,), source=""))
    assert parts.compute_RS.tolist() == [[2.0]]
    assert parts.hidden_RS.tolist() == [[2.0]]
    assert events.memory_bytes_M.tolist() == [100]


def test_a_span_is_noted_also_when_its_body_fails() -> None:
    recorder = Recorder(_Clock())

    with pytest.raises(ValueError, match="x"), recorder.span("data", "read"):
        raise ValueError("x")

    assert recorder.take_totals()["data", ""] == 1.0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=6), st.lists(st.integers(0, 40), max_size=6))
def test_computing_is_what_collectives_leave_of_it(outer: list[tuple[int, int]], marks: list[int]) -> None:
    builder = EventBuilder(0)
    outer_cells: set[int] = set()
    for start, length in outer:
        builder.add("compute", "layer", start=start, end=start + length, lane="main", layer="conv")
        outer_cells |= set(range(start, start + length))
    for mark in set(marks):
        builder.add("communication", "sum", start=mark, end=mark + 1, lane="main")

    events = cut_out_collectives(builder.build())

    computing = events.of_kind("compute")
    cells = {
        cell
        for start, end in zip(events.start_E[computing].tolist(), events.end_E[computing].tolist(), strict=True)
        for cell in range(int(start), int(end))
    }
    assert cells == outer_cells - set(marks)
    assert (np.diff(events.start_E) >= 0).all()
    assert events.of_kind("communication").sum() == len(set(marks))

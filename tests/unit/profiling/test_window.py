"""A window of steps within a run: kept on each rank, written once, joined with what an engine's profiler tells."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from convmesh.config.schema import ProfileConfig
from convmesh.mesh import Mesh
from convmesh.profiling.analysis import analyse
from convmesh.profiling.breakdown import break_down
from convmesh.profiling.events import EventBuilder, RankEvents, Trace
from convmesh.profiling.merging import merged
from convmesh.profiling.recorder import RECORDER, SKIPPED_UPDATE
from convmesh.profiling.store import load_trace
from convmesh.report.profile_facts import findings
from convmesh.report.profile_text import texts
from convmesh.training.profiling import StepProfiler


class _Engine:
    name = "torch"

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def memory_bytes(self) -> int:
        return 123


def _run(config: ProfileConfig, folder: Path, *, num_updates: int, **parts: Any) -> StepProfiler:
    world = SimpleNamespace(rank=0, num_ranks=1, num_local_ranks=1, mesh=Mesh({"data": 1}), device="cpu")
    profiler = StepProfiler(config, engine=_Engine(), world=world, run_folder=folder, **parts)  # type: ignore[arg-type]
    for update in range(num_updates):
        profiler.before_step(update)
        begun = RECORDER.now()
        profiler.add_reading(0.25)
        with RECORDER.span("compute", "forward"):
            pass
        profiler.after_step(update, begun=begun, num_samples=4)
    return profiler


def test_only_the_steps_of_the_window_are_kept(tmp_path: Path) -> None:
    _run(ProfileConfig(start=3, steps=2), tmp_path, num_updates=8)

    trace = load_trace(tmp_path / "profile")
    (events,) = trace.ranks
    assert trace.figures["reading_cpu_seconds"] == pytest.approx(0.25)
    assert trace.figures["cpu_seconds"] > 0
    assert (trace.figures["local_ranks"], trace.figures["host_times"]) == (1, 0)
    assert events.step_S.tolist() == [3, 4]
    assert events.num_events == 2
    assert events.num_samples_S.tolist() == [4, 4]
    assert events.memory_bytes_M.tolist() == [123, 123]
    assert not RECORDER.keeps_events


@pytest.mark.parametrize("language", ["en", "zh"])
def test_updates_that_overflowed_are_told(tmp_path: Path, language: str) -> None:
    words = texts(language)
    for num_skipped in (0, 2):
        RECORDER.start()
        for update in range(4):
            begun = RECORDER.now()
            with RECORDER.span("compute", "forward"):
                pass
            if update < num_skipped:
                RECORDER.note("optimizer", SKIPPED_UPDATE)
            RECORDER.add_step(update, start=begun, end=RECORDER.now(), num_samples=1)
        found = analyse(Trace(source="test", mesh={"data": 1}, ranks=(RECORDER.stop(0),)))
        assert found.num_skipped_updates == found.summary()["num_skipped_updates"] == num_skipped
        told = words["skipped"].format(number=num_skipped) in findings(found, words)
        assert told == (num_skipped > 0)


def test_what_handing_over_takes_is_measured_once_after_the_window(tmp_path: Path) -> None:
    measured = []

    def hand_over() -> float:
        measured.append(RECORDER.keeps_events)
        return 0.125

    _run(ProfileConfig(start=1, steps=2), tmp_path, num_updates=5, hand_over=hand_over)

    assert measured == [False]
    assert load_trace(tmp_path / "profile").figures["hand_over_seconds"] == 0.125


def test_a_run_that_ends_within_the_window_keeps_what_there_was(tmp_path: Path) -> None:
    profiler = _run(ProfileConfig(start=1, steps=50), tmp_path, num_updates=4)
    assert not (tmp_path / "profile" / "profile.json").exists()

    profiler.close()

    assert load_trace(tmp_path / "profile").ranks[0].step_S.tolist() == [1, 2, 3]


def test_a_run_that_ends_before_the_window_writes_nothing(tmp_path: Path) -> None:
    _run(ProfileConfig(start=100, steps=5), tmp_path, num_updates=3).close()

    assert not (tmp_path / "profile").exists()


def _events(*, lane: str, kind: str, name: str, axis: str = "") -> RankEvents:
    builder = EventBuilder(0)
    builder.add(kind, name, start=1, end=2, lane=lane, axis=axis)  # type: ignore[arg-type]
    builder.add("data", "batch", start=0, end=1, lane=lane)
    builder.add("communication", "sum", start=2, end=3, lane=lane, axis=axis)
    builder.add_step(0, start=0, end=4)
    return builder.build()


@pytest.mark.parametrize(("lane", "axis"), [("host 1", "data"), ("stream 7", "")])
def test_operators_of_the_engine_join_the_collectives_that_know_their_axis(lane: str, axis: str) -> None:
    noted = _events(lane="main", kind="compute", name="forward", axis="data")
    told = _events(lane=lane, kind="compute", name="conv", axis="")

    events = merged(noted, told)

    parts = break_down(Trace(ranks=(events,), source=""))
    names = {events.text(index) for index in events.name_E}
    assert names == {"batch", "conv", "sum"}
    assert parts.axes == (axis,)
    assert (parts.data_RS[0, 0], parts.compute_RS[0, 0], parts.exposed_RS[0, 0]) == (1, 1, 1)
    assert (np.diff(events.start_E) >= 0).all()

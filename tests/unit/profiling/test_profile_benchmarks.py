"""The benchmarks of profiling measure what they say, and say what they measured."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import profile_overhead, profile_scale
from benchmarks.contenders import recorder_modes
from benchmarks.contenders.generated_profile import generate

from convmesh.profiling.recorder import RECORDER
from convmesh.profiling.store import save_trace


def test_a_generated_profile_is_read_analysed_and_reported(tmp_path: Path) -> None:
    sizes = {"num_ranks": 80, "num_steps": 6, "num_layers": 3}
    save_trace(generate(profile_scale.recipe(**sizes)), tmp_path)

    found = profile_scale.measure(tmp_path)
    text = profile_scale.page(found, **sizes, folder_bytes=1_000_000)

    assert found["named"] == [[profile_scale.SLOW_RANK, "compute"]]
    assert found["num_events"] == 80 * 6 * (2 + 3 * 3)
    assert (tmp_path / "profile.html").stat().st_size == found["page_bytes"]
    assert f"named: rank {profile_scale.SLOW_RANK} for compute" in text


def test_what_a_mode_adds_is_told_of_each_turn() -> None:
    seconds = {"off": [0.010, 0.020, 0.010], "on": [0.0102, 0.0204, 0.0102], "events": [0.011, 0.022, 0.011]}
    seconds |= {"off cpu": [0.010] * 3, "on cpu": [0.0101] * 3, "events cpu": [0.0104, 0.0105, 0.0106]}
    found = profile_overhead.Measured(seconds=seconds, num_notes=9, note_seconds={"on": 1e-6, "events": 2e-6})

    row = profile_overhead.row("torch", profile_overhead.CASES[0], found)

    assert row.startswith("| torch | cnn-small, 32 px, 8 images | 9 | 10.00 | 0.090 % |")
    assert "| 0.090 % | +2.0 % (+2.0 to +2.0) | +1.0 % (+1.0 to +1.0) | 0.180 % | +10.0 % (+10.0 to +10.0) |" in row
    assert row.endswith("| +5.0 % (+4.0 to +6.0) |")
    assert row in profile_overhead.page([row])


def test_modes_differ_in_what_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[dict[Any, float]] = []

    def update() -> None:
        with RECORDER.span("compute", "forward"):
            time.sleep(0.001)
        noted.append(dict(RECORDER.take_totals()))

    engine: Any = SimpleNamespace(name="torch", all_gather=lambda _: [None], memory_bytes=lambda: 5)
    contender = SimpleNamespace(_steps={"net": update})
    monkeypatch.setattr(recorder_modes, "_contender", lambda _: contender)
    world: Any = SimpleNamespace(rank=0)

    found = recorder_modes.run(engine, world, name="net", num_turns=3, num_updates=2)

    names = ("off", "on", "events", "off cpu", "on cpu", "events cpu", "notes")
    assert {mode: len(seconds) for mode, seconds in found.items()} == dict.fromkeys(names, 3)
    assert found["notes"] == [2, 2, 2]
    assert min(min(found[mode]) for mode in recorder_modes.MODES) > 0.001
    assert sum(not totals for totals in noted) == 6
    assert min(recorder_modes.note_seconds(engine, world).values()) > 0
    assert not RECORDER.keeps_events

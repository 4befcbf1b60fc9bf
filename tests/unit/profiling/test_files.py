"""Profiles on disk: written, read back, and refused when damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.contenders.generated_profile import Recipe, generate

from convmesh.errors import ProfileError
from convmesh.profiling.events import COLUMNS, EventBuilder, Trace
from convmesh.profiling.perfetto import write_chrome_trace
from convmesh.profiling.store import load_trace, save_trace


def test_a_profile_survives_the_disk(tmp_path: Path) -> None:
    trace = generate(Recipe(mesh={"data": 2, "channel": 2}, num_samples={0: 3}))

    save_trace(trace, tmp_path / "profile")
    again = load_trace(tmp_path / "profile")

    assert (again.source, again.engine, dict(again.mesh)) == (trace.source, trace.engine, dict(trace.mesh))
    for before, after in zip(trace.ranks, again.ranks, strict=True):
        assert after.names == before.names
        assert all(np.array_equal(getattr(before, name), getattr(after, name)) for name in COLUMNS)
    assert not [path for path in (tmp_path / "profile").iterdir() if path.name.startswith(".")]


def test_damage_is_told_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="holds no profile"):
        load_trace(tmp_path)
    save_trace(generate(Recipe()), tmp_path)
    events = tmp_path / "rank_00001.npz"
    whole = events.read_bytes()

    events.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ProfileError, match=r"rank_00001\.npz' is damaged"):
        load_trace(tmp_path)
    events.unlink()
    with pytest.raises(ProfileError, match="events of rank 1 are missing"):
        load_trace(tmp_path)
    index = tmp_path / "profile.json"
    index.write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(ProfileError, match="another version"):
        load_trace(tmp_path)
    index.write_text('{"schema_version": 1, "ranks": 3}')
    with pytest.raises(ProfileError, match="is damaged"):
        load_trace(tmp_path)
    index.write_text("{")
    with pytest.raises(ProfileError, match="can't be read"):
        load_trace(tmp_path)


def test_a_profile_can_not_run_code(tmp_path: Path) -> None:
    save_trace(generate(Recipe()), tmp_path)
    np.savez(tmp_path / "rank_00000.npz", names=np.array([{"a": 1}], dtype=object))

    with pytest.raises(ProfileError, match="is damaged"):
        load_trace(tmp_path)


def test_perfetto_gets_a_process_per_rank_and_a_row_per_lane(tmp_path: Path) -> None:
    builder = EventBuilder(1)
    builder.add("compute", "kernel", start=1000.5, end=1000.75, layer="layer1.conv1", lane="stream 7")
    builder.add("communication", "all-reduce", start=1000.6, end=1001, axis="data", lane="stream 20", num_bytes=8)
    builder.add_step(4, start=1000.5, end=1001.5)
    builder.add_memory(1000.5, 123)

    write_chrome_trace(Trace(ranks=(builder.build(),), source=""), tmp_path / "trace.json")

    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {entry["name"]: entry for entry in entries if entry["ph"] == "X"}
    rows = {entry["args"]["name"]: entry["tid"] for entry in entries if entry["name"] == "thread_name"}
    assert {entry["pid"] for entry in entries} == {1}
    assert set(rows) == {"steps", "stream 7", "stream 20"}
    assert named["kernel"] | {"tid": 0} == {
        "ph": "X", "name": "kernel", "cat": "compute", "pid": 1, "tid": 0, "ts": 0.0, "dur": 250000.0,
        "args": {"layer": "layer1.conv1"},
    }  # fmt: skip
    assert named["kernel"]["tid"] == rows["stream 7"]
    assert named["all-reduce"]["args"] == {"axis": "data", "bytes": 8}
    assert named["step 4"]["dur"] == 1e6
    assert [entry["args"]["bytes"] for entry in entries if entry["ph"] == "C"] == [123]


def test_two_profiles_of_one_rank_and_none_at_all_are_refused() -> None:
    events = EventBuilder(0).build()

    with pytest.raises(ProfileError, match="same rank"):
        Trace(ranks=(events, events), source="")
    with pytest.raises(ProfileError, match="without ranks"):
        Trace(ranks=(), source="")

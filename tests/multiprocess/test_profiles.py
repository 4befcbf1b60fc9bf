"""Profiles of real runs: parts add up, and faults planted on purpose are named for what they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from convmesh.data.fetch import fetch_digits
from convmesh.engines import is_installed
from convmesh.profiling.analysis import Analysis, analyse
from convmesh.profiling.breakdown import break_down
from convmesh.profiling.store import load_trace
from tests.multiprocess.faulty import PHASE, SECONDS, START

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

CONFIG = """
engine: {engine}
model: {{factory: "tests.multiprocess.faulty:network", args: {{engine: {engine}}}}}
data: {{source: digits, num_train: 400}}
train: {{global_batch: 16}}
"""
ENGINES = [
    pytest.param("torch", marks=pytest.mark.torch),
    pytest.param("mindspore", marks=pytest.mark.mindspore),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_slow_rank_a_slow_loader_a_slow_link_and_costly_samples_are_told_apart(engine: str, tmp_path: Path) -> None:
    if not is_installed(engine):
        pytest.skip(f"{engine} is not installed")
    fetch_digits(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG.format(engine=engine))

    said = _convmesh(
        "profile", tmp_path / "run.yaml", "--ranks", 2, "--warmup", START, "--steps", 4 * PHASE,
        "--run-dir", tmp_path / "run", "--json", data=tmp_path,
    )  # fmt: skip

    trace = load_trace(tmp_path / "run" / "profile")
    whole = break_down(trace)
    parts = whole.compute_RS + whole.exposed_RS + whole.data_RS + whole.idle_RS
    assert np.allclose(parts, whole.step_RS, rtol=0.02)
    assert (whole.idle_RS.sum() / whole.step_RS.sum()) < 0.25
    assert json.loads(said)["num_steps"] == 4 * PHASE
    assert (tmp_path / "run" / "profile" / "profile.html").exists()
    assert "One step on all ranks" in (tmp_path / "run" / "report.html").read_text("utf-8")

    computing, loading, link, samples = (_of_phase(tmp_path, phase) for phase in range(4))
    assert _named(computing) == ((1,), "compute")
    if engine == "torch":
        assert {"conv1", "conv2", "fc"} <= {row.name for row in computing.layers if row.kind == "compute"}
    assert computing.stragglers[0].excess_seconds == pytest.approx(SECONDS, rel=0.3)
    assert _named(loading) == ((1,), "data")
    assert not link.stragglers
    slow, usual = (_gradient_transfer(analysis) for analysis in (link, computing))
    assert slow > usual + 0.7 * SECONDS
    assert _named(samples) == ((1,), "data")
    assert "its samples cost more" in samples.stragglers[0].cause
    assert "its samples cost more" not in computing.stragglers[0].cause + loading.stragglers[0].cause


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engines_own_profiler_tells_operators_on_the_same_clock(engine: str, tmp_path: Path) -> None:
    if not is_installed(engine):
        pytest.skip(f"{engine} is not installed")
    fetch_digits(tmp_path)
    config = f"engine: {engine}\nmodel: {{name: cnn-small}}\ndata: {{source: digits, num_train: 200}}\n"
    (tmp_path / "run.yaml").write_text(config + "train: {global_batch: 16}\n")

    _convmesh(
        "profile", tmp_path / "run.yaml", "--ranks", 2, "--warmup", 3, "--steps", 4, "--detail",
        "--run-dir", tmp_path / "run", data=tmp_path,
    )  # fmt: skip

    analysis = analyse(load_trace(tmp_path / "run" / "profile"), one_clock=True)
    names = {row.name for row in analysis.layers if row.kind == "compute"}
    assert {"torch": "aten::conv2d", "mindspore": "conv1"}[engine] in names
    assert analysis.breakdown.axes == ("data",)
    # Operators lie within the steps that the recorder noted: otherwise the clocks would not be one.
    assert analysis.breakdown.compute_RS.min() > 0
    assert "all-reduce gradients" in {row.name for row in analysis.collectives}


def _of_phase(folder: Path, phase: int) -> Analysis:
    """What a profile says of the end of a phase: a loader that reads ahead is slow only once that is used up."""
    trace = load_trace(folder / "run" / "profile")
    end = START + (phase + 1) * PHASE
    ranks = []
    for events in trace.ranks:
        keep_S = (events.step_S >= end - 5) & (events.step_S < end)
        steps = ("step_S", "step_start_S", "step_end_S", "num_samples_S")
        ranks.append(events.replaced(**{name: getattr(events, name)[keep_S] for name in steps}))
    return analyse(type(trace)(ranks=tuple(ranks), source="", mesh=trace.mesh), one_clock=True)


def _named(analysis: Analysis) -> tuple[tuple[int, ...], str]:
    first = analysis.stragglers[0]
    return first.ranks, first.phase


def _gradient_transfer(analysis: Analysis) -> float:
    return next(row.transfer_seconds for row in analysis.collectives if "gradients" in row.name)


def _convmesh(*arguments: object, data: Path) -> str:
    command = [sys.executable, "-m", "convmesh.cli.main", *map(str, arguments)]
    environment = {**os.environ, "CONVMESH_DATA": str(data)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

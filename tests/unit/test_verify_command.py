"""What ``convmesh verify`` says and with which code it ends."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from convmesh import api
from convmesh.cli.main import app
from convmesh.training.compare import Worst
from convmesh.training.verification import CollectiveCheck, Conditions, Memory, Verification

OK = Worst("gradient", "conv1.weight", 1e-6, 1e-4, 2e-7, num_tensors=62)
UNPROVED = Worst("gradient", "conv1.weight", 5e-3, 1e-3, 1e-3, num_tensors=62, num_inconclusive=4)
WRONG = Worst("gradient", "conv1.weight", 5e-3, 1e-4, 2e-7, num_tensors=62)
TOLD = CollectiveCheck("channel", "all-gather", 3, 2048, 3, 2048)
MORE = CollectiveCheck("channel", "all-gather", 4, 2560, 3, 2048)


def outcome(
    *worst: Worst, check: CollectiveCheck = TOLD, engine: str = "torch", kept: int | None = 512
) -> Verification:
    memory = Memory((2**20, 2**21), 2**22, (kept, kept), None if kept is None else 2 * kept)
    return Verification(worst, (check,), memory, engine=engine, conditions=Conditions(0.01, 3.0))


def call(monkeypatch: pytest.MonkeyPatch, found: Verification, *options: str) -> tuple[int, str]:
    monkeypatch.setattr(api, "verify", lambda *_args, **_options: found)
    result = CliRunner().invoke(app, ["verify", str(Path("run.yaml")), *options])
    return result.exit_code, result.output


def test_equal_runs_are_told_with_their_limit_and_how_it_came_about(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = call(monkeypatch, outcome(OK))
    assert code == 0
    assert "learning rate 0.01 and norms that shift by 3" in output
    assert "gradient    1.00e-06  allowed  1.0e-04  rounding  2.0e-07  ok  (62 compared; worst: conv1.weight)" in output
    assert "kept for the backward 512 B of 1.0 KiB" in output
    assert "The parallel run equals one device." in output


@pytest.mark.parametrize(
    ("engine", "dtype", "way_out"),
    [
        ("torch", "float32", "use --dtype float64"),
        ("mindspore", "float32", "use smaller images or fewer layers, or verify the same network with --engine torch"),
        ("torch", "float64", "use fewer --steps"),
    ],
)
def test_what_proves_nothing_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, engine: str, dtype: str, way_out: str
) -> None:
    found = dataclasses.replace(outcome(OK, UNPROVED, engine=engine), dtype=dtype)
    code, output = call(monkeypatch, found)
    assert code == 1
    assert "INCONCLUSIVE  (62 compared, 4 inconclusive; worst" in output
    assert "INCONCLUSIVE: rounding alone changes that much" in output
    assert way_out in output


@pytest.mark.parametrize("found", [outcome(OK, WRONG), outcome(UNPROVED, WRONG), outcome(UNPROVED, check=MORE)])
def test_what_differs_fails_whatever_else_is_inconclusive(monkeypatch: pytest.MonkeyPatch, found: Verification) -> None:
    code, output = call(monkeypatch, found)
    assert code == 1
    assert "DIFFERS from one device" in output
    code, output = call(monkeypatch, found, "--json")
    told = json.loads(output)
    assert (code, told["passed"], told["inconclusive"]) == (1, False, False)
    assert told["worst"][-1]["verdict"] in ("too large", "inconclusive")


def test_memory_that_an_engine_does_not_tell_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    _, output = call(monkeypatch, outcome(OK, engine="mindspore", kept=None))
    assert "kept for the backward: not told by this engine" in output
    assert "float64" not in output

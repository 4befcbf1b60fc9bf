"""Dry runs and checks find what is wrong with a network that no axis splits, before any rank is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from convmesh.cli.main import app
from convmesh.data.prepared import write_prepared

RUN = """
engine: {engine}
model: {model}
data: {{source: digits}}
train: {{global_batch: 16, device: cpu}}
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``told(engine, model, command...)``: what a command that must fail says of a network."""
    monkeypatch.setenv("CONVMESH_DATA", str(tmp_path / "data"))
    arrays = {}
    for part, number in (("train", 200), ("test", 40)):
        arrays[f"{part}_images"] = np.zeros((number, 8, 8, 1), np.uint8)
        arrays[f"{part}_labels"] = (np.arange(number) % 10).astype(np.int32)
    (tmp_path / "data").mkdir()
    write_prepared(tmp_path / "data" / "digits", arrays, class_names=[str(digit) for digit in range(10)], origin="test")

    def call(engine: str, model: str, command: str, *options: str) -> str:
        pytest.importorskip(engine)
        path = tmp_path / "run.yaml"
        path.write_text(RUN.format(engine=engine, model=model))
        result = CliRunner().invoke(app, [command, str(path), "--ranks", "2", *options])
        assert result.exit_code != 0
        assert result.exception is not None
        return result.output + str(result.exception)

    return call


@pytest.mark.parametrize("engine", ["mindspore", "torch"])
def test_the_number_of_classes_is_looked_at(told: Callable[..., str], engine: str) -> None:
    model = "{name: cnn-small, args: {num_classes: 7}}"
    for command in (("train", "--dry-run"), ("check",)):
        said = told(engine, model, *command)
        assert "output does not fit the classes of the data (got 7 outputs, expected 10 scores per sample)" in said


@pytest.mark.parametrize("engine", ["mindspore", "torch"])
def test_a_factory_that_fails_is_told(told: Callable[..., str], engine: str) -> None:
    said = told(engine, "{factory: 'collections:OrderedDict'}", "check", "--set", "train.global_batch=15")
    assert "'collections:OrderedDict' did not return a network" in said
    assert "14 or 16" in said
    assert "can't be imported" in told(engine, "{factory: 'no_such_module:build'}", "train", "--dry-run")

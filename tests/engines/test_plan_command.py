"""``convmesh plan`` and what it shows, on the smallest network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from convmesh.cli.main import app
from convmesh.config import load_config
from convmesh.errors import ConfigError, ModelError
from convmesh.mesh import Mesh
from convmesh.plan.load import load_plan
from convmesh.training.auto_plan import is_for, machine_preset

pytestmark = pytest.mark.torch

RUN: dict[str, Any] = {
    "engine": "torch",
    "model": {"name": "cnn-small"},
    "data": {"source": "cifar10"},
    "train": {"global_batch": 32},
}
NO_DATA = ["--image-shape", "32x32x3", "--classes", "10"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVMESH_DATA", str(tmp_path_factory.getbasetemp() / "graphs of plans"))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return path


def planned(config: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["plan", str(config), *NO_DATA, *options], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_it_shows_candidates_bars_and_the_costliest_layers(config: Path, tmp_path: Path) -> None:
    output = planned(
        config, "--ranks", "4", "--cluster", "a100-8", "--explain", "conv2", "-o", str(tmp_path / "p.yaml")
    )
    for words in (
        "data=4", "data=2,channel=2", "channel=4", "the fastest that fits", "Time of an update", "backward",
        "Memory of a rank", "activations", "The layers that cost most", "Where the figures come from",
        "FLOPs forward", "The ways of this operator",
    ):  # fmt: skip
        assert words in output
    plan = load_plan(tmp_path / "p.yaml")
    assert plan.foretold is not None
    assert plan.network is not None
    assert plan.execution.accumulation is not None
    assert sum(plan.foretold.seconds_by_kind.values()) == pytest.approx(plan.foretold.seconds, rel=1e-5)
    assert sum(plan.foretold.memory_by_kind.values()) == plan.foretold.memory_bytes
    assert any("the fastest that fits" in reason for reason in plan.foretold.reasons)


def test_json_tells_every_candidate(config: Path) -> None:
    found = json.loads(planned(config, "--ranks", "2", "--cluster", "cpu-gloo", "--json"))
    assert found["fits"]
    assert {entry["verdict"] for entry in found["candidates"]} >= {"chosen"}
    plain = next(entry for entry in found["candidates"] if entry["mesh"] == {"data": 2, "channel": 1})
    assert found["candidates"][0]["seconds"] <= plain["seconds"]
    assert all(entry["reason"] for entry in found["candidates"])


def test_what_is_kept_stays_as_the_run_file_says(config: Path) -> None:
    output = planned(
        config,
        "--ranks",
        "2",
        "--set",
        "strategy.mesh={channel: 2}",
        "--keep",
        "mesh",
        "--keep",
        "accumulation",
        "--json",
    )
    entries = json.loads(output)["candidates"]
    assert {tuple(entry["mesh"].items()) for entry in entries} == {(("channel", 2),)}
    assert {entry["accumulation"] for entry in entries} == {1}


def test_a_plan_is_for_as_many_ranks_as_it_has(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert not is_for(path, ranks=None, mesh=None)
    planned(config, "--ranks", "2", "--set", "strategy.mesh={channel: 2}", "--keep", "mesh", "-o", str(path))
    for ranks, mesh, expected in (
        (None, None, True), (2, None, True), (4, None, False), (1, None, False),
        (2, "channel=2", True), (None, "data=1,channel=2", True), (2, "data=2", False), (4, Mesh({"data": 4}), False),
    ):  # fmt: skip
        assert is_for(path, ranks=ranks, mesh=mesh) is expected


def test_where_nothing_fits_it_tells_what_would(config: Path) -> None:
    with pytest.raises(ConfigError, match="no plan for 2 ranks fits") as caught:
        planned(config, "--ranks", "2", "--cluster", "cpu-gloo", "--memory", "200MiB")
    assert "more than a rank may fill" in str(caught.value)
    assert "would fit" in str(caught.value)


def test_an_operator_that_is_not_there_is_told(config: Path) -> None:
    with pytest.raises(ModelError, match="no operator 'conv9'"):
        planned(config, "--ranks", "2", "--explain", "conv9")


@pytest.mark.parametrize(
    ("engine", "files", "expected"),
    [
        ("torch", {}, "cpu-gloo"),
        ("mindspore", {}, "cpu-mccl"),
        ("mindspore", {"dev/davinci0": ""}, "ascend910b-8"),
        ("torch", {"dev/nvidia0": ""}, "a100-8"),
        ("torch", {"dev/nvidia0": "", "proc/driver/nvidia/gpus/0/information": "Model: NVIDIA H200"}, "h200-8"),
    ],
)
def test_a_machine_has_the_preset_of_its_kind(
    engine: str, files: dict[str, str], expected: str, config: Path, tmp_path: Path
) -> None:
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert machine_preset(load_config(config, overrides=(f"engine={engine}",)), root=tmp_path / "root") == expected

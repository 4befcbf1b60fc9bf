"""A plan that MindSpore's cells can't follow is replaced by the next best one, and people are told."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mindspore")

import yaml
from mindspore import Parameter, Tensor, nn, ops
from typer.testing import CliRunner

from convmesh.cli.main import app
from convmesh.errors import ConfigError
from convmesh.plan.load import load_plan

pytestmark = pytest.mark.mindspore

OPTIONS = ["--image-shape", "32x32x3", "--classes", "10", "--ranks", "2"]


class Scaled(nn.Cell):
    """A dense layer with a parameter beside its weight, so that its cell can't be replaced."""

    def __init__(self, width: int, *, surplus: bool) -> None:
        super().__init__()
        self.weight = Parameter(ops.zeros((width, width)), name="weight")
        if surplus:
            self.unused = Parameter(ops.zeros((1,)), name="unused", requires_grad=False)
        self.multiply = ops.MatMul(transpose_b=True)

    def construct(self, x_NC: Tensor) -> Tensor:
        return self.multiply(x_NC, self.weight)


class Wide(nn.Cell):
    """Weights so large, for what they compute, that channels are worth splitting."""

    def __init__(self, width: int, *, surplus: bool) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.first = nn.Dense(3, width)
        self.middle = Scaled(width, surplus=surplus)
        self.last = nn.Dense(width, 10)

    def construct(self, x_NCHW: Tensor) -> Tensor:
        return self.last(self.middle(self.first(self.flatten(self.pool(x_NCHW)))))


def wide(surplus: bool) -> nn.Cell:
    return Wide(2048, surplus=surplus)


def config_of(folder: Path, *, surplus: bool) -> Path:
    path = folder / "run.yaml"
    model = {"factory": f"{__name__}:wide", "args": {"surplus": surplus}}
    data = {"source": "cifar10", "path": str(folder)}
    path.write_text(yaml.safe_dump({"engine": "mindspore", "model": model, "data": data, "train": {"global_batch": 8}}))
    return path


def planned(config: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["plan", str(config), *OPTIONS, *options], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_next_best_plan_is_taken_where_the_engine_refuses_the_best(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    planned(config_of(tmp_path, surplus=False), "-o", str(path))
    assert load_plan(path).mesh.size("channel") == 2, "else nothing would be refused"
    output = planned(config_of(tmp_path, surplus=True), "-o", str(path))
    assert "the fastest that fits and can be run" in output
    plan = load_plan(path)
    assert plan.mesh.size("channel") == 1
    assert plan.foretold is not None
    told = "can't be run: on mindspore middle can't be replaced: its cell holds more than the operator needs"
    assert any(reason.endswith(told) for reason in plan.foretold.reasons)


def test_where_the_engine_refuses_all_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be run: on mindspore middle can't be replaced"):
        planned(config_of(tmp_path, surplus=True), "--set", "strategy.mesh={channel: 2}", "--keep", "mesh")

"""``convmesh graph``: the table, the JSON, and runs whose data is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import typer
from typer.testing import CliRunner

from convmesh.cli.graph import graph, parse_image_shape
from convmesh.errors import ConfigError, DataError
from convmesh.graph import Graph

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).parents[2] / "examples"
NO_DATA = ["--image-shape", "64x64x3", "--classes", "1000", "--engine", "torch"]


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(graph)
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table_has_rows_and_totals() -> None:
    shown = run(str(EXAMPLES / "resnet50_imagenet.yaml"), *NO_DATA)
    assert "layer1.0.conv1" in shown
    assert "25,557,032 parameters" in shown
    assert "335.69 M multiply-adds" in shown


def test_depth_sums_up_modules() -> None:
    shown = run(str(EXAMPLES / "resnet50_imagenet.yaml"), *NO_DATA, "--depth", "1")
    assert "layer1.0.conv1" not in shown
    assert "32 operators" in shown
    assert "25,557,032" in shown


def test_json_reads_back_to_a_graph() -> None:
    shown = run(str(EXAMPLES / "resnet18_cifar10.yaml"), *NO_DATA, "--batch", "4", "--json")
    found = Graph.from_json(shown)
    assert found.node("input").shape == (4, 3, 64, 64)
    assert json.loads(shown)["totals"]["num_parameters"] == found.num_parameters


def test_settings_can_be_changed() -> None:
    shown = run(
        str(EXAMPLES / "resnet18_cifar10.yaml"),
        *NO_DATA,
        "--set",
        "model.name=cnn-small",
        "--set",
        "model.args={}",
        "--json",
    )
    assert "conv3" in {node.name for node in Graph.from_json(shown)}


def test_missing_data_names_the_options_that_need_none(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"engine: torch\nmodel: {{name: cnn-small}}\ndata: {{source: digits, path: {tmp_path}/none}}\n")
    with pytest.raises(DataError, match="--image-shape HxWxC and --classes K"):
        run(str(config))


@pytest.mark.parametrize("text", ["224", "224x224", "0x8x3", "8x8x3x1", "axbxc"])
def test_image_shapes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="HxWxC"):
        parse_image_shape(text)


def test_image_shapes() -> None:
    assert parse_image_shape("32x48x3") == (32, 48, 3)
    assert parse_image_shape(None) is None

"""``convmesh check`` and ``convmesh verify`` as people call them, and split networks in their own loops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

from convmesh.cli.main import app
from convmesh.data.fetch import fetch_digits
from convmesh.plan.load import load_plan
from tests.multiprocess.ranks import RankPool

pytestmark = [pytest.mark.torch, pytest.mark.multiprocess]

RUN = """
engine: torch
model: {name: cnn-small, args: {batch_norm: true}}
data: {source: digits}
train: {global_batch: 16, device: cpu}
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONVMESH_DATA", str(tmp_path / "data"))
    fetch_digits(tmp_path / "data")
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 2, str(result.exception)
    return result.exit_code, result.output


def test_check_shows_and_writes_the_plan(run_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    larger = ["--set", "train.global_batch=64"]
    code, output = call("check", run_file, "--mesh", "data=2,channel=2", "--write-plan", path, *larger)
    assert code == 0, output
    assert "nothing is wrong on data=2,channel=2 with torch on cpu" in output
    assert "conv1  out_channels" in output
    assert "reduce-scatter" in output
    assert load_plan(path).network is not None
    code, output = call("check", run_file, "--plan", path, "--json")
    told = json.loads(output)
    assert (code, told["ok"], told["mesh"]) == (0, True, {"data": 2, "channel": 2})
    assert {entry["kind"] for entry in told["collectives"]} == {"all-gather", "all-reduce", "reduce-scatter"}


def test_check_says_if_nothing_is_split(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "standardised.py").write_text(
        "from torch import nn\n"
        "from torch.nn import functional\n"
        "class Standardised(nn.Conv2d):\n"
        "    def forward(self, x):\n"
        "        return functional.conv2d(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True))\n"
        "def build(num_classes=10):\n"
        "    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)\n"
        "    return nn.Sequential(Standardised(1, 8, 3), nn.ReLU(), *pooled)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run_file.write_text(RUN.replace("name: cnn-small, args: {batch_norm: true}", "factory: 'standardised:build'"))

    code, output = call("check", run_file, "--mesh", "channel=2")

    assert code == 0, output
    assert "Nothing is split over the channel axis: each of 2 ranks computes all of it." in output
    assert "0.conv2d (aten.conv2d.default)" in output


def test_check_tells_everything_that_is_wrong(run_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "schema_version: 1\nmesh: {data: 2, channel: 2}\n"
        "operators: {conv1: {channel: in_channels}, conv7: {channel: whole}, bn1: {channel: out_channels}}\n"
    )
    arguments = ["check", run_file, "--plan", path, "--set", "train.global_batch=15"]
    code, output = call(*arguments)
    assert code == 1
    for text in (
        "train.global_batch is not divisible",
        "conv1 has too few channels to be split by 'in_channels' (got 1 for 2 ranks",
        "'conv7'",
        "bn1 can't be split by 'out_channels'",
        "4 things need mending",
    ):
        assert text in output
    code, output = call(*arguments, "--json")
    assert (code, len(json.loads(output)["mistakes"])) == (1, 4)


def test_regrouped_channels_are_one_of_the_ways_out(run_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("schema_version: 1\nmesh: {channel: 4}\noperators: {conv1: {channel: in_channels}}\n")
    code, output = call("check", run_file, "--plan", path)
    assert code == 1
    assert "(got 1 for 4 ranks, expected at least 4). Add zero channels in the run file with" in output
    assert "'data: {channels: {pad_to: 4}}', or split it with 'conv1: {channel: out_channels}', or keep it" in output
    code, output = call("check", run_file, "--plan", path, "--set", "data.channels.pad_to=4")
    assert code == 0, output
    assert "conv1  in_channels   slice before it, reduce_scatter after it" in output
    code, output = call("check", run_file, "--mesh", "data=2", "--set", "data.channels.space_to_depth=2")
    assert code == 1
    assert "blocks do not fit the stride of conv1" in output
    code, output = call("graph", run_file, "--json", "--set", "data.channels.pad_to=4")
    nodes = {node["name"]: node for node in json.loads(output)["nodes"]}
    assert nodes["input"]["output_shapes"] == [[1, 4, 8, 8]]
    assert nodes["conv1"]["attributes"]["in_channels"] == 4


def test_check_tells_when_a_plan_is_for_another_network(run_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    call("check", run_file, "--mesh", "channel=2", "--write-plan", path)
    code, output = call("check", run_file, "--plan", path, "--set", "model.args.batch_norm=false")
    assert code == 1
    assert "the plan was made for another network (got it lacks bn1, bn2, bn3" in output
    code, output = call("check", run_file, "--plan", path, "--mesh", "channel=4")
    assert code == 1
    assert "(got channel=4, expected channel=2)" in output
    code, output = call("check", run_file, "--mesh", "data=2", "--write-plan", path)
    assert code == 2
    assert "there is no plan to write" in output


@pytest.mark.timeout(300)
def test_verify_compares_every_tensor(run_file: Path) -> None:
    options = ["--set", "strategy.accumulation=2", "--set", "strategy.optimizer_sharding=true"]
    code, output = call(
        "verify", run_file, "--mesh", "data=2,channel=2", "--dtype", "float64", "--steps", "2", "--json", *options
    )
    told = json.loads(output)
    assert (code, told["passed"]) == (0, True)
    worst = {entry["kind"]: entry for entry in told["worst"]}
    assert worst.keys() == {"loss", "output", "gradient", "parameter", "change", "buffer"}
    assert worst["gradient"]["num_tensors"] == worst["parameter"]["num_tensors"] == 11
    assert worst["output"]["num_tensors"] == 2 * 4 * 2
    assert all(entry["difference"] < 1e-9 for entry in worst.values())
    assert {(entry["axis"], entry["kind"]) for entry in told["collectives"]} == {
        ("channel", "all-gather"), ("channel", "all-reduce"), ("channel", "reduce-scatter"),
        ("data", "all-reduce"), ("data", "broadcast"),
    }  # fmt: skip
    assert len(told["memory"]["peak_bytes"]) == 4
    assert told["conditions"]["norm_shift"] is None  # In float64 the run is exercised as it is.


@pytest.mark.timeout(300)
def test_verify_compares_a_network_that_exchanges_samples_for_channels(run_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "schema_version: 1\nmesh: {data: 2}\noperators: {conv3: {data: out_channels}, fc: {data: in_channels}}\n"
    )
    options = ["--set", "strategy.accumulation=2", "--set", "strategy.optimizer_sharding=true"]
    code, output = call("check", run_file, "--plan", path, *options)
    assert code == 0, output
    assert "Per micro-batch over the data axis" in output
    code, output = call("verify", run_file, "--plan", path, "--dtype", "float64", "--steps", "2", "--json", *options)
    told = json.loads(output)
    assert (code, told["passed"]) == (0, True), output
    assert all(entry["difference"] < 1e-9 for entry in told["worst"])
    assert {(entry["axis"], entry["kind"]) for entry in told["collectives"]} == {
        ("data", "all-gather"), ("data", "all-reduce"), ("data", "all-to-all"), ("data", "broadcast"),
        ("data", "reduce-scatter"),
    }  # fmt: skip
    # A run of such a plan evaluates ragged shards, and goes on without it.
    folder = tmp_path / "run"
    short = ["--set", "data.num_train=61", "--set", "data.num_eval=21", "--set", "train.eval_batch=5"]
    code, output = call("train", run_file, "--plan", path, "--run-dir", folder, "--set", "train.epochs=1", *short)
    assert code == 0, output
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["num_samples"] for line in lines if line["kind"] == "eval"] == [21]
    more = ["--resume", "--set", "train.epochs=2", *short]
    code, output = call("train", run_file, "--mesh", "data=2", "--run-dir", folder, *more)
    assert code == 0, output


def test_verify_refuses_what_it_cannot_compare(run_file: Path) -> None:
    assert "nothing to verify on one rank" in call("verify", run_file)[1]
    assert "not so many full batches" in call("verify", run_file, "--mesh", "channel=2", "--steps", "1000")[1]
    assert "no such data type" in call("verify", run_file, "--mesh", "channel=2", "--dtype", "float16")[1]


def test_a_split_run_is_killed_nowhere_and_keeps_its_plan(run_file: Path, tmp_path: Path) -> None:
    options = ["--set", "train.epochs=1", "--set", "data.num_train=64", "--set", "data.num_eval=20"]
    folder = tmp_path / "run"
    code, output = call("train", run_file, "--mesh", "data=1,channel=2", "--run-dir", folder, *options)
    assert code == 0, output
    assert load_plan(folder / "plan.yaml").mesh.sizes == {"data": 1, "channel": 2}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["num_parameters"] == 65962
    assert {entry["axis"] for entry in summary["collectives"]} == {"channel"}
    evaluations = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["num_samples"] for entry in evaluations if entry["kind"] == "eval"] == [20]
    # The same run goes on with samples split instead.
    more = ["--resume", "--set", "train.epochs=2", *options[2:]]
    code, output = call("train", run_file, "--mesh", "data=2", "--run-dir", folder, *more)
    assert code == 0, output
    assert json.loads((folder / "summary.json").read_text())["num_updates"] == 8


@pytest.mark.parametrize("regroup", [None, {"pad_to": 4, "order": [3, 1, 0, 2]}], ids=["plain", "regrouped"])
def test_a_loop_of_ones_own_trains_a_split_network(
    rank_pool: Callable[[str, int], RankPool], regroup: dict[str, Any] | None
) -> None:
    answers = rank_pool("torch", 4).run(
        "tests.multiprocess.own_loop:train", sizes={"data": 2, "channel": 2}, regroup=regroup
    )
    expected = answers[0]["alone"]
    for answer in answers:
        assert answer["state"].keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(answer["state"][name], value, rtol=1e-9, atol=1e-12, err_msg=name)
        assert answer["num_held"] < 0.6 * answer["num_whole"]


def test_what_was_not_split_is_refused(rank_pool: Callable[[str, int], RankPool]) -> None:
    told: list[Any] = rank_pool("torch", 2).run("tests.multiprocess.own_loop:mistakes")
    for not_split, twice, other_ranks, rows in told:
        assert "this network is not split" in not_split
        assert "the network is split already" in twice
        assert "does not fit the ranks that were started (got 2, expected 4)" in other_ranks
        assert "not along 'height'" in rows


def test_check_tells_who_decides_and_what_is_recomputed(run_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("schema_version: 1\nmesh: {data: 2}\naccumulation: 4\nrecompute: [layer1.*]\n")
    options = ["--set", "model.name=resnet18", "--set", "model.args={small_images: true}"]
    options += ["--set", "strategy.accumulation=2", "--set", "strategy.optimizer_sharding=true"]
    code, output = call("check", run_file, "--plan", path, *options)
    assert code == 0, output
    assert "Per update 4 micro-batches, optimizer state sharded, gradients in buckets of 25.0 MiB." in output
    assert "Recomputed: layer1.0, layer1.1." in output
    code, output = call(
        "check", run_file, "--mesh", "data=2", *options, "--set", "strategy.recompute=[layer9]", "--json"
    )
    assert code == 1
    assert "'layer9' is no block that can be recomputed" in json.loads(output)["mistakes"][0]["what"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mesh", ["data=1", "channel=2"])
def test_verify_finds_recomputed_blocks_equal(run_file: Path, mesh: str) -> None:
    options = ["--set", "model.name=resnet18", "--set", "model.args={small_images: true}"]
    options += ["--set", "strategy.recompute=blocks"]
    arguments = ["verify", run_file, "--mesh", mesh, "--dtype", "float64", "--steps", "2", "--json", *options]
    code, output = call(*arguments)
    told = json.loads(output)
    assert (code, told["passed"]) == (0, True)
    assert all(entry["difference"] < 1e-9 for entry in told["worst"])
    saved = told["memory"]["saved_bytes"][0], told["memory"]["one_device_saved_bytes"]
    assert saved[0] < 0.6 * saved[1]

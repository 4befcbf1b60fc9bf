"""Advice that real runs follow: every kind runs, what is called exact is, and a slow disk is advised against."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.contenders.bad_start import write_images
from safetensors.numpy import load_file
from typer.testing import CliRunner

from convmesh.api import prepare
from convmesh.cli.main import app
from convmesh.config import RunConfig, dump_config, load_config, parse_config
from convmesh.config.load import plain_config, with_settings
from convmesh.data.fetch import fetch_digits
from convmesh.mesh import Mesh
from convmesh.plan import Plan
from convmesh.plan.by_rule import plan_by_rule
from convmesh.plan.load import dump_plan
from convmesh.profiling.advice import Advised
from convmesh.training.advice import Advising
from convmesh.training.checkpoint import find_checkpoints
from convmesh.training.foresight import Setting
from convmesh.training.proposals import PLAN_FILE, Proposal, options
from convmesh.training.run_graph import cached_graph
from tests.multiprocess.ranks import RankPool
from tests.unit.test_advice import Case

pytestmark = [pytest.mark.multiprocess, pytest.mark.torch, pytest.mark.timeout(300)]

SETTINGS: dict[str, Any] = {
    "engine": "torch",
    "model": {"name": "cnn-small"},
    "data": {"source": "digits", "num_train": 96, "sampler": "random"},
    "strategy": {"bucket_bytes": 1, "accumulation": 4, "optimizer_sharding": True},
    "train": {"global_batch": 16, "device": "cpu"},
}
KINDS = ("buckets", "accumulation", "optimizer_sharding", "half_gradients", "workers", "sampling")


def _proposals() -> dict[str, Proposal]:
    """The changes that the rules propose for such a run, whether they are worth it or not."""
    run = {f"{section}__{name}": value for section in ("data", "strategy") for name, value in SETTINGS[section].items()}
    case = Case(train__global_batch=16, **run)
    case.costs_by_file()
    foresight = case.foresight(transfers=(case.gradients(),), reading=1e-3)
    return {kind: found[0] for kind, found in options(foresight).items()}


def test_every_kind_runs_on_real_ranks_and_computes_the_same_where_it_says_so(
    rank_pool: Callable[[str, int], RankPool], tmp_path: Path
) -> None:
    fetch_digits(tmp_path)
    settings = {**SETTINGS, "data": {**SETTINGS["data"], "path": str(tmp_path / "digits")}}
    pool, proposals = rank_pool("torch", 2), _proposals()
    assert set(proposals) == set(KINDS)

    def updates(proposal: Proposal | None) -> list[float]:
        run = parse_config(settings)
        return _losses(pool, run if proposal is None else with_settings(run, proposal.changes))

    usual = updates(None)
    for kind, proposal in proposals.items():
        tolerance = 1e-5 if proposal.is_exact else 1e-2
        assert updates(proposal) == pytest.approx(usual, rel=tolerance), kind


def test_a_slow_disk_is_advised_against_and_the_run_file_with_the_advice_trains(tmp_path: Path) -> None:
    write_images(tmp_path / "images", number=240)
    run = parse_config(
        {
            "engine": "torch",
            "model": {
                "factory": "benchmarks.contenders.bad_start:network",
                "args": {"bytes_per_second": 1e7, "width": 8, "depth": 2},
            },
            "data": {"source": "image_folder", "path": str(tmp_path / "images"), "image_size": 16, "num_workers": 0},
            "train": {"global_batch": 16, "device": "cpu"},
        }
    )
    (tmp_path / "run.yaml").write_text(dump_config(run))

    said = _convmesh(
        "profile", tmp_path / "run.yaml", "--ranks", 2, "--warmup", 2, "--steps", 10, "--run-dir", tmp_path / "run",
        "--advice-config", tmp_path / "better.yaml", "--json",
    )  # fmt: skip

    advice = json.loads(said)["advice"]
    assert not advice["silent"]
    (workers,) = (piece for piece in advice["pieces"] if piece["kind"] == "workers")
    assert 0 < workers["gain"] < 1
    assert "workers" in advice["together"]["kinds"]
    better = load_config(tmp_path / "better.yaml")
    assert better.data.num_workers == advice["together"]["changes"]["data.num_workers"]
    assert better.train == run.train  # Nothing is left of what profiling changes.
    assert prepare(better).mesh == Mesh({"data": 2})
    shown = CliRunner().invoke(app, ["profile", "show", str(tmp_path / "run")])
    assert "--advice-config" in shown.output, shown.output


def test_recomputation_can_be_dropped(rank_pool: Callable[[str, int], RankPool], tmp_path: Path) -> None:
    fetch_digits(tmp_path)
    model = {"factory": "tests.multiprocess.advice_cases:stages"}
    settings = {**SETTINGS, "model": model, "data": {**SETTINGS["data"], "path": str(tmp_path / "digits")}}
    run = parse_config({**settings, "strategy": {"recompute": "blocks"}})
    graph = cached_graph(run, batch=2)
    setting = Setting(run=run, plan=plan_by_rule(graph, Mesh({"data": 2})))
    assert setting.candidate(graph).resolved.recomputed

    dropped = Proposal(kind="recomputation", changes={"strategy.recompute": "none"}).applied(setting)

    assert not dropped.candidate(graph).resolved.recomputed
    (tmp_path / "plan.yaml").write_text(dump_plan(setting.settled))
    planned = with_settings(run, {"strategy.plan": str(tmp_path / "plan.yaml")})
    pool = rank_pool("torch", 2)
    assert _losses(pool, dropped.run) == pytest.approx(_losses(pool, planned), rel=1e-5)


def test_advice_of_another_mesh_is_written_with_its_plan_and_trains_the_same(tmp_path: Path) -> None:
    fetch_digits(tmp_path)
    run = parse_config({**SETTINGS, "strategy": {}, "data": {**SETTINGS["data"], "path": str(tmp_path / "digits")}})
    run = with_settings(run, {"train.epochs": 1})
    graph = cached_graph(run, batch=2)
    plan = plan_by_rule(graph, Mesh({"channel": 2}), min_multiply_adds=0)
    proposal = Proposal(kind="mesh", changes={"strategy.mesh": {"channel": 2}, "strategy.plan": PLAN_FILE}, plan=plan)
    setting = proposal.applied(Setting(run=run, plan=Plan(mesh=Mesh({"data": 2}))))
    (tmp_path / "run.yaml").write_text(dump_config(run))

    Advising(advised=Advised(seconds=1.0, plan=dump_plan(plan)), setting=setting).write(tmp_path / "better.yaml")

    prepared = prepare(tmp_path / "better.yaml")
    assert prepared.plan is not None
    assert prepared.plan.resolved.num_ranks == 2
    for name in ("run", "better"):
        _convmesh("train", tmp_path / f"{name}.yaml", "--ranks", 2, "--run-dir", tmp_path / name)
    usual, better = (
        load_file(find_checkpoints(tmp_path / name / "checkpoints")[0] / "network.safetensors")
        for name in ("run", "better")
    )
    assert set(usual) == set(better)
    for name, array in usual.items():
        np.testing.assert_allclose(better[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def _losses(pool: RankPool, run: RunConfig) -> list[float]:
    """Of each of three updates."""
    answers = pool.run("tests.multiprocess.advice_cases:losses", settings=plain_config(run), num_updates=3)
    return [sum(of_update) for of_update in zip(*answers, strict=True)]


def _convmesh(*arguments: object) -> str:
    command = [sys.executable, "-m", "convmesh.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

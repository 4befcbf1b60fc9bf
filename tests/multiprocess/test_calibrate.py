"""Calibrating with real ranks: the command from end to end, and each engine's measurements on ranks of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from convmesh.cli.main import app
from convmesh.config import RunConfig
from convmesh.config.schema import DataConfig, ModelConfig, TrainConfig
from convmesh.engines import is_installed
from convmesh.engines.calibrating import PROBES, Measurement
from convmesh.engines.contract import Engine, World
from convmesh.planner.cluster_file import load_cluster
from convmesh.planner.measuring import curve_signatures
from convmesh.training.calibrate_worker import Task, measure
from convmesh.training.calibration import Subject, signatures_of, task_of
from tests.unit.test_calibration import small_graph


def subject(engine: str) -> Subject:
    """A convolution and a classifier on two ranks."""
    run = RunConfig(
        engine=engine,  # type: ignore[arg-type]
        model=ModelConfig(name="cnn-small"),
        data=DataConfig(source="digits"),
        train=TrainConfig(global_batch=8, device="cpu"),
    )
    return Subject(
        run=run,
        num_ranks=2,
        device="cpu",
        graph=small_graph(),
        num_rounds=2,
        collective_bytes=(2**10, 2**16),
        reduction_bytes=(2**18,),
    )


def measured(engine: Engine, world: World, *, run: RunConfig, task: Task) -> Measurement:
    """What one rank measures; a case of the rank pools."""
    return measure(engine, run, world=world, task=task)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["torch", "mindspore"])
def test_ranks_measure_everything_that_a_plan_needs(engine: str, rank_pool: Any) -> None:
    wanted = subject(engine)
    found = [entry for entry in signatures_of(wanted) if entry not in curve_signatures()]
    ranks = rank_pool(engine, 2).run(
        "tests.multiprocess.test_calibrate:measured",
        timeout_seconds=280,
        run=wanted.run,
        task=task_of(wanted, found),
    )
    for seen in ranks:
        assert set(seen.operators) == set(range(len(found)))
        for place, times in seen.operators.items():
            assert times is not None, found[place].text
            assert len(times.forward) == 2
            assert min(times.forward) > 0
            assert len(times.backward) == 2 * found[place].has_backward
        assert seen.memory.fixed_bytes > 50 * 2**20
        # What MindSpore keeps beside tensors is known by rule.
        assert len(seen.memory.probe_bytes) == (len(PROBES) if engine == "torch" else 0)
        assert min(min(seconds) for seconds in seen.updates.values()) > 0
    kinds = {(kind, way) for kind, way, *_ in ranks[0].collectives}
    assert kinds >= {(kind, "collective") for kind in ("all-reduce", "all-gather", "reduce-scatter")}
    assert ("all-reduce", "shared_memory") in kinds


@pytest.mark.timeout(300)
@pytest.mark.skipif(not is_installed("torch"), reason="torch is not installed")
def test_the_command_writes_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    arguments = ["calibrate", "--ranks", "2", "--engine", "torch", "--seconds", "1", "-o", str(path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "Written to" in result.output
    cluster = load_cluster(path)
    assert cluster.num_ranks_measured == 2
    assert len(cluster.measured) == len(curve_signatures())
    assert {curve.operator for curve in cluster.compute} >= {"convolution", "elementwise", "copy", "sgd"}
    assert all(link.seconds_per_byte >= 0 for link in cluster.links.inside)

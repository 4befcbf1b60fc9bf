"""Verification in float32 passes what is right and finds each planted mistake, in deep networks too."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from convmesh.engines import is_installed
from convmesh.engines.contract import Exercise, Observation
from convmesh.mesh import Mesh
from convmesh.plan import resolve
from convmesh.plan.by_rule import plan_by_rule
from convmesh.plan.load import dump_plan
from convmesh.training.planning import RunPlan
from convmesh.training.verification import Conditions, Subject, Verification, condition, judge
from convmesh.training.verify_worker import variants
from tests.multiprocess.ranks import RankPool

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

Pools = Callable[[str, int], RankPool]
FAULTS = {
    "gradient": {"gradient", "change"},
    "buffer": {"buffer"},
    "sum of activations": {"loss", "output"},
    "bias": {"output"},
    "sum of gradients": {"gradient", "change"},
}
"""A mistake to the kinds of tensors in which it shows."""
CHANNELS, BOTH = {"data": 1, "channel": 2}, {"data": 2, "channel": 2}
CASES = [
    ("torch", "resnet18", CHANNELS, ("gradient",)),
    ("torch", "cnn-small", CHANNELS, ("gradient", "buffer", "sum of activations", "bias")),
    ("torch", "cnn-small", BOTH, ("gradient", "sum of gradients")),
    ("mindspore", "cnn-small", CHANNELS, ("gradient", "buffer", "sum of activations", "bias")),
    ("mindspore", "cnn-small", BOTH, ("sum of gradients",)),
    ("mindspore", "cnn-small", {"data": 1, "channel": 4}, ()),
]


class Trial:
    """What one device and right ranks see of a network; wrong ranks are compared with it."""

    def __init__(self, pools: Pools, engine: str, name: str, sizes: Mapping[str, int], folder: Path) -> None:
        self._cases = importlib.import_module(f"tests.multiprocess.{engine}_faults")
        data = importlib.import_module(f"tests.multiprocess.{engine}_cases")
        self._pool = pools(engine, Mesh(sizes).num_ranks)
        self._engine, self._name, self._sizes = engine, name, sizes
        num_updates = 1 if name == "resnet18" else 2
        graph = self._cases.graph_of(name, (data.GLOBAL_BATCH // sizes["data"], 3, 12, 12))
        plan = plan_by_rule(graph, Mesh(sizes), min_multiply_adds=0)
        path = folder / "plan.yaml"
        path.write_text(dump_plan(plan))
        # The learning rate is one at which a deep network's float32 updates soon differ in the first digits.
        run = data.run_config(strategy={"plan": str(path)}, optimizer={"learning_rate": 0.5})
        subject = Subject(run, Mesh(sizes), "cpu", RunPlan(plan, resolve(graph, plan)), num_updates=num_updates)
        self._subject, self.conditions = condition(subject)
        num_shards = sizes["data"]
        self._exercise = Exercise(
            pixel_scale=data.SCALE,
            updates=[
                [
                    data.micro_batches(update, data.GLOBAL_BATCH, num_shards=num_shards, shard=shard, accumulation=1)
                    for update in range(num_updates)
                ]
                for shard in range(num_shards)
            ],
            counts=[data.GLOBAL_BATCH] * num_updates,
            norm_shift=self.conditions.norm_shift,
        )
        self._alone: list[Observation] = self._cases.alone(
            self._subject.run, name, variants(self._exercise, reverses=True)
        )

    def verify(self, fault: str) -> Verification:
        """The verdict on ranks with a fault."""
        ranks = self._pool.run(
            f"tests.multiprocess.{self._engine}_faults:observe",
            timeout_seconds=200,
            run=self._subject.run,
            sizes=self._sizes,
            name=self._name,
            exercise=self._exercise,
            fault=fault,
        )
        return judge(self._subject, ranks, self._alone, reverses=True)


@pytest.mark.parametrize(("engine", "name", "sizes", "faults"), CASES, ids=str)
def test_each_planted_mistake_is_found(
    rank_pool: Pools, tmp_path: Path, engine: str, name: str, sizes: Mapping[str, int], faults: Sequence[str]
) -> None:
    if not is_installed(engine):
        pytest.skip(f"{engine} is not installed")
    trial = Trial(rank_pool, engine, name, sizes, tmp_path)
    assert trial.conditions == Conditions(learning_rate=0.01, norm_shift=3.0)
    right = trial.verify("none")
    assert right.passed, right
    assert all(entry.allowed <= 3e-3 for entry in right.worst), right.worst
    for fault in faults:
        found = trial.verify(fault)
        wrong = {entry.kind for entry in found.worst if entry.verdict == "too large"}
        assert not found.passed, fault
        assert not found.inconclusive, fault
        assert FAULTS[fault] <= wrong, (fault, [dataclasses.astuple(entry) for entry in found.worst])


def test_half_types_and_high_rates_are_not_exercised() -> None:
    if not is_installed("torch"):
        pytest.skip("torch is not installed")
    cases: Any = importlib.import_module("tests.multiprocess.torch_cases")
    run = cases.run_config(precision={"compute": "float16"}, optimizer={"name": "adamw", "learning_rate": 0.1})
    subject, conditions = condition(Subject(run, Mesh({"data": 2}), "cpu", None))
    assert subject.run.precision.compute == "float32"
    assert (subject.run.optimizer.learning_rate, subject.run.optimizer.epsilon) == (0.001, 0.001)
    assert conditions == Conditions(0.001, 3.0)
    subject, conditions = condition(dataclasses.replace(subject, run=run, dtype="float64"))
    assert subject.run.optimizer == run.optimizer
    assert conditions == Conditions(0.1)

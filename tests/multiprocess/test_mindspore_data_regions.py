"""MindSpore networks whose head is split by channels along the data axis equal one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore")

import mindspore as ms

from convmesh.plan.load import dump_plan
from tests.multiprocess import mindspore_channel_training as cases
from tests.multiprocess.ranks import RankPool
from tests.multiprocess.test_mindspore_channel_training import difference

pytestmark = [pytest.mark.mindspore, pytest.mark.multiprocess]

Pools = Callable[[str, int], RankPool]
OUT: dict[str, Any] = {"fc1": "out_channels", "fc2": "out_channels", "fc3": "in_channels"}
IN: dict[str, Any] = {"fc1": "in_channels", "fc2": {"split": "in_channels", "output": "samples"}, "fc3": "out_channels"}


@pytest.fixture(autouse=True)
def graph_mode() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")


@pytest.fixture
def run_head(rank_pool: Pools, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Trains on ranks whose data axis splits what ``head`` says by channels."""

    def run(size: int, head: Mapping[str, Any], *, name: str = "head-norm", strategy: Any = None, **rest: Any) -> Any:
        settings = dict(strategy or {})
        if head:
            path = tmp_path / "plan.yaml"
            path.write_text(dump_plan(cases.head_plan(name, {"data": size}, head)))
            settings["plan"] = str(path)
        return rank_pool("mindspore", size).run(
            cases.__name__ + ":train", timeout_seconds=280, sizes={"data": size}, name=name, strategy=settings, **rest
        )

    return run


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("size", "head", "parts"),
    [
        (2, OUT, {"strategy": {"accumulation": 2}, "counts": (16, 9, 16), "optimizer": {"clip_norm": 0.3}}),
        (2, IN, {"strategy": {"optimizer_sharding": True}, "optimizer": {"name": "adamw", "learning_rate": 0.001}}),
        (4, OUT, {"strategy": {"bucket_bytes": 400}, "counts": (16, 3, 1)}),
    ],
    ids=["accumulation", "sharded-adamw", "ragged"],
)
def test_a_head_split_along_data_equals_one_device(
    run_head: Callable[..., Any], size: int, head: Mapping[str, Any], parts: dict[str, Any]
) -> None:
    answers = run_head(size, head, **parts)
    losses, expected = cases.train_alone(name="head-norm", num_shards=size, **parts)
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-5)
        assert difference(answer["states"][-1].network, expected) < (1e-4, "")
    if "accumulation" not in parts["strategy"] and "counts" not in parts:
        sent = {
            count.kind: (count.number, count.num_bytes)
            for count in answers[0]["collectives"]
            if count.purpose == "activations"
        }
        assert sent == cases.head_told("head-norm", {"data": size}, head, num_samples=16 // size)


@pytest.mark.timeout(300)
def test_an_overflow_skips_everywhere_and_a_state_goes_on_without_the_split(run_head: Callable[..., Any]) -> None:
    answers = run_head(
        2, OUT, name="head", precision={"compute": "float16"}, infinite_on=1, loss_scale=1024.0,
        strategy={"optimizer_sharding": True},
    )  # fmt: skip
    for answer in answers:
        assert answer["overflows"] == [False, True, False]
        first, skipped, _ = answer["states"]
        for name, value in first.network.items():
            np.testing.assert_array_equal(skipped.network[name], value, err_msg=name)
    parts: dict[str, Any] = {"name": "head", "train": {"weight_average": 0.5}}
    whole = run_head(2, {}, counts=(16,) * 4, **parts)[0]["states"][-1]
    half = run_head(2, OUT, counts=(16,) * 2, **parts)[0]["states"][-1]
    for head in ({}, IN):
        end = run_head(2, head, counts=(16,) * 2, start=half, first_update=2, **parts)[0]["states"][-1]
        assert difference(end.network, whole.network) < (1e-4, "")
        assert difference(end.optimizer, whole.optimizer) < (1e-4, "")
        assert difference(end.average, whole.average) < (1e-4, "")

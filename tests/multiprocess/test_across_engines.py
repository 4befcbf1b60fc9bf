"""What a split network learned on one engine goes on on the other, on another mesh."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convmesh.engines import is_installed
from convmesh.engines.contract import TrainState
from convmesh.mesh import Mesh
from convmesh.plan.load import dump_plan
from tests.multiprocess.ranks import RankPool

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

CASES = {"torch": "channel_training", "mindspore": "mindspore_channel_training"}
SPLIT, SAMPLES = {"data": 1, "channel": 2}, {"data": 2}


@pytest.fixture
def train(rank_pool: Callable[[str, int], RankPool], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Trains cnn-small with batch norm on two ranks of an engine."""

    def run(engine: str, sizes: Mapping[str, int], **rest: Any) -> dict[str, Any]:
        module = f"tests.multiprocess.{CASES[engine]}"
        strategy = {}
        if "channel" in sizes:
            path = tmp_path / f"{engine}.yaml"
            path.write_text(dump_plan(importlib.import_module(module).plan_for("cnn-small", sizes)))
            strategy["plan"] = str(path)
        pool = rank_pool(engine, Mesh(sizes).num_ranks)
        answers = pool.run(
            f"{module}:train", timeout_seconds=200, sizes=sizes, name="cnn-small", strategy=strategy, **rest
        )
        answer: dict[str, Any] = answers[0]
        return answer

    return run


@pytest.mark.parametrize(("first", "then"), [("torch", "mindspore"), ("mindspore", "torch")])
def test_parameters_and_buffers_go_on_on_the_other_engine(
    train: Callable[..., dict[str, Any]], first: str, then: str
) -> None:
    if not (is_installed("torch") and is_installed("mindspore")):
        pytest.skip("needs both engines")
    half = train(first, SPLIT, counts=(16, 16))
    network = half["states"][-1].network
    here = train(then, SAMPLES, counts=(), start=TrainState(network=network))
    assert here["eval_loss"] == pytest.approx(half["eval_loss"], rel=1e-4)
    # An update of either engine from there is the same one; the optimizer starts afresh on both.
    own = train(first, SPLIT, counts=(16,), start=TrainState(network=network))
    other = train(then, SPLIT, counts=(16,), start=TrainState(network=network))
    assert other["losses"] == pytest.approx(own["losses"], rel=1e-4)
    for name, value in own["states"][-1].network.items():
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_allclose(
                other["states"][-1].network.get(name), value, rtol=2e-3, atol=2e-4 * np.abs(value).max(), err_msg=name
            )

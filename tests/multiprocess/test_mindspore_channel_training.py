"""MindSpore runs on meshes with an axis channel equal one device, whatever else is done with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore")

import mindspore as ms

from convmesh.engines.contract import Arrays
from convmesh.plan.load import dump_plan
from tests.multiprocess import mindspore_channel_training as cases
from tests.multiprocess.ranks import RankPool

pytestmark = [pytest.mark.mindspore, pytest.mark.multiprocess]

Pools = Callable[[str, int], RankPool]
TRAIN = "tests.multiprocess.mindspore_channel_training:train"
TWO = {"data": 1, "channel": 2}
FOUR = {"data": 2, "channel": 2}


@pytest.fixture(autouse=True)
def graph_mode() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")


@pytest.fixture
def run_split(rank_pool: Pools, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Trains a network on a mesh by the plan by rule; a section ``strategy`` may be given."""

    def run(
        sizes: Mapping[str, int],
        name: str,
        strategy: Mapping[str, Any] | None = None,
        *,
        uneven: bool = False,
        **rest: Any,
    ) -> Any:
        settings = dict(strategy or {})
        if sizes.get("channel", 1) > 1:
            path = tmp_path / "plan.yaml"
            plan = cases.plan_for(name, sizes, uneven=uneven, regroup=rest.get("regroup"))
            path.write_text(dump_plan(plan))
            settings["plan"] = str(path)
        num_ranks = int(np.prod(list(sizes.values())))
        return rank_pool("mindspore", num_ranks).run(
            TRAIN, timeout_seconds=280, sizes=sizes, name=name, strategy=settings, **rest
        )

    return run


def difference(got: Arrays, expected: Arrays) -> tuple[float, str]:
    """The largest difference of a tensor relative to its norm, or to a thousandth of the largest norm."""
    assert got.keys() == expected.keys()
    scale = 1e-3 * max(float(np.linalg.norm(value)) for value in expected.values())
    return max(
        (float(np.linalg.norm(got[name] - value) / max(float(np.linalg.norm(value)), scale)), name)
        for name, value in expected.items()
    )


@pytest.mark.parametrize("name", ["resnet18", "slopes", "drops"])
def test_networks_equal_one_device(run_split: Callable[..., Any], name: str) -> None:
    parts: dict[str, Any] = {"counts": (16,) * 2, "optimizer": {"learning_rate": 0.01}}
    losses, expected = cases.train_alone(name=name, **parts)
    answers = run_split(TWO, name, **parts)
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-5)
        assert difference(answer["states"][-1].network, expected) < (1e-4, "")
    sent = {count.kind: (count.number, count.num_bytes) for count in answers[0]["collectives"][:-1]}
    assert sent == cases.told_for(name, TWO, num_samples=16, num_micro_batches=1)


@pytest.mark.parametrize(
    ("sizes", "name", "strategy"),
    [
        (TWO, "residuals-dropout", {"accumulation": 2}),
        # With two shards of the data the masks of one device are others, so this one drops nothing.
        (FOUR, "residuals", {"optimizer_sharding": True}),
    ],
    ids=["dropout", "two-axes"],
)
def test_recomputed_blocks_equal_one_device(
    run_split: Callable[..., Any], sizes: Mapping[str, int], name: str, strategy: Mapping[str, Any]
) -> None:
    strategy = {**strategy, "recompute": ["*"]}
    parts: dict[str, Any] = {"counts": (16,) * 2, "optimizer": {"learning_rate": 0.01}, "strategy": strategy}
    losses, expected = cases.train_alone(name=name, num_shards=sizes["data"], **parts)
    answers = run_split(sizes, name, **parts)
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-5)
        assert difference(answer["states"][-1].network, expected) < (1e-4, "")
    sent = {
        count.kind: (count.number, count.num_bytes)
        for count in answers[0]["collectives"]
        if count.axis == "channel" and count.purpose == "activations"
    }
    accumulation = strategy.get("accumulation", 1)
    assert sent == cases.told_for(
        name, sizes, num_samples=16 // sizes["data"] // accumulation, num_micro_batches=accumulation, recompute=["*"]
    )


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"uneven": True},
        {"strategy": {"accumulation": 2}, "optimizer": {"clip_norm": 0.3}},
        {"train": {"label_smoothing": 0.1}, "optimizer": {"name": "adamw", "learning_rate": 0.001, "clip_norm": 0.3}},
    ],
    ids=["plain", "uneven", "accumulation-clipped", "adamw-clipped"],
)
def test_what_is_combined_with_split_channels_stays_exact(run_split: Callable[..., Any], parts: dict[str, Any]) -> None:
    answers = run_split(TWO, "cnn-small", **parts)
    losses, expected = cases.train_alone(
        name="cnn-small", **{key: value for key, value in parts.items() if key != "uneven"}
    )
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-5)
        assert difference(answer["states"][-1].network, expected) < (1e-4, "")
    if parts.get("optimizer", {}).get("clip_norm"):
        assert answers[0]["norms"][0] > 0.3
        assert len({answer["norms"][0] for answer in answers}) == 1


@pytest.mark.parametrize(
    "parts",
    [
        {"strategy": {"optimizer_sharding": True}, "optimizer": {"clip_norm": 0.3}},
        {"counts": (16, 16, 3), "strategy": {"bucket_bytes": 4000}, "uneven": True},
    ],
    ids=["sharded-clipped", "ragged-uneven"],
)
def test_two_axes_equal_one_device(run_split: Callable[..., Any], parts: dict[str, Any]) -> None:
    answers = run_split(FOUR, "cnn-small", **parts)
    losses, expected = cases.train_alone(
        name="cnn-small", num_shards=2, **{key: value for key, value in parts.items() if key != "uneven"}
    )
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-5)
        assert difference(answer["states"][-1].network, expected) < (1e-4, "")


@pytest.mark.parametrize(
    ("name", "regroup", "parts"),
    [
        ("stem", {"space_to_depth": 2}, {"optimizer": {"clip_norm": 0.3, "weight_decay": 0.1}}),
        ("stem", {"space_to_depth": 2, "pad": 1}, {"optimizer": {"name": "adamw", "learning_rate": 0.001}}),
        ("cnn-small", {"pad_to": 4, "order": [1, 3, 0, 2]}, {"optimizer": {"clip_norm": 0.3}}),
    ],
    ids=["blocks", "blocks-uneven-adamw", "padded"],
)
def test_regrouped_images_equal_one_device_without_regrouping(
    run_split: Callable[..., Any], name: str, regroup: Mapping[str, Any], parts: dict[str, Any]
) -> None:
    answers = run_split({"data": 1, "channel": 4}, name, regroup=regroup, **parts)
    losses, expected = cases.train_alone(name=name, **parts)
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-5)
        assert difference(answer["states"][-1].network, expected) < (1e-4, "")
        assert answer["num_parameters"] == sum(p.size for p in cases.network_of(name).trainable_params())


def test_each_rank_holds_its_part_of_parameters_and_optimizer(run_split: Callable[..., Any]) -> None:
    whole = cases.network_of("cnn-small")
    num_whole = sum(parameter.size for parameter in whole.trainable_params())
    for answer in run_split(TWO, "cnn-small", counts=(16,)):
        assert answer["num_parameters"] == num_whole
        # All but the bias of the last layer is split.
        assert sum(answer["parameter_bytes"]) == 4 * (num_whole // 2 + 5)
        assert answer["optimizer_bytes"] == 4 * (num_whole // 2 + 5)


def test_no_rank_ever_holds_the_whole_of_a_split_weight(run_split: Callable[..., Any]) -> None:
    for answer in run_split(TWO, "cnn-small", counts=(16,), watches=True):
        assert answer["whole_alive"] == []


@pytest.mark.parametrize("rank", [1, 2])
def test_an_overflow_on_any_rank_skips_the_update_everywhere(run_split: Callable[..., Any], rank: int) -> None:
    answers = run_split(
        FOUR,
        "cnn-small",
        strategy={"optimizer_sharding": True},
        precision={"compute": "float16"},
        infinite_on=rank,
        loss_scale=1024.0,
    )
    for answer in answers:
        assert answer["overflows"] == [False, True, False]
        first, skipped, last = answer["states"]
        assert [state.num_updates for state in answer["states"]] == [1, 1, 2]
        for name, value in first.network.items():
            np.testing.assert_array_equal(skipped.network[name], value, err_msg=name)
        assert all(np.isfinite(value).all() for value in last.network.values())
    for answer in answers[1:]:
        for name, value in answers[0]["states"][-1].network.items():
            np.testing.assert_array_equal(answer["states"][-1].network[name], value, err_msg=name)


def test_half_types_send_half_the_bytes(run_split: Callable[..., Any]) -> None:
    half = run_split(TWO, "cnn-small", precision={"compute": "float16"}, optimizer={"learning_rate": 0.01})[0]
    full = run_split(TWO, "cnn-small", optimizer={"learning_rate": 0.01})[0]
    np.testing.assert_allclose(half["losses"], full["losses"], rtol=2e-2)
    sent = {count.kind: count.num_bytes for count in full["collectives"] if count.purpose == "activations"}
    for count in half["collectives"]:
        if count.purpose == "activations":
            assert 2 * count.num_bytes == sent[count.kind]


def test_a_state_goes_on_on_another_mesh(run_split: Callable[..., Any]) -> None:
    parts: dict[str, Any] = {
        "optimizer": {"name": "adamw", "learning_rate": 0.001},
        "train": {"weight_average": 0.5},
    }
    # Without batch norm the number of shards doesn't matter.
    whole = run_split({"data": 2}, "plain", counts=(16,) * 4, **parts)[0]["states"][-1]
    for first, then in (({"data": 4}, FOUR), (FOUR, {"data": 4}), (FOUR, TWO)):
        half = run_split(first, "plain", counts=(16,) * 2, **parts)[0]["states"][-1]
        for answer in run_split(then, "plain", counts=(16,) * 2, start=half, first_update=2, **parts):
            end = answer["states"][-1]
            assert end.num_updates == 4
            assert difference(end.network, whole.network) < (1e-4, "")
            assert difference(end.optimizer, whole.optimizer) < (1e-3, "")
            assert difference(end.average, whole.average) < (1e-4, "")

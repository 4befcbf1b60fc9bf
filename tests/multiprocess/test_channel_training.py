"""Runs on meshes with an axis channel equal one device, whatever else is done with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from convmesh.engines.contract import Arrays
from convmesh.plan.load import dump_plan
from tests.multiprocess import channel_training as cases
from tests.multiprocess.ranks import RankPool

pytestmark = [pytest.mark.torch, pytest.mark.multiprocess]

Pools = Callable[[str, int], RankPool]
TRAIN = "tests.multiprocess.channel_training:train"
MESHES = [{"data": 1, "channel": 2}, {"data": 1, "channel": 4}, {"data": 2, "channel": 2}]


@pytest.fixture
def run_split(rank_pool: Pools, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Trains a network on a mesh by the plan by rule; a section ``strategy`` may be given."""

    def run(sizes: Mapping[str, int], name: str, strategy: Mapping[str, Any] | None = None, **rest: Any) -> Any:
        settings = dict(strategy or {})
        if sizes.get("channel", 1) > 1 or "recompute" in settings:
            path = tmp_path / "plan.yaml"
            plan = cases.plan_for(name, sizes, settings.get("recompute", ()), regroup=rest.get("regroup"))
            path.write_text(dump_plan(plan))
            settings["plan"] = str(path)
        num_ranks = int(np.prod(list(sizes.values())))
        return rank_pool("torch", num_ranks).run(
            TRAIN, timeout_seconds=110, sizes=sizes, name=name, strategy=settings, **rest
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


@pytest.mark.parametrize(
    ("name", "sizes", "num_updates"),
    # benchmarks/exactness.py verifies ResNet-18 and ResNet-50 on all three meshes.
    [("resnet18", MESHES[0], 1), ("bottlenecks", MESHES[1], 1), ("bottlenecks", MESHES[2], 2)],
    ids=str,
)
def test_residual_networks_equal_one_device_in_float64(
    run_split: Callable[..., Any], name: str, sizes: Mapping[str, int], num_updates: int
) -> None:
    counts = (16,) * num_updates
    answers = run_split(sizes, name, dtype="float64", counts=counts)
    losses, expected = cases.train_alone(name=name, num_shards=sizes["data"], dtype="float64", counts=counts)
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-9)
        assert difference(answer["states"][-1].network, expected) < (1e-9, "")


@pytest.mark.parametrize("sizes", [MESHES[0], MESHES[2]], ids=str)
def test_a_network_equals_one_device_in_float32(run_split: Callable[..., Any], sizes: Mapping[str, int]) -> None:
    # A small network: in a deep one the sign of a single activation near zero, which rounding alone turns, moves the
    # gradient of a float32 run on one device by a hundredth. Deep networks are compared in float64 above.
    losses, expected = cases.train_alone(name="cnn-small", num_shards=sizes["data"])
    for answer in run_split(sizes, "cnn-small"):
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-5)
        assert difference(_learned(answer["states"][-1].network), _learned(expected)) < (1e-4, "")


@pytest.mark.parametrize(
    "parts",
    [
        {"strategy": {"accumulation": 2}},
        {"strategy": {"optimizer_sharding": True}},
        {"strategy": {"optimizer_sharding": True, "accumulation": 2}, "optimizer": {"name": "adamw", "clip_norm": 0.3}},
        {"optimizer": {"clip_norm": 0.3}, "train": {"label_smoothing": 0.1, "channels_last": False}},
        {"counts": (16, 16, 3), "strategy": {"bucket_bytes": 4000}},
    ],
    ids=["accumulation", "sharded", "sharded-adamw-clipped", "clipped", "ragged"],
)
def test_what_is_combined_with_split_channels_stays_exact(run_split: Callable[..., Any], parts: dict[str, Any]) -> None:
    answers = run_split({"data": 2, "channel": 2}, "cnn-small", dtype="float64", **parts)
    losses, expected = cases.train_alone(name="cnn-small", num_shards=2, dtype="float64", **parts)
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-9)
        assert difference(_learned(answer["states"][-1].network), _learned(expected)) < (1e-9, "")
    if parts.get("optimizer", {}).get("clip_norm"):
        assert answers[0]["norms"][0] > 0.3
        assert len({answer["norms"][0] for answer in answers}) == 1


@pytest.mark.parametrize(
    ("name", "sizes", "strategy"),
    [
        ("bottlenecks", {"data": 2}, {"accumulation": 2, "optimizer_sharding": True}),
        ("bottlenecks", {"data": 2, "channel": 2}, {"accumulation": 2, "optimizer_sharding": True}),
        ("pre_activated", {"data": 1, "channel": 2}, {}),
        ("pre_activated", {"data": 2, "channel": 2}, {}),
    ],
    ids=str,
)
def test_recomputed_blocks_equal_one_device(
    run_split: Callable[..., Any], name: str, sizes: Mapping[str, int], strategy: Mapping[str, Any]
) -> None:
    parts: dict[str, Any] = {"strategy": {**strategy, "recompute": ["*"]}, "dtype": "float64"}
    answers = run_split(sizes, name, **parts)
    losses, expected = cases.train_alone(name=name, num_shards=sizes["data"], **parts)
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-9)
        assert difference(answer["states"][-1].network, expected) < (1e-9, "")
    num_micro_batches = strategy.get("accumulation", 1)
    num_samples = 16 // sizes["data"] // num_micro_batches
    told = cases.told_for(name, sizes, recompute=["*"], num_samples=num_samples, num_micro_batches=num_micro_batches)
    sent = {entry.kind: (entry.number, entry.num_bytes) for entry in answers[0]["collectives"]
            if entry.axis == "channel" and entry.purpose == "activations"}  # fmt: skip
    assert sent == told


SPACE_TO_DEPTH = {"space_to_depth": 2, "order": [*range(0, 12, 4), *range(1, 12, 4), *range(2, 12, 4), 3, 7, 11]}


@pytest.mark.parametrize(
    ("name", "sizes", "regroup", "parts"),
    [
        ("stem", MESHES[1], {"space_to_depth": 2}, {"optimizer": {"clip_norm": 0.3, "weight_decay": 0.1}}),
        ("stem", MESHES[1], SPACE_TO_DEPTH, {"optimizer": {"name": "adamw", "weight_decay": 0.1, "clip_norm": 0.3}}),
        (
            "stem",
            MESHES[2],
            {"space_to_depth": 2, "pad_to": 13},
            {
                "strategy": {"optimizer_sharding": True, "accumulation": 2, "bucket_bytes": 2000},
                "optimizer": {"name": "adamw", "clip_norm": 0.3, "weight_decay": 0.1},
                "counts": (16, 16, 3),
            },
        ),
        ("cnn-small", MESHES[1], {"pad_to": 4}, {"optimizer": {"clip_norm": 0.3}}),
        ("stem", {"data": 2}, {"space_to_depth": 2}, {"strategy": {"optimizer_sharding": True}}),
    ],
    ids=["blocks", "blocks-in-order-adamw", "two-axes-uneven", "padded", "samples-only"],
)
def test_regrouped_images_equal_one_device_without_regrouping(
    run_split: Callable[..., Any],
    name: str,
    sizes: Mapping[str, int],
    regroup: Mapping[str, Any],
    parts: dict[str, Any],
) -> None:
    answers = run_split(sizes, name, regroup=regroup, dtype="float64", **parts)
    losses, expected = cases.train_alone(name=name, num_shards=sizes["data"], dtype="float64", **parts)
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-9)
        assert difference(_learned(answer["states"][-1].network), _learned(expected)) < (1e-9, "")
        assert answer["num_parameters"] == sum(p.numel() for p in cases.network_of(name, "float64").parameters())
        # By its inputs the first weight is cut; only with samples alone it is whole.
        kernel, num_channels = (4, 12) if name == "stem" else (3, 4)
        num_out = 8 if name == "stem" else 32
        if regroup.get("pad_to") != 13:
            own = num_channels // sizes.get("channel", 1)
            assert answer["parameter_bytes"][0] == 8 * num_out * own * kernel**2
    whole = run_split({"data": 1}, name, dtype="float64", **{**parts, "strategy": {}})[0]
    if "counts" not in parts:
        np.testing.assert_allclose(answers[0]["norms"][0] or 0, whole["norms"][0] or 0, rtol=1e-9)


def test_a_state_moves_between_regrouped_images_and_others(run_split: Callable[..., Any]) -> None:
    parts: dict[str, Any] = {
        "dtype": "float64",
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "train": {"weight_average": 0.5},
    }
    # Batch norm sees all samples of an update on each of these meshes.
    ways: list[tuple[Mapping[str, int], Any]] = [
        ({"data": 1}, None),
        (MESHES[1], {"space_to_depth": 2}),
        (MESHES[0], {"pad_to": 4}),
    ]
    whole = run_split({"data": 1}, "stem", counts=(16,) * 4, **parts)[0]
    for (first, regroup), (then, other) in zip(ways, [*ways[1:], ways[0]], strict=True):
        half = run_split(first, "stem", regroup=regroup, counts=(16,) * 2, **parts)[0]["states"][-1]
        answer = run_split(then, "stem", regroup=other, counts=(16,) * 2, start=half, first_update=2, **parts)[0]
        end, last = answer["states"][-1], whole["states"][-1]
        assert difference(_learned(end.network), _learned(last.network)) < (1e-9, "")
        assert difference(end.optimizer, last.optimizer) < (1e-9, "")
        assert difference(_learned(end.average), _learned(last.average)) < (1e-9, "")
        np.testing.assert_allclose(answer["eval_loss"], whole["eval_loss"], rtol=1e-9)


def _learned(tensors: Arrays) -> Arrays:
    return {name: value for name, value in tensors.items() if not name.endswith("num_batches_tracked")}


def test_each_rank_holds_its_part_of_parameters_and_optimizer(run_split: Callable[..., Any]) -> None:
    whole = run_split({"data": 1}, "bottlenecks", counts=(16,))[0]
    for answer in run_split({"data": 1, "channel": 2}, "bottlenecks", counts=(16,)):
        assert answer["num_parameters"] == whole["num_parameters"]
        # All but the bias of the last layer is split.
        assert sum(answer["parameter_bytes"]) == sum(whole["parameter_bytes"]) // 2 + 20
        assert answer["optimizer_bytes"] == whole["optimizer_bytes"] // 2 + 20


@pytest.mark.parametrize("strategy", [{}, {"optimizer_sharding": True}], ids=["whole", "sharded"])
def test_no_rank_ever_holds_the_whole_of_a_split_weight(
    run_split: Callable[..., Any], strategy: dict[str, Any]
) -> None:
    sizes = {"data": 2, "channel": 2}
    for answer in run_split(sizes, "cnn-small", strategy, counts=(16,), watches=True):
        assert answer["whole_alive"] == []


@pytest.mark.parametrize("rank", [1, 2])
def test_an_overflow_on_any_rank_skips_the_update_everywhere(run_split: Callable[..., Any], rank: int) -> None:
    answers = run_split(
        {"data": 2, "channel": 2},
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


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_half_types_come_near(run_split: Callable[..., Any], compute: str) -> None:
    parts: dict[str, Any] = {"precision": {"compute": compute}, "optimizer": {"learning_rate": 0.01}}
    answers = run_split({"data": 1, "channel": 2}, "cnn-small", **parts)
    losses, expected = cases.train_alone(name="cnn-small", **parts)
    np.testing.assert_allclose(answers[0]["losses"], losses, rtol=2e-2)
    assert difference(answers[0]["states"][-1].network, expected) < (5e-2, "")
    whole = run_split({"data": 1, "channel": 2}, "cnn-small", optimizer={"learning_rate": 0.01})[0]
    sent = {count.kind: count.num_bytes for count in whole["collectives"] if count.purpose == "activations"}
    for count in answers[0]["collectives"]:
        if count.purpose == "activations":
            assert 2 * count.num_bytes == sent[count.kind]


def test_a_state_goes_on_on_another_mesh(run_split: Callable[..., Any]) -> None:
    parts: dict[str, Any] = {
        "dtype": "float64",
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "train": {"weight_average": 0.5},
    }
    sharded = {"optimizer_sharding": True}
    four, mixed, split = ({"data": 4}, sharded), ({"data": 2, "channel": 2}, sharded), ({"data": 1, "channel": 4}, {})
    # Without batch norm the number of shards doesn't matter.
    whole = run_split({"data": 1}, "plain", counts=(16,) * 4, **parts)[0]["states"][-1]
    for (first, first_strategy), others in (
        (four, [mixed]),
        (mixed, [four, split, ({"data": 1}, {})]),
        (split, [mixed]),
    ):
        half = run_split(first, "plain", strategy=first_strategy, counts=(16,) * 2, **parts)[0]["states"][-1]
        for then, strategy in others:
            answers = run_split(then, "plain", strategy=strategy, counts=(16,) * 2, start=half, first_update=2, **parts)
            for answer in answers:
                end = answer["states"][-1]
                assert end.num_updates == 4
                assert difference(end.network, whole.network) < (1e-9, "")
                assert difference(end.optimizer, whole.optimizer) < (1e-9, "")
                assert difference(end.average, whole.average) < (1e-9, "")

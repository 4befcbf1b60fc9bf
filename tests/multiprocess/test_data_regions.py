"""Networks whose head is split by channels along the data axis equal one device, whatever else is done with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from convmesh.engines.contract import Arrays
from convmesh.engines.torch.trace import trace
from convmesh.mesh import Mesh
from convmesh.plan import Choice, Entry, Plan
from convmesh.plan.load import dump_plan
from convmesh.plan.network import network_facts
from tests.multiprocess import channel_training as cases
from tests.multiprocess.ranks import RankPool
from tests.multiprocess.test_channel_training import difference

pytestmark = [pytest.mark.torch, pytest.mark.multiprocess]

Pools = Callable[[str, int], RankPool]
OUT: dict[str, Any] = {"head.1": "out_channels", "head.4": "out_channels", "head.7": "in_channels"}
IN: dict[str, Any] = {
    "features.5": "channels",
    "head.1": {"split": "in_channels", "partition": [3, 22]},
    "head.4": {"split": "in_channels", "output": "samples"},
    "head.7": "out_channels",
}
MIXED: dict[str, Any] = {"head.1": {"split": "out_channels", "keep_input": True}, "head.4": "in_channels"}
DIGITS = {"dtype": "float64", "name": "dense_head"}


def plan_text(name: str, sizes: Mapping[str, int], head: Mapping[str, Any], channel: Mapping[str, str]) -> str:
    """A plan that splits the head of a network along data."""
    choices = {path: Choice(split=c) if isinstance(c, str) else Choice(**c) for path, c in head.items()}
    entries = [Entry(pattern=path, axes={"data": choice}) for path, choice in choices.items()]
    entries += [Entry(pattern=path, axes={"channel": Choice(split=split)}) for path, split in channel.items()]
    graph = trace(cases.network_of(name, "float32"), (4, 3, 12, 12))
    return dump_plan(Plan(mesh=Mesh(sizes), entries=tuple(entries), network=network_facts(graph)))


@pytest.fixture
def run_region(rank_pool: Pools, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Trains on a mesh whose data axis splits what ``head`` says by channels."""

    def run(
        sizes: Mapping[str, int],
        head: Mapping[str, Any],
        *,
        channel: Mapping[str, str] | None = None,
        strategy: Mapping[str, Any] | None = None,
        **rest: Any,
    ) -> Any:
        settings = dict(strategy or {})
        if head or channel:
            path = tmp_path / "plan.yaml"
            path.write_text(plan_text(rest.get("name", DIGITS["name"]), sizes, head, channel or {}))
            settings["plan"] = str(path)
        return rank_pool("torch", int(np.prod(list(sizes.values())))).run(
            cases.__name__ + ":train", timeout_seconds=110, sizes=sizes, strategy=settings, **{**DIGITS, **rest}
        )

    return run


@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_on_any_rank_skips_the_update_everywhere(run_region: Callable[..., Any], rank: int) -> None:
    answers = run_region(
        {"data": 2},
        OUT,
        dtype="float32",
        strategy={"optimizer_sharding": True},
        precision={"compute": "float16"},
        infinite_on=rank,
        loss_scale=1024.0,
    )
    for answer in answers:
        assert answer["overflows"] == [False, True, False]
        first, skipped, last = answer["states"]
        for name, value in first.network.items():
            np.testing.assert_array_equal(skipped.network[name], value, err_msg=name)
            np.testing.assert_array_equal(last.network[name], answers[0]["states"][-1].network[name], err_msg=name)
        assert all(np.isfinite(value).all() for value in last.network.values())


def test_a_state_goes_on_with_and_without_a_split_head(run_region: Callable[..., Any]) -> None:
    parts: dict[str, Any] = {
        "name": "dense_head_plain",
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "train": {"weight_average": 0.5},
    }
    sharded = {"optimizer_sharding": True}
    plain, head, alone = ({"data": 2}, {}, sharded), ({"data": 2}, OUT, sharded), ({"data": 1}, {}, {})
    both = ({"data": 2, "channel": 2}, OUT, {})
    whole = run_region({"data": 1}, {}, counts=(16,) * 4, **parts)[0]["states"][-1]
    for first, others in ((plain, [head]), (head, [plain, alone, both]), (alone, [head])):
        sizes, split, strategy = first
        half = run_region(sizes, split, strategy=strategy, counts=(16,) * 2, **parts)[0]["states"][-1]
        for sizes, split, strategy in others:
            channel = {"features.0": "out_channels"} if "channel" in sizes else {}
            answers = run_region(
                sizes, split, channel=channel, strategy=strategy, counts=(16,) * 2, start=half, first_update=2, **parts
            )
            for answer in answers:
                end = answer["states"][-1]
                assert difference(end.network, whole.network) < (1e-9, "")
                assert difference(end.optimizer, whole.optimizer) < (1e-9, "")
                assert difference(end.average, whole.average) < (1e-9, "")


def test_each_rank_holds_its_part_of_the_head_and_of_its_optimizer(run_region: Callable[..., Any]) -> None:
    whole = run_region({"data": 1}, {}, counts=(16,))[0]
    # The first rank has 13 of 25 outputs of the first layer; the last layer's shift is whole.
    of_others = [12 * 49 + 9 * 26 + 10 * 9, 13 * 49 + 9 * 26 + 10 * 9]
    for answer, num_lacking in zip(run_region({"data": 2}, OUT, counts=(16,)), of_others, strict=True):
        assert answer["num_parameters"] == whole["num_parameters"]
        assert sum(answer["parameter_bytes"]) == sum(whole["parameter_bytes"]) - 8 * num_lacking
        assert answer["optimizer_bytes"] == whole["optimizer_bytes"] - 8 * num_lacking


def test_a_loop_of_ones_own_trains_a_split_head_on_uneven_samples(rank_pool: Pools) -> None:
    answers = rank_pool("torch", 2).run("tests.multiprocess.own_loop:train_head", sizes={"data": 2})
    expected = answers[0]["alone"]
    for answer in answers:
        assert answer["state"].keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(answer["state"][name], value, rtol=1e-9, atol=1e-12, err_msg=name)
    num_lacking = [answer["num_whole"] - answer["num_held"] for answer in answers]
    assert num_lacking == [12 * 49 + 12 * 18 + 9 + 90, 13 * 49 + 13 * 18 + 9 + 90]


def learned(tensors: Arrays) -> Arrays:
    return {name: value for name, value in tensors.items() if not name.endswith("num_batches_tracked")}


def assert_equals_one_device(answers: list[dict[str, Any]], num_shards: int, **rest: Any) -> None:
    losses, expected = cases.train_alone(num_shards=num_shards, **{**DIGITS, **rest})
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-9)
        assert difference(learned(answer["states"][-1].network), learned(expected)) < (1e-9, "")


@pytest.mark.parametrize("head", [OUT, IN, MIXED], ids=["out", "in", "mixed"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_head_split_along_data_equals_one_device(
    run_region: Callable[..., Any], head: Mapping[str, Any], size: int
) -> None:
    if size == 4 and head is IN:
        head = {**head, "head.1": {"split": "in_channels", "partition": "round_robin"}}
    assert_equals_one_device(run_region({"data": size}, head), size)


@pytest.mark.parametrize(
    "parts",
    [
        {"strategy": {"accumulation": 2}, "counts": (16, 9, 16)},
        {"strategy": {"optimizer_sharding": True, "accumulation": 2}, "optimizer": {"name": "adamw", "clip_norm": 0.3}},
        {"counts": (16, 1, 3), "strategy": {"bucket_bytes": 400}, "train": {"channels_last": False}},
    ],
    ids=["accumulation", "sharded-adamw-clipped", "ragged"],
)
@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 2, "channel": 2}], ids=str)
def test_what_is_combined_with_a_split_head_stays_exact(
    run_region: Callable[..., Any], sizes: Mapping[str, int], parts: dict[str, Any]
) -> None:
    channel = {"features.0": "out_channels", "features.3": "out_channels"} if "channel" in sizes else {}
    answers = run_region(sizes, OUT, channel=channel, **parts)
    assert_equals_one_device(answers, 2, **parts)
    if parts.get("optimizer", {}).get("clip_norm"):
        assert answers[0]["norms"][0] > 0.3
        assert len({answer["norms"][0] for answer in answers}) == 1

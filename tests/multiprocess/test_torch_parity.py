"""Any number of ranks, accumulation and sharding on PyTorch give what one device gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from convmesh.engines.contract import Arrays
from tests.multiprocess import torch_cases as cases
from tests.multiprocess.ranks import RankPool

pytestmark = [pytest.mark.torch, pytest.mark.multiprocess]

Pools = Callable[[str, int], RankPool]
TRAIN = "tests.multiprocess.torch_cases:train"
FULL, RAGGED = (16, 16, 16), (16, 16, 3)


def relative_error(got: Arrays, expected: Arrays) -> float:
    """The largest of all tensors' ``|got - expected| / |expected|``."""
    assert got.keys() == expected.keys()
    return max(
        float(np.linalg.norm((got[name] - value).astype(float)) / (np.linalg.norm(value.astype(float)) or 1.0))
        for name, value in expected.items()
    )


def assert_equal_states(states: list[Arrays]) -> None:
    for state in states[1:]:
        for name, value in states[0].items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)


@pytest.mark.parametrize("sharding", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("optimizer", [{}, {"name": "adamw"}, {"clip_norm": 0.5}], ids=["sgd", "adamw", "clipped"])
def test_three_updates_equal_one_device(
    rank_pool: Pools, num_ranks: int, accumulation: int, sharding: bool, optimizer: dict[str, Any]
) -> None:
    if sharding and num_ranks == 1:
        pytest.skip("nothing to shard")
    # The last update of 3 samples leaves a rank of four without any.
    parts: dict[str, Any] = {
        "counts": RAGGED,
        "optimizer": optimizer,
        "strategy": {"accumulation": accumulation, "optimizer_sharding": sharding},
        "train": {"label_smoothing": 0.1},
    }
    answers = rank_pool("torch", num_ranks).run(TRAIN, **parts)
    losses, parameters = cases.train_plainly(cases.new_network(), **parts)
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], losses, rtol=1e-5)
        assert relative_error(answer["local"], parameters) < 1e-5
    assert_equal_states([answer["local"] for answer in answers])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_batch_norm_equals_the_same_micro_batches_on_one_device(
    rank_pool: Pools, num_ranks: int, accumulation: int
) -> None:
    answers = rank_pool("torch", num_ranks).run(
        TRAIN,
        counts=(16, 16, 7),
        network_args={"batch_norm": True},
        dtype="float64",
        optimizer={"weight_decay": 0.0},
        strategy={"accumulation": accumulation},
    )
    losses, expected = cases.train_plainly_with_norm(
        cases.new_network(batch_norm=True), counts=(16, 16, 7), num_shards=num_ranks, accumulation=accumulation
    )
    assert_equal_states([answer["local"] for answer in answers])
    got = {name: value for name, value in answers[0]["local"].items() if not name.endswith("num_batches_tracked")}
    expected = {name: value for name, value in expected.items() if not name.endswith("num_batches_tracked")}
    np.testing.assert_allclose(answers[0]["losses"], losses, rtol=1e-5)
    assert relative_error(got, expected) < 1e-9
    # The last update fits into one micro-batch of each rank.
    assert answers[0]["local"]["bn1.num_batches_tracked"] == 2 * accumulation + 1


def test_batch_norm_of_a_rank_without_samples(rank_pool: Pools) -> None:
    answers = rank_pool("torch", 4).run(
        TRAIN, counts=(16, 3), network_args={"batch_norm": True}, optimizer={"weight_decay": 0.0}
    )
    assert_equal_states([answer["local"] for answer in answers])
    _, expected = cases.train_plainly_with_norm(
        cases.new_network(batch_norm=True), counts=(16, 3), num_shards=4, accumulation=1
    )
    running = answers[0]["local"]["bn2.running_mean"]
    np.testing.assert_allclose(running, expected["bn2.running_mean"], rtol=1e-4, atol=1e-6)


def test_unequal_initial_weights_become_those_of_the_first_rank(rank_pool: Pools) -> None:
    answers = rank_pool("torch", 2).run(TRAIN, counts=(), seed_by_rank=True, network_args={"batch_norm": True})
    first = cases.new_network(1, batch_norm=True).state_dict()
    for answer in answers:
        for name, value in answer["local"].items():
            np.testing.assert_array_equal(value, first[name].numpy(), err_msg=name)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("optimizer", [{}, {"name": "adamw"}], ids=["sgd", "adamw"])
def test_a_sharded_state_continues_on_any_number_of_ranks(
    rank_pool: Pools, optimizer: dict[str, Any], channels_last: bool
) -> None:
    parts: dict[str, Any] = {
        "optimizer": optimizer,
        "train": {"channels_last": channels_last, "weight_average": 0.9},
    }
    whole = rank_pool("torch", 1).run(TRAIN, counts=(16,) * 4, **parts)[0]["state"]
    sharded = {"optimizer_sharding": True}
    half = rank_pool("torch", 2).run(TRAIN, counts=(16,) * 2, strategy=sharded, **parts)[0]["state"]
    for name, array in half.optimizer.items():
        assert array.shape == half.network[name.partition("/")[2]].shape
        assert array.flags.c_contiguous
    for num_ranks, strategy in ((1, {}), (2, sharded), (4, sharded)):
        end = rank_pool("torch", num_ranks).run(
            TRAIN, counts=(16,) * 2, start=half, first_update=2, strategy=strategy, **parts
        )[0]["state"]
        assert end.num_updates == 4
        assert relative_error(end.network, whole.network) < 1e-5
        assert relative_error(end.optimizer, whole.optimizer) < 1e-4
        assert relative_error(end.average, whole.average) < 1e-5


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_resumed_run_repeats_every_bit(rank_pool: Pools, num_ranks: int) -> None:
    parts: dict[str, Any] = {
        "network_args": {"batch_norm": True},
        "optimizer": {"name": "adamw"},
        "strategy": {"optimizer_sharding": True, "accumulation": 2, "bucket_bytes": 100_000},
    }
    pool = rank_pool("torch", num_ranks)
    whole = pool.run(TRAIN, counts=(16, 16, 16, 7), **parts)[0]["state"]
    half = pool.run(TRAIN, counts=(16, 16), **parts)[0]["state"]
    resumed = pool.run(TRAIN, counts=(16, 7), start=half, first_update=2, **parts)[0]["state"]
    assert_equal_states([whole.network, resumed.network])
    assert_equal_states([whole.optimizer, resumed.optimizer])


@pytest.mark.parametrize(("reduction", "bound"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_half_gradients_send_half_the_bytes_and_round(rank_pool: Pools, reduction: str, bound: float) -> None:
    parts: dict[str, Any] = {"precision": {"gradient_reduction": reduction}}
    answers = rank_pool("torch", 2).run(TRAIN, counts=FULL, **parts)
    _, parameters = cases.train_plainly(cases.new_network(), counts=FULL)
    assert_equal_states([answer["local"] for answer in answers])
    assert 1e-7 < relative_error(answers[0]["local"], parameters) < bound
    sent = answers[0]["collectives"][0].num_bytes - 4 * len(parameters)
    assert sent == 2 * answers[0]["num_parameters"]


def test_each_rank_holds_its_part_of_the_optimizer(rank_pool: Pools) -> None:
    answers = rank_pool("torch", 4).run(TRAIN, optimizer={"name": "adamw"}, strategy={"optimizer_sharding": True})
    slice_size = -(-answers[0]["num_parameters"] // 4)
    for answer in answers:
        assert answer["held_bytes"] == answer["optimizer_bytes"] <= 2 * 4 * slice_size
    assert sum(answer["held_bytes"] for answer in answers) == 2 * 4 * answers[0]["num_parameters"]

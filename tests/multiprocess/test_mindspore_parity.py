"""Any number of ranks, accumulation and sharding on MindSpore give what one device gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore")

from convmesh.engines import load_engine
from convmesh.engines.contract import Arrays, Engine
from tests.multiprocess import mindspore_cases as cases
from tests.multiprocess.ranks import RankPool

pytestmark = [pytest.mark.mindspore, pytest.mark.multiprocess, pytest.mark.timeout(300)]

Pools = Callable[[str, int], RankPool]
TRAIN = "tests.multiprocess.mindspore_cases:train"
FULL, RAGGED, LONELY = (16, 16, 16), (16, 16, 3), (16, 16, 1)
WITH_NORM: dict[str, Any] = {"model": {"args": {"batch_norm": True}}}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Engine]:
    engine = load_engine("mindspore")
    engine.start(cases.single_world())
    yield engine
    engine.stop()


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


CLIPPED: dict[str, Any] = {"counts": RAGGED, "optimizer": {"clip_norm": 0.5}, "train": {"label_smoothing": 0.1}}


@pytest.fixture(scope="module")
def clipped_alone(one_rank: Engine) -> dict[str, Any]:
    return cases.train(one_rank, cases.single_world(), **CLIPPED)


@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize("sharding", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_three_updates_equal_one_device(
    rank_pool: Pools, clipped_alone: dict[str, Any], accumulation: int, sharding: bool, shared_memory: bool
) -> None:
    expected = clipped_alone
    strategy = {"accumulation": accumulation, "optimizer_sharding": sharding, "bucket_bytes": 100_000}
    answers = rank_pool("mindspore", 2).run(
        TRAIN, timeout_seconds=120, strategy=strategy, shared_memory=shared_memory, **CLIPPED
    )
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], expected["losses"], rtol=1e-5)
        np.testing.assert_allclose(answer["norms"], expected["norms"], rtol=1e-5)
        assert relative_error(answer["local"], expected["local"]) < 1e-5
        assert relative_error(answer["state"].optimizer, expected["state"].optimizer) < 1e-5
    assert_equal_states([answer["local"] for answer in answers])


def test_collectives_are_those_that_were_planned(rank_pool: Pools) -> None:
    strategy = {"bucket_bytes": 100_000, "optimizer_sharding": True}
    answer = rank_pool("mindspore", 2).run(
        TRAIN, timeout_seconds=120, counts=(16,), strategy=strategy, shared_memory=False, **WITH_NORM
    )[0]
    # From the last: fc and conv3's norm, conv3.weight of 184 KB, and all before it.
    num_bytes = 4 * answer["num_parameters"]
    expected = [("gradients", 3, num_bytes), ("parameters", 3, num_bytes), ("buffers", 1, 4 * 2 * (32 + 64 + 80))]
    assert [(count.purpose, count.number, count.num_bytes) for count in answer["collectives"][0]] == expected


def test_the_compiler_fuses_each_bucket_into_one(rank_pool: Pools, tmp_path: Path) -> None:
    answers = rank_pool("mindspore", 2).run(
        "tests.multiprocess.mindspore_cases:profiled_sums",
        timeout_seconds=120,
        folder=str(tmp_path),
        buckets=(3, 2, 2, 2, 1, 1, 1),
    )
    for answer in answers:
        assert answer["number"] == answer["planned"] == 3
        assert answer["sums"] == [[2.0 * index + 1] * (index + 1) for index in range(7)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_adamw_on_shards_equals_one_device(rank_pool: Pools, one_rank: Engine, num_ranks: int) -> None:
    parts: dict[str, Any] = {"optimizer": {"name": "adamw"}, "counts": FULL}
    answers = rank_pool("mindspore", num_ranks).run(
        TRAIN, strategy={"optimizer_sharding": True}, timeout_seconds=120, **parts
    )
    expected = cases.train(one_rank, cases.single_world(), **parts)
    for answer in answers:
        assert relative_error(answer["local"], expected["local"]) < 1e-5
    assert sum(answer["optimizer_bytes"] for answer in answers) == expected["optimizer_bytes"]
    assert max(answer["optimizer_bytes"] for answer in answers) - expected["optimizer_bytes"] / num_ranks <= 4 * 2


def test_a_rank_without_samples_takes_part(rank_pool: Pools, one_rank: Engine) -> None:
    answers = rank_pool("mindspore", 2).run(TRAIN, timeout_seconds=120, counts=LONELY)
    expected = cases.train(one_rank, cases.single_world(), counts=LONELY)
    np.testing.assert_allclose(answers[1]["losses"], expected["losses"], rtol=1e-5)
    assert relative_error(answers[1]["local"], expected["local"]) < 1e-5
    assert_equal_states([answer["local"] for answer in answers])


def test_batch_norm_buffers_are_equal_and_leave_out_fillers(rank_pool: Pools) -> None:
    answers = rank_pool("mindspore", 2).run(TRAIN, timeout_seconds=120, counts=LONELY, **WITH_NORM)
    assert_equal_states([answer["local"] for answer in answers])
    before, after = answers[0]["after"][1], answers[0]["after"][2]
    assert any(not np.array_equal(before[name], after[name]) for name in after if name.endswith("running_mean"))
    assert all(np.isfinite(value).all() for value in after.values())


def test_unequal_initial_weights_become_those_of_rank_0(rank_pool: Pools) -> None:
    differing = rank_pool("mindspore", 2).run(TRAIN, counts=(16,), seed_by_rank=True, timeout_seconds=120)
    equal = rank_pool("mindspore", 2).run(TRAIN, counts=(16,), timeout_seconds=120)
    for answer in differing:
        assert_equal_states([answer["local"], equal[0]["local"]])


@pytest.mark.parametrize("sharding", [False, True])
def test_overflow_on_one_rank_skips_on_all_and_changes_nothing(rank_pool: Pools, sharding: bool) -> None:
    answers = rank_pool("mindspore", 2).run(
        TRAIN,
        timeout_seconds=120,
        counts=FULL,
        poisoned=(1, 1),
        strategy={"optimizer_sharding": sharding},
        train={"weight_average": 0.5},
        **WITH_NORM,
    )
    for answer in answers:
        assert answer["overflows"] == [False, True, False]
        assert_equal_states([answer["after"][0], answer["after"][1]])
        assert answer["state"].num_updates == 2
    assert_equal_states([answer["local"] for answer in answers])
    assert_equal_states([answer["state"].average for answer in answers])


def test_float16_overflows_by_its_loss_scale_and_then_trains(rank_pool: Pools) -> None:
    answers = rank_pool("mindspore", 2).run(
        TRAIN,
        timeout_seconds=120,
        counts=FULL,
        loss_scales=(2.0**40, 2.0**8, 2.0**8),
        precision={"compute": "float16"},
        **WITH_NORM,
    )
    assert [answer["overflows"] for answer in answers] == [[True, False, False]] * 2
    assert_equal_states([answer["local"] for answer in answers])


def test_half_precision_gradients_are_near(rank_pool: Pools, one_rank: Engine) -> None:
    precision = {"gradient_reduction": "float16"}
    answers = rank_pool("mindspore", 2).run(TRAIN, timeout_seconds=120, counts=FULL, precision=precision)
    expected = cases.train(one_rank, cases.single_world(), counts=FULL)
    assert 0 < relative_error(answers[0]["local"], expected["local"]) < 2e-3
    gradients = next(count for count in answers[0]["collectives"][-1] if count.purpose == "gradients")
    assert gradients.num_bytes == 2 * expected["num_parameters"]


def test_sharded_state_goes_on_with_another_number_of_ranks(rank_pool: Pools, one_rank: Engine) -> None:
    optimizer = {"name": "adamw"}
    first = rank_pool("mindspore", 2).run(
        TRAIN, timeout_seconds=120, counts=(16, 16), optimizer=optimizer, strategy={"optimizer_sharding": True}
    )
    alone = cases.train(
        one_rank, cases.single_world(), counts=(16,), optimizer=optimizer, start=first[0]["state"], first_update=2
    )
    whole = cases.train(one_rank, cases.single_world(), counts=FULL, optimizer=optimizer)
    assert relative_error(alone["local"], whole["local"]) < 1e-5
    again = rank_pool("mindspore", 2).run(
        TRAIN,
        timeout_seconds=120,
        counts=(16,),
        optimizer=optimizer,
        strategy={"optimizer_sharding": True},
        start=first[0]["state"],
        first_update=2,
    )
    assert relative_error(again[1]["local"], whole["local"]) < 1e-5


def test_evaluation_uses_the_average(rank_pool: Pools, one_rank: Engine) -> None:
    parts: dict[str, Any] = {"train": {"weight_average": 0.9}, "counts": FULL}
    answers = rank_pool("mindspore", 2).run(TRAIN, timeout_seconds=120, **parts)
    averaged = cases.train(one_rank, cases.single_world(), **parts)
    plain = cases.train(one_rank, cases.single_world(), counts=FULL)
    np.testing.assert_allclose(answers[0]["evaluation"], averaged["evaluation"], rtol=1e-5)
    assert averaged["evaluation"][0] != pytest.approx(plain["evaluation"][0], rel=1e-4)
    assert_equal_states([averaged["local"], plain["local"]])

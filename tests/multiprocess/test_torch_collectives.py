"""What ranks of PyTorch communicate, and how they stay equal when one of them differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("torch")

from convmesh.plan.collectives import count_buckets
from tests.multiprocess.ranks import RankPool
from tests.multiprocess.test_torch_parity import assert_equal_states

pytestmark = [pytest.mark.torch, pytest.mark.multiprocess]

Pools = Callable[[str, int], RankPool]


@pytest.mark.parametrize(("bucket_bytes", "num_buckets"), [(1, 11), (80_000, 2), (2**25, 1)])
def test_the_counts_are_what_gloo_saw_and_the_closed_form(
    rank_pool: Pools, bucket_bytes: int, num_buckets: int
) -> None:
    answers = rank_pool("torch", 2).run("tests.multiprocess.torch_cases:count_with_profiler", bucket_bytes=bucket_bytes)
    for answer in answers:
        told = {(count.purpose, count.kind): count for count in answer["told"]}
        assert count_buckets(answer["parameter_bytes"], bucket_bytes) == num_buckets
        # One more all-reduce tells which parameters are in use.
        assert told["gradients", "all-reduce"].number == num_buckets + 1
        assert told["gradients", "all-reduce"].num_bytes == sum(answer["parameter_bytes"]) + 4 * 11
        assert told["buffers", "all-reduce"].number == 1
        assert told["buffers", "all-reduce"].num_bytes == 2 * 4 * (32 + 64 + 80)
        assert told["parameters", "broadcast"].number == 2
        seen = Counter(answer["seen"])
        assert seen == {"gloo:all_reduce": num_buckets + 2, "gloo:broadcast": 2}


@pytest.mark.parametrize("compute", ["float16", "float32"])
def test_an_overflow_on_one_rank_skips_the_update_on_all(rank_pool: Pools, compute: str) -> None:
    answers = rank_pool("torch", 2).run("tests.multiprocess.torch_cases:overflow_on", rank=1, compute=compute)
    for answer in answers:
        assert answer["overflows"] == [False, True, False]
        first, skipped, last = answer["states"]
        assert_equal_states([first.network, skipped.network])
        assert_equal_states([first.optimizer, skipped.optimizer])
        assert [state.num_updates for state in answer["states"]] == [1, 1, 2]
        assert all(np.isfinite(value).all() for value in last.network.values())
        assert np.abs(last.network["fc.weight"] - first.network["fc.weight"]).max() > 0
    assert_equal_states([answer["states"][2].network for answer in answers])


def test_parameters_used_on_one_rank_or_none_neither_hang_nor_drift(rank_pool: Pools) -> None:
    answers = rank_pool("torch", 2).run("tests.multiprocess.torch_cases:partly_used", timeout_seconds=20)
    assert_equal_states([answer["after"] for answer in answers])
    before, after = answers[0]["before"], answers[0]["after"]
    for branch, changed in ((0, True), (1, True), (2, False)):
        name = f"branches.{branch}.weight"
        assert bool((before[name] != after[name]).any()) is changed


def test_networks_that_differ_between_ranks_are_refused_on_all(rank_pool: Pools) -> None:
    answers = rank_pool("torch", 2).run("tests.multiprocess.torch_cases:built_differently")
    assert len(set(answers)) == 1
    assert "ModelError: ranks 0 and 1 have built different networks" in answers[0]
    assert "fc.weight" in answers[0]


@pytest.mark.parametrize("sharding", [False, True])
def test_channels_last_survives_buckets_and_shards(rank_pool: Pools, sharding: bool) -> None:
    for answer in rank_pool("torch", 2).run("tests.multiprocess.torch_cases:memory_formats", sharding=sharding):
        assert answer == {"channels_last": [True] * 6, "warnings": []}

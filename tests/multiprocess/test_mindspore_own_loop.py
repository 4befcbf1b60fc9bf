"""Split networks in people's own loops on MindSpore, and ranks that must not be mixed up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

pytest.importorskip("mindspore")

from tests.multiprocess.ranks import RankPool

pytestmark = [pytest.mark.mindspore, pytest.mark.multiprocess]

Pools = Callable[[str, int], RankPool]
CASES = "tests.multiprocess.mindspore_own_loop"


@pytest.mark.parametrize("sizes", [{"channel": 2}, {"data": 2}, {"data": 2, "channel": 2}], ids=str)
def test_a_loop_of_ones_own_equals_one_device(rank_pool: Pools, sizes: Mapping[str, int]) -> None:
    num_ranks = int(np.prod(list(sizes.values())))
    for answer in rank_pool("mindspore", num_ranks).run(f"{CASES}:train", timeout_seconds=200, sizes=sizes):
        assert answer["state"].keys() == answer["alone"].keys()
        for name, value in answer["alone"].items():
            np.testing.assert_allclose(answer["state"][name], value, rtol=1e-4, atol=1e-6, err_msg=name)
        assert (answer["num_held"] < answer["num_whole"]) == ("channel" in sizes)


def test_mistakes_in_a_loop_of_ones_own_are_told(rank_pool: Pools) -> None:
    for not_split, twice, too_few, other in rank_pool("mindspore", 2).run(f"{CASES}:mistakes", timeout_seconds=100):
        assert "this network is not split" in not_split
        assert "split already" in twice
        assert "not as many gradients" in too_few
        assert "does not fit the ranks that were started (got 2, expected 4)" in other


def test_ranks_whose_graphs_differ_are_stopped(rank_pool: Pools) -> None:
    for message in rank_pool("mindspore", 2).run(f"{CASES}:unlike"):
        assert "MindSpore has made other graphs" in message


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replicas_are_made_equal(rank_pool: Pools, num_ranks: int) -> None:
    for first, second in rank_pool("mindspore", num_ranks).run(f"{CASES}:from_first"):
        np.testing.assert_array_equal(first, np.full((2, 3), 1.0))
        np.testing.assert_array_equal(second, np.full(4, 5.0))

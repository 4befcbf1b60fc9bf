"""Balanced sampling: the global batches of random sampling, dealt so that the ranks' costs are nearly equal."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.data.balanced import BalancedSampler, deal_by_cost
from convmesh.data.batching import Batching
from convmesh.data.samplers import RandomSampler
from convmesh.errors import ConfigError


def _costs(number: int) -> np.ndarray:
    return np.random.default_rng(3).lognormal(sigma=1.0, size=number)


def test_each_global_batch_is_that_of_random_sampling() -> None:
    batching = Batching(16, 4)
    balanced, plain = BalancedSampler(_costs(100), batching, seed=5), RandomSampler(100, batching, seed=5)

    for update in range(plain.num_updates):
        dealt = np.concatenate([part for shard in range(4) for part in balanced.micro_batches(1, update, shard)])
        assert sorted(dealt) == sorted(plain.global_ids(1, update))


def test_ranks_finish_together_where_random_ones_do_not() -> None:
    costs_N, batching = _costs(4000), Batching(64, 4)

    def slowest_over_mean(sampler: RandomSampler) -> float:
        sums_SR = np.array(
            [
                [costs_N[np.concatenate(sampler.micro_batches(0, update, shard))].sum() for shard in range(4)]
                for update in range(sampler.num_full_updates)
            ]
        )
        return float((sums_SR.max(axis=1) / sums_SR.mean(axis=1)).mean())

    assert slowest_over_mean(RandomSampler(4000, batching)) > 1.25
    assert slowest_over_mean(BalancedSampler(costs_N, batching)) < 1.1


@settings(max_examples=80, deadline=None)
@given(costs=st.lists(st.floats(0, 100), min_size=1, max_size=60), data=st.data())
def test_parts_have_their_sizes_and_every_sample_comes_once(costs: list[float], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(costs)))
    sizes = [first, len(costs) - first]

    parts = deal_by_cost(np.array(costs), sizes)

    assert [len(part) for part in parts] == sizes
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(costs)))


def test_micro_batches_have_their_sizes_and_nearly_equal_costs() -> None:
    costs_B = np.array([9.0, 1, 1, 1, 9, 1])

    parts = deal_by_cost(costs_B, [3, 3])

    assert [len(part) for part in parts] == [3, 3]
    assert [costs_B[part].sum() for part in parts] == [11, 11]


def test_a_copy_in_another_process_deals_the_same() -> None:
    sampler = BalancedSampler(_costs(50), Batching(8, 2, 2), seed=1)
    first = sampler.micro_batches(0, 3, 1)

    again = pickle.loads(pickle.dumps(sampler)).micro_batches(0, 3, 1)  # noqa: S301 - our own bytes

    assert [part.tolist() for part in first] == [part.tolist() for part in again]


def test_costs_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="one number from 0 each"):
        BalancedSampler(np.array([1.0, -1.0]), Batching(2))

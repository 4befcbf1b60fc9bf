from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convmesh.data.adapters import ShardBatches, ShardIds
from convmesh.data.samplers import Batching, make_sampler
from convmesh.errors import ConfigError

LABELS = (np.arange(50) % 3).astype(np.int32)
KINDS = ("sequential", "random", "stratified")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last_batch", ["keep", "drop"])
def test_batches_are_the_samplers(kind: Any, last_batch: Any) -> None:
    sampler = make_sampler(kind, LABELS, batching=Batching(12, 2, 3, last_batch))
    batches = ShardBatches(sampler, shard=1)
    ids = ShardIds(sampler, shard=1)
    for epoch, first in ((0, 0), (3, 2), (3, 4), (3, 5)):
        batches.set_epoch(epoch, first_update=first)
        ids.set_epoch(epoch, first_update=first)
        expected = [
            part.tolist()
            for update in range(first, sampler.num_updates)
            for part in sampler.micro_batches(epoch, update, 1)
        ]
        assert list(batches) == expected
        assert len(batches) == len(expected)
        assert list(ids) == [i for part in expected for i in part]
        assert len(ids) == sum(map(len, expected))


def test_first_update_of_the_first_epoch() -> None:
    sampler = make_sampler("random", LABELS, batching=Batching(10, 2))
    assert list(ShardBatches(sampler, shard=0, first_update=3)) == list(ShardBatches(sampler, shard=0))[3:]
    assert len(ShardIds(sampler, shard=0, first_update=3)) == 10


@pytest.mark.parametrize("make", [ShardBatches, ShardIds])
def test_loops_that_would_hang_are_refused(make: Any) -> None:
    sampler = make_sampler("random", LABELS[:17], batching=Batching(8, 4))
    with pytest.raises(ConfigError, match=r"would hang \(got 0 and 1\).*last_batch=\"drop\""):
        make(sampler, shard=0)
    make(make_sampler("random", LABELS[:17], batching=Batching(8, 4, last_batch="drop")), shard=0)
    make(make_sampler("random", LABELS[:20], batching=Batching(8, 4)), shard=0)

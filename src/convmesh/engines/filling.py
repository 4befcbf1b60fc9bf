"""Equally many micro-batches on all ranks of the data axis, where their forwards communicate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from convmesh.config import RunConfig
from convmesh.engines.contract import Batch


def filled(micro_batches: Sequence[Batch], *, run: RunConfig, num_shards: int, global_count: int) -> list[Batch]:
    """Adds micro-batches of one sample of weight 0 to those of an update with fewer samples than others.

    Samples are spread over the shards within one of each other and fill as few micro-batches as they can
    (`convmesh.data.samplers.Sampler`), so the largest number follows from the size of the global batch.

    Args:
        micro_batches: Of this rank.
        run: The run.
        num_shards: Size of the data axis.
        global_count: Samples of the global batch.

    Returns:
        As many micro-batches as the shard with the most has.
    """
    size = run.train.global_batch // (num_shards * run.strategy.accumulation)
    number = max(1, math.ceil(math.ceil(global_count / num_shards) / size))
    first = micro_batches[0]
    filler = Batch(first.images_NHWC[:1], first.labels_N[:1], np.zeros(1, dtype=np.float32))
    return [*micro_batches, *[filler] * (number - len(micro_batches))]

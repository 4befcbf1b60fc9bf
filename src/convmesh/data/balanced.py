"""Balanced sampling: samples of unequal cost are dealt so that the ranks finish a global batch together.

Legend: N samples, B samples of a global batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.data.batching import Batching, Ids, even_bounds
from convmesh.data.samplers import RandomSampler
from convmesh.errors import ConfigError

Costs = npt.NDArray[np.float64]


class BalancedSampler(RandomSampler):
    """The global batches of random sampling, each dealt to the shards so that their costs are nearly equal.

    Who computes a sample changes, and nothing else: every update has the samples that ``RandomSampler`` gives it. Each
    shard gets equally many of them, as in every sampler.

    Args:
        costs_N: Expected cost of every sample, in any unit, from 0.
        batching: Sizes of the global batch and its parts.
        seed: Seed of the order.

    Raises:
        ConfigError: As ``Sampler``, or if a cost is no number from 0.
    """

    def __init__(self, costs_N: Costs, batching: Batching, *, seed: int = 0) -> None:
        costs_N = np.asarray(costs_N, np.float64)
        if costs_N.ndim != 1 or not np.isfinite(costs_N).all() or (costs_N < 0).any():
            raise ConfigError(
                "the costs of samples are not one number from 0 each", got=f"{costs_N.dtype} of shape {costs_N.shape}"
            )
        super().__init__(len(costs_N), batching, seed=seed)
        self._costs_N = costs_N
        self._dealt: tuple[int, dict[int, list[Ids]]] = (0, {})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_dealt": (0, {})}

    def _micro_batches(self, epoch: int, update: int, shard: int) -> list[npt.NDArray[Any]]:
        own, size = self._shards(epoch, update)[shard], self.batching.micro_batch
        sizes = [min(size, len(own) - first) for first in range(0, len(own), size)]
        return [own[part] for part in deal_by_cost(self._costs_N[own], sizes)]

    def _shards(self, epoch: int, update: int) -> list[Ids]:
        """Samples of each shard; kept for the whole epoch, since some ask shard after shard for all updates."""
        kept = self._dealt
        if kept[0] != epoch:
            kept = self._dealt = (epoch, {})
        if update not in kept[1]:
            kept[1][update] = self._deal(self._global_ids(self._plan(epoch), update))
        return kept[1][update]

    def _deal(self, ids: npt.NDArray[Any]) -> list[Ids]:
        num_shards = self.batching.num_shards
        bounds = [even_bounds(len(ids), num_parts=num_shards, part=shard) for shard in range(num_shards)]
        return [ids[part] for part in deal_by_cost(self._costs_N[ids], [end - first for first, end in bounds])]


def deal_by_cost(costs_B: Costs, sizes: Sequence[int]) -> list[Ids]:
    """Deals samples to parts of given sizes and nearly equal cost.

    From the costliest down, each goes to the part that has least so far and has room (Graham, "Bounds on
    multiprocessing timing anomalies", 1969, with limited numbers).

    Args:
        costs_B: Cost of each sample.
        sizes: Number of samples of each part; together as many as there are.

    Returns:
        Places of the samples of each part, rising.
    """
    if len(sizes) == 1:
        return [np.arange(len(costs_B))]
    room, part_B = list(sizes), np.zeros(len(costs_B), dtype=np.int64)
    with_room = [(0.0, part) for part, size in enumerate(sizes) if size]
    for place in np.argsort(-costs_B, kind="stable").tolist():
        cost, part = heapq.heappop(with_room)
        part_B[place] = part
        room[part] -= 1
        if room[part]:
            heapq.heappush(with_room, (cost + float(costs_B[place]), part))
    return [np.flatnonzero(part_B == part) for part in range(len(sizes))]

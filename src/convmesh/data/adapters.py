"""Samplers for a training loop of your own: a batch sampler for PyTorch, a sampler for MindSpore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from convmesh.data.batching import even_bounds
from convmesh.data.samplers import Sampler
from convmesh.errors import ConfigError


class ShardBatches:
    """The micro-batches of one shard as lists of sample ids.

    For ``torch.utils.data.DataLoader(dataset, batch_sampler=ShardBatches(sampler, shard=rank))``. Call ``set_epoch``
    before each epoch. One step of the loop is one micro-batch; ``accumulation`` of them make an update.

    Args:
        sampler: Any sampler.
        shard: Position on the data axis: the rank, in plain data parallel.
        first_update: Update of the first epoch to start at, to continue an interrupted run.

    Raises:
        ConfigError: If shards would have unequal numbers of micro-batches in a ragged last update.
    """

    def __init__(self, sampler: Sampler[Any], *, shard: int, first_update: int = 0) -> None:
        _refuse_unequal(sampler)
        self.sampler = sampler
        self.shard = shard
        self.epoch = 0
        self.first_update = first_update

    def set_epoch(self, epoch: int, *, first_update: int = 0) -> None:
        """Chooses the epoch of the next iteration, and the update in it to start at."""
        self.epoch = epoch
        self.first_update = first_update

    def __iter__(self) -> Iterator[list[int]]:
        for update in range(self.first_update, self.sampler.num_updates):
            for ids in self.sampler.micro_batches(self.epoch, update, self.shard):
                yield ids.tolist()

    def __len__(self) -> int:
        sampler = self.sampler
        num_full = max(sampler.num_full_updates - self.first_update, 0) * sampler.batching.accumulation
        if sampler.num_updates == sampler.num_full_updates or self.first_update >= sampler.num_updates:
            return num_full
        return num_full + _num_tail_batches(sampler)[0]


class ShardIds:
    """The sample ids of one shard, one by one, micro-batch after micro-batch.

    For ``mindspore.dataset.GeneratorDataset(source, sampler=ShardIds(sampler, shard=rank)).batch(n)`` with n the
    micro-batch. Call ``set_epoch`` before each epoch.

    Args:
        sampler: Any sampler.
        shard: Position on the data axis: the rank, in plain data parallel.
        first_update: Update of the first epoch to start at, to continue an interrupted run.

    Raises:
        ConfigError: If shards would have unequal numbers of micro-batches in a ragged last update.
    """

    def __init__(self, sampler: Sampler[Any], *, shard: int, first_update: int = 0) -> None:
        self._batches = ShardBatches(sampler, shard=shard, first_update=first_update)

    def set_epoch(self, epoch: int, *, first_update: int = 0) -> None:
        """Chooses the epoch of the next iteration, and the update in it to start at."""
        self._batches.set_epoch(epoch, first_update=first_update)

    def __iter__(self) -> Iterator[int]:
        for ids in self._batches:
            yield from ids

    def __len__(self) -> int:
        batches = self._batches
        sampler = batches.sampler
        num_full = max(sampler.num_full_updates - batches.first_update, 0) * sampler.batching.shard_batch
        if sampler.num_updates == sampler.num_full_updates or batches.first_update >= sampler.num_updates:
            return num_full
        tail = sampler.micro_batches(batches.epoch, sampler.num_full_updates, batches.shard)
        return num_full + sum(len(ids) for ids in tail)


def _num_tail_batches(sampler: Sampler[Any]) -> tuple[int, int]:
    """Smallest and largest number of micro-batches that a shard has in the ragged last update."""
    num_shards, size = sampler.batching.num_shards, sampler.batching.micro_batch
    first, end = even_bounds(sampler.global_count(sampler.num_full_updates), num_parts=num_shards, part=0)
    smallest = end - first
    first, end = even_bounds(sampler.global_count(sampler.num_full_updates), num_parts=num_shards, part=num_shards - 1)
    return -(-smallest // size), -(-(end - first) // size)


def _refuse_unequal(sampler: Sampler[Any]) -> None:
    if sampler.num_updates == sampler.num_full_updates:
        return
    least, most = _num_tail_batches(sampler)
    if least != most:
        raise ConfigError(
            "ranks would have unequal numbers of micro-batches in the last update of an epoch, and a loop that reduces "
            "gradients in every step would hang",
            got=f"{least} and {most}",
            fix='Use Batching(..., last_batch="drop"), or another global batch',
        )

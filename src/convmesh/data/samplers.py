"""Samplers: which samples each shard computes in which micro-batch of which update.

Everything is a pure function of (seed, epoch, update, shard). The samples of a *global batch* depend on neither the
number of shards nor accumulation, so a run continues on another number of ranks with the same global batches.

Legend: N samples, C classes, M full updates per epoch, B global batch, T samples of the ragged last update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from convmesh.data.batching import Batching, Ids, eval_ids, even_bounds, spread_positions
from convmesh.data.coloring import Colours, Layout, balanced_colours
from convmesh.data.randomness import mixed_bits
from convmesh.errors import ConfigError, ConvMeshError, raise_all

__all__ = [
    "Batching",
    "RandomSampler",
    "Sampler",
    "SequentialSampler",
    "StratifiedSampler",
    "eval_ids",
    "make_sampler",
]

SamplerName = Literal["sequential", "random", "stratified", "balanced"]
Labels = npt.NDArray[np.integer[Any]]
Plan = TypeVar("Plan")

_ORDER, _SHARDS, _SHUFFLE = range(3)
"""What a stream of random numbers is for; part of its seed."""


class Sampler(ABC, Generic[Plan]):
    """Order of the samples of every epoch, and its split over shards and micro-batches.

    In a ragged last update (``last_batch="keep"``) the T samples are spread over the shards within one of each other,
    so a shard may get none, and fill as few micro-batches of the normal size as they can.

    Args:
        num_samples: Samples N of the training set.
        batching: Sizes of the global batch and its parts.
        seed: Seed of the order.

    Raises:
        ConfigError: If there are fewer samples than shards, or an epoch would have no update.
    """

    def __init__(self, num_samples: int, batching: Batching, *, seed: int = 0) -> None:
        self.num_samples = num_samples
        self.batching = batching
        self.seed = seed
        self.num_full_updates, self._num_tail = divmod(num_samples, batching.global_batch)
        self._cached: tuple[int, Plan] | None = None
        raise_all(self._mistakes())

    def _mistakes(self) -> list[ConvMeshError]:
        batching = self.batching
        if self.num_samples < batching.num_shards:
            return [
                ConfigError(
                    "there are fewer training samples than ranks on the data axis",
                    got=f"{self.num_samples} samples for {batching.num_shards} ranks",
                    fix=f"Use at most {max(self.num_samples, 1)} ranks, or more samples",
                )
            ]
        if self.num_updates == 0:
            return [
                ConfigError(
                    "an epoch has no update, because data.last_batch is drop and one global batch is not filled",
                    got=f"{self.num_samples} samples",
                    expected=f"at least {batching.global_batch}",
                    fix=f"Set data.last_batch to keep, or train.global_batch to at most {self.num_samples}",
                )
            ]
        return []

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes make their own plan: cheaper than sending it.
        return {**self.__dict__, "_cached": None}

    @property
    def num_updates(self) -> int:
        """Updates per epoch, equal on all shards."""
        return self.num_full_updates + bool(self._num_tail and self.batching.last_batch == "keep")

    @property
    def num_dropped(self) -> int:
        """Samples per epoch that no shard computes."""
        return self._num_tail if self.batching.last_batch == "drop" else 0

    def global_count(self, update: int) -> int:
        """Samples of one global batch over all shards and micro-batches."""
        self._check(update=update)
        return self.batching.global_batch if update < self.num_full_updates else self._num_tail

    def global_ids(self, epoch: int, update: int) -> Ids:
        """The samples of one global batch; the same for every number of shards and micro-batches.

        Args:
            epoch: From 0.
            update: Update within the epoch.

        Returns:
            Different sample ids, in no order that means anything.
        """
        self._check(update=update)
        return self._global_ids(self._plan(epoch), update).astype(np.int64)

    def micro_batches(self, epoch: int, update: int, shard: int) -> tuple[Ids, ...]:
        """What one shard computes in one update.

        Args:
            epoch: From 0.
            update: Update within the epoch.
            shard: Position on the data axis.

        Returns:
            Sample ids per micro-batch; over all shards they are exactly ``global_ids``. Empty only in a ragged last
            update that has fewer samples than shards.
        """
        self._check(update=update, shard=shard)
        parts = self._micro_batches(epoch, update, shard)
        return tuple(part.astype(np.int64) for part in parts if len(part))

    def epoch_ids(self, epoch: int, shard: int) -> Ids:
        """All samples that one shard computes in one epoch, in order."""
        return self.epoch_parts(epoch, shard)[0]

    def epoch_parts(self, epoch: int, shard: int) -> tuple[Ids, Ids]:
        """All micro-batches of one shard in one epoch, as ``micro_batches`` gives them but faster.

        Args:
            epoch: From 0.
            shard: Position on the data axis.

        Returns:
            The samples in order, and the number of samples of each micro-batch.
        """
        self._check(shard=shard)
        full = self._full_updates(epoch, shard).astype(np.int64)
        tail = (
            self.micro_batches(epoch, self.num_updates - 1, shard) if self.num_updates > self.num_full_updates else ()
        )
        sizes = [
            np.full(full.shape[0] * full.shape[1], full.shape[2]),
            np.array([len(part) for part in tail], dtype=int),
        ]
        return np.concatenate([full.ravel(), *tail]), np.concatenate(sizes)

    def _full_updates(self, epoch: int, shard: int) -> npt.NDArray[Any]:
        """The samples of all full updates of a shard, shape (update, micro-batch, sample)."""
        parts = [self._micro_batches(epoch, update, shard) for update in range(self.num_full_updates)]
        shape = (self.num_full_updates, self.batching.accumulation, self.batching.micro_batch)
        return np.array(parts, dtype=np.int64).reshape(shape)

    def _check(self, *, update: int = 0, shard: int = 0) -> None:
        for name, value, end in (("update", update, self.num_updates), ("shard", shard, self.batching.num_shards)):
            if not 0 <= value < end:
                raise ConfigError(f"there is no such {name}", got=value, expected=f"0 to {end - 1}")

    def _plan(self, epoch: int) -> Plan:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._make_plan(epoch))
        return self._cached[1]

    def _rng(self, epoch: int, purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, epoch, purpose))))

    def _micro_batches(self, epoch: int, update: int, shard: int) -> list[npt.NDArray[Any]]:
        """Contiguous parts of the global batch; overridden where shards are chosen otherwise."""
        batching = self.batching
        ids = self._global_ids(self._plan(epoch), update)
        first, end = even_bounds(len(ids), num_parts=batching.num_shards, part=shard)
        size = batching.micro_batch
        return [ids[start : min(start + size, end)] for start in range(first, end, size)]

    @abstractmethod
    def _make_plan(self, epoch: int) -> Plan:
        """Whatever decides the order of one epoch."""

    @abstractmethod
    def _global_ids(self, plan: Plan, update: int) -> npt.NDArray[Any]:
        """The samples of one global batch."""


class SequentialSampler(Sampler[None]):
    """Samples in their own order, the same every epoch."""

    def _make_plan(self, epoch: int) -> None:
        return None

    def _global_ids(self, plan: None, update: int) -> npt.NDArray[Any]:
        first = update * self.batching.global_batch
        return np.arange(first, first + self.global_count(update))


class RandomSampler(Sampler[npt.NDArray[Any]]):
    """Samples in a new uniformly random order every epoch."""

    def _make_plan(self, epoch: int) -> npt.NDArray[Any]:
        return _shuffled(self.num_samples, self._rng(epoch, _ORDER))

    def _global_ids(self, plan: npt.NDArray[Any], update: int) -> npt.NDArray[Any]:
        first = update * self.batching.global_batch
        return plan[first : first + self.global_count(update)]


@dataclass(frozen=True)
class _StratifiedPlan:
    """One epoch: samples of full rows and of the tail row sorted by class, their shards, and the row of each update."""

    ids_P: npt.NDArray[Any]
    tail_T: npt.NDArray[Any]
    shards_P: Colours
    tail_shards_T: Colours
    row_of_update_M: Ids


class StratifiedSampler(Sampler[_StratifiedPlan]):
    """Every global batch, shard and micro-batch holds its share of every class, as nearly as whole samples allow.

    With n samples of a class among N, in every epoch, for every N, number of shards, accumulation and class size:

    - a global batch of B samples holds floor or ceil of n x B / N of the class (of n x T / N in a ragged last one);
    - a shard holds floor or ceil of its share of the class over the epoch (of the samples not dropped);
    - a micro-batch of a full global batch that holds m of the class gets floor or ceil of m / (shards x accumulation);
    - in a ragged last update a shard holds floor or ceil of its share of the class's m samples, and its micro-batches
      floor or ceil of theirs of the shard's.

    Args:
        labels_N: Class of every sample, whole numbers.
        batching: Sizes of the global batch and its parts.
        seed: Seed of the order.

    Raises:
        ConfigError: As ``Sampler``, or if labels are not one row of whole numbers.
    """

    def __init__(self, labels_N: Labels, batching: Batching, *, seed: int = 0) -> None:
        labels_N = np.asarray(labels_N)
        if labels_N.ndim != 1 or not np.issubdtype(labels_N.dtype, np.integer):
            raise ConfigError(
                "labels are not one whole number per sample", got=f"{labels_N.dtype} of shape {labels_N.shape}"
            )
        super().__init__(len(labels_N), batching, seed=seed)
        self._labels_N, self._num_classes = _compact(labels_N)

    def _make_plan(self, epoch: int) -> _StratifiedPlan:
        rng = self._rng(epoch, _ORDER)
        ids_N, starts_C1 = self._by_class(rng)
        num_rows, num_tail = self.num_full_updates, self._num_tail
        taken_T = spread_positions(self.num_samples, num_taken=num_tail, offset=int(rng.integers(self.num_samples)))
        row_of_update_M = rng.permutation(num_rows)
        tail_starts_C1 = np.searchsorted(taken_T, starts_C1)
        starts_C1 = starts_C1 - tail_starts_C1
        tail_T = ids_N[taken_T]
        if self.batching.last_batch == "drop":
            tail_T, tail_starts_C1 = tail_T[:0], np.zeros_like(tail_starts_C1)
        layout = Layout(num_rows, self.batching.global_batch, starts_C1, tail_starts_C1)
        shards_P, tail_shards_T = balanced_colours(
            layout, num_colours=self.batching.num_shards, rng=self._rng(epoch, _SHARDS)
        )
        return _StratifiedPlan(np.delete(ids_N, taken_T), tail_T, shards_P, tail_shards_T, row_of_update_M)

    def _by_class(self, rng: np.random.Generator) -> tuple[npt.NDArray[Any], Ids]:
        """Sample ids sorted by class, classes and samples of a class in random order; where each class begins."""
        ids_N = _shuffled(self.num_samples, rng)
        place_of_class_C = rng.permutation(self._num_classes).astype(self._labels_N.dtype)
        place_N = place_of_class_C[self._labels_N[ids_N]]
        starts_C1 = np.concatenate([[0], np.cumsum(np.bincount(place_N, minlength=self._num_classes))])
        return ids_N[np.argsort(place_N, kind="stable")], starts_C1

    def _global_ids(self, plan: _StratifiedPlan, update: int) -> npt.NDArray[Any]:
        if update == self.num_full_updates:
            return plan.tail_T
        return plan.ids_P[plan.row_of_update_M[update] :: self.num_full_updates]

    def _micro_batches(self, epoch: int, update: int, shard: int) -> list[npt.NDArray[Any]]:
        plan = self._plan(epoch)
        ids = self._global_ids(plan, update)
        if update < self.num_full_updates:
            shards = plan.shards_P[plan.row_of_update_M[update] :: self.num_full_updates]
            own = ids[shards == shard]
            parts = [own[micro :: self.batching.accumulation] for micro in range(self.batching.accumulation)]
        else:
            parts = _deal(ids[plan.tail_shards_T == shard], size=self.batching.micro_batch)
        return [self._shuffle(part, epoch) for part in parts]

    def _full_updates(self, epoch: int, shard: int) -> npt.NDArray[Any]:
        plan, batching = self._plan(epoch), self.batching
        places = np.flatnonzero(plan.shards_P == shard)
        rows = places % max(self.num_full_updates, 1)
        by_row = places[np.argsort(rows, kind="stable")].reshape(self.num_full_updates, batching.shard_batch)
        dealt = plan.ids_P[by_row[plan.row_of_update_M]].reshape(-1, batching.micro_batch, batching.accumulation)
        ids = dealt.transpose(0, 2, 1)
        return np.take_along_axis(ids, np.argsort(self._shuffle_keys(ids, epoch), axis=2, kind="stable"), axis=2)

    def _shuffle(self, ids: npt.NDArray[Any], epoch: int) -> npt.NDArray[Any]:
        return ids[np.argsort(self._shuffle_keys(ids, epoch), kind="stable")]

    def _shuffle_keys(self, ids: npt.NDArray[Any], epoch: int) -> npt.NDArray[np.uint64]:
        return mixed_bits(ids, seed=(self.seed, epoch, _SHUFFLE))


def make_sampler(
    name: SamplerName,
    labels_N: Labels,
    *,
    batching: Batching,
    seed: int = 0,
    costs_N: npt.NDArray[np.float64] | None = None,
) -> Sampler[Any]:
    """Makes a sampler by the name it has in the run file.

    Args:
        name: ``"sequential"``, ``"random"``, ``"stratified"`` or ``"balanced"``.
        labels_N: Class of every sample; all but the stratified one only count them.
        batching: Sizes of the global batch and its parts.
        seed: Seed of the order.
        costs_N: Expected cost of every sample, for the balanced one; default all equal.

    Returns:
        The sampler.

    Raises:
        ConfigError: If the name is unknown, or the samples don't fit the batching.
    """
    if name == "stratified":
        return StratifiedSampler(labels_N, batching, seed=seed)
    if name == "random":
        return RandomSampler(len(labels_N), batching, seed=seed)
    if name == "sequential":
        return SequentialSampler(len(labels_N), batching, seed=seed)
    if name == "balanced":
        from convmesh.data.balanced import BalancedSampler

        return BalancedSampler(np.ones(len(labels_N)) if costs_N is None else costs_N, batching, seed=seed)
    raise ConfigError("a sampler is unknown", got=repr(name), expected="sequential, random, stratified or balanced")


def _shuffled(num_samples: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    ids = np.arange(num_samples, dtype=np.int32 if num_samples < 2**31 else np.int64)
    rng.shuffle(ids)
    return ids


def _compact(labels_N: Labels) -> tuple[Labels, int]:
    """Labels as small numbers from 0: 16 bits are sorted by radix, several times faster."""
    if labels_N.size and not 0 <= labels_N.min() <= labels_N.max() < max(2**16, 2 * len(labels_N)):
        labels_N = np.unique(labels_N, return_inverse=True)[1]
    num_classes = int(labels_N.max(initial=0)) + 1
    return labels_N.astype(np.uint16 if num_classes <= 2**16 else np.int64), num_classes


def _deal(ids: npt.NDArray[Any], *, size: int) -> list[npt.NDArray[Any]]:
    """Splits ids sorted by class into parts of ``size`` and a rest, each with its share of every class."""
    num_parts = -(-len(ids) // size)
    num_rest = len(ids) - (num_parts - 1) * size
    if num_parts < 2 or num_rest == size:
        return [ids[part::num_parts] for part in range(num_parts)]
    taken = spread_positions(len(ids), num_taken=num_rest, offset=len(ids) // 2)
    others = np.delete(ids, taken)
    return [*(others[part :: num_parts - 1] for part in range(num_parts - 1)), ids[taken]]

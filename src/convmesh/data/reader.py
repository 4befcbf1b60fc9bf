"""Readers: micro-batches of one shard as arrays, by key.

A key is (epoch, update, micro-batch). It says everything: which samples, in which order, changed how. So a worker
process reads any key on its own, and a run continues anywhere.

Legend: N samples, H rows, W columns, C channels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.config.schema import AugmentConfig, RunConfig
from convmesh.data.batching import Batching, eval_ids
from convmesh.data.channels import regroup_images
from convmesh.data.open import DataSets
from convmesh.data.randomness import sample_uniforms
from convmesh.data.samplers import Sampler, make_sampler
from convmesh.data.sources.base import ArraySource, CorruptImageError, Source
from convmesh.data.transform import (
    NUM_RESIZED_CROP,
    NUM_SHIFT,
    crop_and_flip,
    fit_image,
    random_resized_crop,
    stretch_image,
)
from convmesh.engines.contract import Batch
from convmesh.errors import DataError

Key = tuple[int, int, int]
Ids = npt.NDArray[np.int64]
Images = npt.NDArray[np.uint8]
Uniforms = npt.NDArray[np.float64]

_NO_AUGMENT = AugmentConfig()


def batching_of(run: RunConfig, *, num_shards: int) -> Batching:
    """The sizes of the batches of a run.

    Args:
        run: The run.
        num_shards: Size of the data axis.

    Raises:
        ConfigError: If the global batch doesn't divide.
    """
    return Batching(run.train.global_batch, num_shards, run.strategy.accumulation, run.data.last_batch)


def sampler_of(run: RunConfig, source: Source, *, num_shards: int) -> Sampler[Any]:
    """The sampler of a run.

    Args:
        run: The run.
        source: Its training samples.
        num_shards: Size of the data axis.

    Returns:
        The sampler.

    Raises:
        ConfigError: If samples and batch sizes don't fit.
    """
    return make_sampler(
        run.data.sampler,
        source.labels_N,
        batching=batching_of(run, num_shards=num_shards),
        seed=run.train.seed,
        costs_N=source.costs(np.arange(source.num_samples)) if run.data.sampler == "balanced" else None,
    )


class TrainReader:
    """Training micro-batches of one shard, augmented.

    In a ragged last update a shard without a sample gets one of weight 0. With ``data.on_error: skip`` a corrupt image
    is replaced by the next readable one of its class.

    Args:
        datasets: The data.
        run: The run.
        num_shards: Size of the data axis.
        shard: Position on the data axis.

    Raises:
        ConfigError: If samples and batch sizes don't fit.
    """

    def __init__(self, datasets: DataSets, run: RunConfig, *, num_shards: int, shard: int) -> None:
        self._source = datasets.train
        self._images = _ImageReader(datasets, datasets.train, augment=run.data.augment, seed=run.train.seed)
        self._skips = run.data.on_error == "skip"
        self._shard = shard
        self.sampler = sampler_of(run, datasets.train, num_shards=num_shards)
        self.num_updates = self.sampler.num_updates
        self.num_dropped = self.sampler.num_dropped

    def keys(self, epoch: int, first_update: int = 0) -> list[Key]:
        """Keys of this shard's micro-batches of an epoch, in order, from an update on."""
        accumulation = self.sampler.batching.accumulation
        num_full = self.sampler.num_full_updates
        keys = [(epoch, update, micro) for update in range(first_update, num_full) for micro in range(accumulation)]
        if first_update <= num_full < self.num_updates:
            num_micro = len(self.sampler.micro_batches(epoch, num_full, self._shard))
            keys += [(epoch, num_full, micro) for micro in range(max(num_micro, 1))]
        return keys

    def global_count(self, epoch: int, update: int) -> int:
        """Samples of a global batch over all shards."""
        return self.sampler.global_count(update)

    def own_count(self, epoch: int, update: int) -> int:
        """Samples of a global batch that this shard computes."""
        return sum(len(ids) for ids in self.sampler.micro_batches(epoch, update, self._shard))

    def read(self, key: Key) -> Batch:
        """Reads one micro-batch.

        Args:
            key: (epoch, update, micro-batch), one of ``keys``.

        Returns:
            uint8 images, int32 labels, float32 weights.

        Raises:
            DataError: If an image is corrupt and ``data.on_error`` is fail, or no image of its class is readable.
        """
        epoch, update, micro = key
        parts = self.sampler.micro_batches(epoch, update, self._shard)
        is_filler = not parts
        ids = self.sampler.global_ids(epoch, update)[:1] if is_filler else parts[micro]
        images, num_skipped = self._read_images(ids, epoch)
        weights = np.full(len(ids), 0 if is_filler else 1, dtype=np.float32)
        return Batch(images, self._source.labels_N[ids], weights, num_skipped)

    def _read_images(self, ids: Ids, epoch: int) -> tuple[Images, int]:
        if not self._skips or isinstance(self._source, ArraySource):
            return self._images.read(ids, epoch), 0
        parts, num_skipped = [], 0
        for sample_id in ids.tolist():
            image, replaced = self._read_or_replace(sample_id, epoch)
            parts.append(image)
            num_skipped += replaced
        return np.concatenate(parts), num_skipped

    def _read_or_replace(self, sample_id: int, epoch: int) -> tuple[Images, bool]:
        try:
            return self._images.read(np.array([sample_id]), epoch), False
        except CorruptImageError:
            pass
        of_class = np.flatnonzero(self._source.labels_N == self._source.labels_N[sample_id])
        for other in np.roll(of_class, -np.searchsorted(of_class, sample_id))[1:]:
            try:
                return self._images.read(np.array([other]), epoch), True
            except CorruptImageError:
                continue
        label = self._source.class_names[self._source.labels_N[sample_id]]
        raise DataError(
            f"no image of the class '{label}' can be read to replace {self._source.name_of(sample_id)}",
            fix="Mend or remove the files of this class",
        )


class EvalReader:
    """Evaluation batches of one shard; over all shards every sample comes exactly once.

    All batches have one size: the last is filled up with samples of weight 0. With ``data.on_error: skip`` a corrupt
    image gets weight 0 too, and is counted.

    Args:
        datasets: The data.
        run: The run.
        num_shards: Size of the data axis.
        shard: Position on the data axis.

    Raises:
        ConfigError: If the global batch doesn't divide.
    """

    def __init__(self, datasets: DataSets, run: RunConfig, *, num_shards: int, shard: int) -> None:
        self._source = datasets.eval
        self._images = _ImageReader(datasets, datasets.eval, augment=_NO_AUGMENT, seed=run.train.seed)
        self._skips = run.data.on_error == "skip"
        self._batch = run.train.eval_batch or batching_of(run, num_shards=num_shards).micro_batch
        self.num_samples = datasets.eval.num_samples
        self._ids = eval_ids(self.num_samples, num_shards=num_shards, shard=shard, batch=self._batch)
        # As many as the largest shard has: shards that exchange samples run together.
        self.num_updates = math.ceil(math.ceil(self.num_samples / num_shards) / self._batch)

    def keys(self) -> list[Key]:
        """Keys of this shard's batches, in order; equally many on all shards."""
        return [(0, index, 0) for index in range(self.num_updates)]

    def read(self, key: Key) -> Batch:
        """Reads one batch.

        Args:
            key: One of ``keys``.

        Returns:
            uint8 images, int32 labels, float32 weights; always of the full batch size. One that this shard has no
            samples for is all of weight 0.

        Raises:
            DataError: If an image is corrupt and ``data.on_error`` is fail.
        """
        ids = self._ids[key[1]] if key[1] < len(self._ids) else np.zeros(0, dtype=np.int64)
        num_filled = self._batch - len(ids)
        images, readable_N = self._read_images(ids)
        padding = np.zeros((num_filled, *images.shape[1:]), dtype=np.uint8)
        return Batch(
            np.concatenate([images, padding]) if num_filled else images,
            np.pad(self._source.labels_N[ids], (0, num_filled)),
            np.pad(readable_N.astype(np.float32), (0, num_filled)),
            int(np.count_nonzero(~readable_N)),
        )

    def _read_images(self, ids: Ids) -> tuple[Images, npt.NDArray[np.bool_]]:
        readable_N = np.ones(len(ids), dtype=np.bool_)
        if not self._skips or isinstance(self._source, ArraySource):
            return self._images.read(ids, 0), readable_N
        images = np.zeros((len(ids), *self._images.network_shape_HWC), dtype=np.uint8)
        for index, sample_id in enumerate(ids):
            try:
                images[index] = self._images.read(np.array([sample_id]), 0)[0]
            except CorruptImageError:
                readable_N[index] = False
        return images, readable_N


class _ImageReader:
    """Reads images as the network sees them: sized, augmented, their channels regrouped."""

    def __init__(self, datasets: DataSets, source: Source, *, augment: AugmentConfig, seed: int) -> None:
        self.shape_HWC = datasets.image_shape_HWC
        self.network_shape_HWC = datasets.network_shape_HWC
        self._regrouping = datasets.regrouping
        self._source = source
        self._augment = augment
        self._seed = seed

    def read(self, ids: Ids, epoch: int) -> Images:
        """Reads samples of an epoch as uint8 (N, H, W, C), of ``network_shape_HWC``."""
        augment = self._augment
        num_each = NUM_SHIFT + (NUM_RESIZED_CROP if augment.random_resized_crop else 0)
        uniforms_NK = sample_uniforms(ids, num_each=num_each, seed=self._seed, epoch=epoch)
        images = self._sized(ids, uniforms_NK[:, NUM_SHIFT:])
        images = crop_and_flip(
            images, padding=augment.crop_padding, flip=augment.flip, uniforms_NK=uniforms_NK[:, :NUM_SHIFT]
        )
        return images if self._regrouping is None else regroup_images(images, self._regrouping)

    def _sized(self, ids: Ids, uniforms_NK: Uniforms) -> Images:
        source = self._source
        is_array = isinstance(source, ArraySource)
        if isinstance(source, ArraySource) and not uniforms_NK.shape[1] and source.shape_HWC == self.shape_HWC:
            return source.read(ids)
        size = self.shape_HWC[0]
        images = np.empty((len(ids), *self.shape_HWC), dtype=np.uint8)
        for index, sample_id in enumerate(ids.tolist()):
            with source.opened(sample_id) as image:
                if uniforms_NK.shape[1]:
                    pixels = random_resized_crop(image, size=size, uniforms_K=uniforms_NK[index])
                else:
                    pixels = (stretch_image if is_array else fit_image)(image, size=size)
            images[index] = pixels
        return images

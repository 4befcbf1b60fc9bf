"""ConvMesh on MindSpore, and the script that MindSpore's tutorials teach; each runs on ranks of one pool, in turn.

Legend: N samples, H rows, W columns, C channels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
from benchmarks.contenders.work import MEAN, NUM_CLASSES, NUM_IMAGES, STD, Work, images_of
from mindspore import dataset, nn
from mindspore.dataset import vision

from convmesh.config import RunConfig
from convmesh.config.schema import DataConfig, ModelConfig, OptimizerConfig, StrategyConfig, TrainConfig
from convmesh.engines.contract import Batch, Engine, PixelScale, World
from convmesh.models.mindspore import build

_steps: dict[str, Callable[[], None]] = {}


def prepare(engine: Engine, world: World, *, contender: str, name: str, work: Work) -> None:
    """Builds a contender on this rank under a name, and runs its first two updates."""
    builders = {"convmesh": _convmesh, "plain": _plain}
    _steps[name] = builders[contender](engine, world, work)
    for _ in range(2):
        _steps[name]()


def run(engine: Engine, world: World, *, name: str, num_updates: int) -> tuple[float, float]:
    """Runs updates of a contender and returns their seconds, and the processor's seconds, on this rank."""
    engine.all_gather(None)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    for _ in range(num_updates):
        _steps[name]()
    return time.perf_counter() - begun, time.process_time() - begun_cpu


def drop(engine: Engine, world: World, *, name: str) -> None:
    """Forgets a contender and frees its memory."""
    _steps.pop(name, None)


class ArrayReader:
    """Reads micro-batches of this rank from memory, in order; a `convmesh.engines.contract.Reader`."""

    def __init__(self, work: Work, *, num_ranks: int, rank: int) -> None:
        self._images_NHWC, self._labels_N = images_of(work.image_size)
        self._batch, self._num_ranks, self._rank = work.batch, num_ranks, rank

    def read(self, key: tuple[int, int, int]) -> Batch:
        """The micro-batch of (epoch, update, micro)."""
        first = (key[1] * self._num_ranks + self._rank) * self._batch
        ids = np.arange(first, first + self._batch) % NUM_IMAGES
        return Batch(self._images_NHWC[ids], self._labels_N[ids], np.ones(self._batch, np.float32))


def _convmesh(engine: Engine, world: World, work: Work) -> Callable[[], None]:
    run_config = _run_config(work, world.num_ranks)
    network = engine.build_network(run_config.model, num_classes=NUM_CLASSES, num_channels=3, seed=0)
    scale = PixelScale(
        factor_C=tuple(1 / 255 / std for std in STD),
        offset_C=tuple(-mean / std for mean, std in zip(MEAN, STD, strict=True)),
    )
    step = engine.build_step(network, run_config, pixel_scale=scale)
    reader = ArrayReader(work, num_ranks=world.num_ranks, rank=world.rank)
    batches = engine.load(reader, [(0, update, 0) for update in range(100_000)], num_workers=0)
    updates = iter(range(100_000))

    def update() -> None:
        step.update(
            [next(batches)],
            global_count=work.batch * world.num_ranks,
            learning_rate=0.01,
            loss_scale=1.0,
            update_index=next(updates),
        )

    return update


def _run_config(work: Work, num_ranks: int) -> RunConfig:
    sections = {key: dict(value) for key, value in work.changes.items()}
    return RunConfig(
        engine="mindspore",
        model=ModelConfig(name=work.network),  # type: ignore[arg-type]
        data=DataConfig(source="image_folder", path=".", image_size=work.image_size),
        strategy=StrategyConfig(**sections.get("strategy", {})),
        precision=sections.get("precision", {}),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(learning_rate=0.01, weight_decay=1e-4, **sections.get("optimizer", {})),
        train=TrainConfig(global_batch=work.batch * num_ranks, **sections.get("train", {})),
    )


class _Images:
    """Images as a random-access source."""

    def __init__(self, image_size: int) -> None:
        self._images_NHWC, self._labels_N = images_of(image_size)

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._images_NHWC[int(index)], np.array(self._labels_N[int(index)])


def _plain(engine: Engine, world: World, work: Work) -> Callable[[], None]:
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True, device_num=world.num_ranks
    )
    network = build(work.network, num_classes=NUM_CLASSES, seed=0)
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9, weight_decay=1e-4)
    train_one_step = nn.TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), optimizer)
    train_one_step.set_train()
    source = dataset.GeneratorDataset(
        _Images(work.image_size), ["image", "label"], num_shards=world.num_ranks, shard_id=world.rank
    )
    mean, std = [value * 255 for value in MEAN], [value * 255 for value in STD]
    source = source.map([vision.Normalize(mean, std), vision.HWC2CHW()], ["image"])
    source = source.batch(work.batch, drop_remainder=True)

    def forever() -> Iterator[tuple[Any, Any]]:
        while True:
            yield from source.create_tuple_iterator(num_epochs=1)

    batches = forever()

    def update() -> None:
        train_one_step(*next(batches)).asnumpy()

    return update

"""Cases for ranks of MindSpore; a single rank in the test's own process runs them too, to compare with.

Every rank makes the same global batches from a seed and takes its own part, so that one device can repeat them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.config.schema import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    StrategyConfig,
    TrainConfig,
)
from convmesh.engines.contract import Batch, Engine, PixelScale, TrainState, World
from convmesh.engines.shared_exchange import SWITCH
from convmesh.mesh import Mesh

SCALE = PixelScale(factor_C=(1 / 60, 1 / 61, 1 / 62), offset_C=(-2.1, -2.0, -1.9))
GLOBAL_BATCH = 16


def single_world(num_threads: int = 1) -> World:
    return World(
        rank=0,
        num_ranks=1,
        local_rank=0,
        num_local_ranks=1,
        mesh=Mesh({"data": 1}),
        device="cpu",
        num_threads=num_threads,
    )


def run_config(**parts: dict[str, Any]) -> RunConfig:
    """A run of the small network; parts are sections of the run file."""
    return RunConfig(
        engine="mindspore",
        model=ModelConfig(**{"name": "cnn-small", **parts.get("model", {})}),
        data=DataConfig(source="digits"),
        strategy=StrategyConfig(**parts.get("strategy", {})),
        precision=PrecisionConfig(**parts.get("precision", {})),
        optimizer=OptimizerConfig(**{"learning_rate": 0.05, "weight_decay": 1e-2, **parts.get("optimizer", {})}),
        train=TrainConfig(**{"global_batch": GLOBAL_BATCH, "device": "cpu", **parts.get("train", {})}),
    )


def global_batch(update: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(100 + update)
    images = generator.integers(0, 256, (count, 12, 12, 3), dtype=np.uint8)
    return images, generator.integers(0, 10, count).astype(np.int32)


def micro_batches(
    update: int, count: int, *, num_shards: int, shard: int, accumulation: int, global_size: int = GLOBAL_BATCH
) -> list[Batch]:
    """This shard's micro-batches; a shard without samples gets one of weight 0."""
    images, labels = global_batch(update, count)
    own = np.array_split(np.arange(count), num_shards)[shard]
    if len(own) == 0:
        return [Batch(images[:1], labels[:1], np.zeros(1, np.float32))]
    size = global_size // (num_shards * accumulation)
    parts = [own[first : first + size] for first in range(0, len(own), size)]
    return [Batch(images[ids], labels[ids], np.ones(len(ids), np.float32)) for ids in parts]


def train(
    engine: Engine,
    world: World,
    *,
    counts: Sequence[int] = (GLOBAL_BATCH,) * 3,
    start: TrainState | None = None,
    first_update: int = 0,
    seed_by_rank: bool = False,
    loss_scales: Sequence[float] | None = None,
    poisoned: tuple[int, int] | None = None,
    shared_memory: bool = True,
    **parts: dict[str, Any],
) -> dict[str, Any]:
    """Trains for ``len(counts)`` updates through the engine and returns everything that can be compared.

    Args:
        engine: Started.
        world: Of this rank.
        counts: Samples of each global batch.
        start: State to begin with.
        first_update: Number of the first update.
        seed_by_rank: Draw other initial weights on each rank.
        loss_scales: Of each update; 1 by default.
        poisoned: Rank and update whose samples have an infinite weight.
        shared_memory: Whether ranks of one machine may sum gradients without MindSpore's collectives.
        **parts: Sections of the run file.
    """
    os.environ[SWITCH] = str(int(shared_memory))
    run = run_config(**parts)
    seed = 1 + world.rank if seed_by_rank else 1
    network = engine.build_network(run.model, num_classes=10, num_channels=3, seed=seed)
    step = engine.build_step(network, run, pixel_scale=SCALE)
    if start is not None:
        step.import_state(start)
    losses, norms, overflows, after, counted = [], [], [], [], []
    for update, count in enumerate(counts, start=first_update):
        batches = micro_batches(
            update,
            count,
            num_shards=world.mesh.size("data"),
            shard=world.shard,
            accumulation=run.strategy.accumulation,
        )
        if poisoned == (world.rank, update):
            first = batches[0]
            batches[0] = Batch(first.images_NHWC, first.labels_N, first.weights_N * np.float32(np.inf))
        result = step.update(
            batches,
            global_count=count,
            learning_rate=0.05 / (1 + update),
            loss_scale=loss_scales[update - first_update] if loss_scales else 1.0,
            update_index=update,
        )
        losses.append(sum(engine.all_gather(float(result.loss_sum))) / count)
        norms.append(None if result.gradient_norm is None else float(result.gradient_norm))
        overflows.append(result.overflow)
        after.append(step.local_tensors())
        counted.append(step.collectives())
    images, labels = global_batch(99, 6)
    sums = step.evaluate(Batch(images, labels, np.array([1, 1, 1, 1, 1, 0], np.float32)))
    return {
        "losses": losses,
        "norms": norms,
        "overflows": overflows,
        "after": after,
        "collectives": counted,
        "evaluation": (float(sums.loss_sum), float(sums.num_correct), float(sums.num_samples)),
        "state": step.export_state(),
        "local": step.local_tensors(),
        "optimizer_bytes": step.optimizer_bytes(),
        "num_parameters": step.num_parameters(),
    }


def profiled_sums(engine: Engine, world: World, *, folder: str, buckets: Sequence[int]) -> dict[str, Any]:
    """Sums tensors of 1, 2, ... elements in buckets and tells how many collectives MindSpore's profiler saw."""
    import mindspore as ms
    from mindspore import profiler

    from convmesh.engines.mindspore.collectives import BucketedSum, data_axis, enable_fusion

    os.environ[SWITCH] = "0"
    enable_fusion()
    total = BucketedSum(data_axis(world), buckets)
    tensors = [ms.Tensor(np.full(index + 1, world.rank + index, np.float32)) for index in range(len(buckets))]
    total(tensors)
    path = Path(folder) / str(world.rank)
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU],
        on_trace_ready=profiler.tensorboard_trace_handler(str(path)),
    ):
        sums = [tensor.asnumpy().tolist() for tensor in total(tensors)]
    lines = next(path.rglob("cpu_op_type_info*.csv")).read_text().splitlines()
    number = sum(int(line.split(",")[1]) for line in lines if line.startswith("AllReduce,"))
    return {"sums": sums, "planned": total.num_buckets, "number": number}

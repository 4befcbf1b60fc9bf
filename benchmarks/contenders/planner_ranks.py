"""Trains one plan on every rank and tells its seconds and its memory; for both engines.

Legend: N samples, H rows, W columns, C channels.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from convmesh.config import RunConfig
from convmesh.config.schema import DataConfig, ModelConfig, OptimizerConfig, StrategyConfig, TrainConfig
from convmesh.engines.contract import Batch, Engine, PixelScale, World

SCALE = PixelScale((0.017, 0.017, 0.017), (-2.1, -2.0, -1.8))

_ON_MESH = {
    "torch": "tests.multiprocess.channel_cases",
    "mindspore": "tests.multiprocess.mindspore_channel_training",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What ranks train.

    Args:
        engine: ``"torch"`` or ``"mindspore"``.
        network: One of our networks, or a factory.
        image_size: Side in pixels.
        global_batch: Samples per update.
        mesh: Mesh axes and sizes.
        accumulation: Micro-batches per update.
        recompute: ``"none"`` or ``"blocks"``.
        args: Arguments of the network.
        num_channels: Channels of the images.
        num_classes: Classes.
    """

    engine: str
    network: str
    image_size: int
    global_batch: int
    mesh: Mapping[str, int]
    accumulation: int = 1
    recompute: str = "none"
    args: Mapping[str, Any] = field(default_factory=dict)
    num_channels: int = 3
    num_classes: int = 10

    def run(self, plan: Path | None = None) -> RunConfig:
        """The run that trains it."""
        named = {"factory": self.network} if ":" in self.network else {"name": self.network}
        strategy: dict[str, Any] = {"accumulation": self.accumulation, "recompute": self.recompute}
        return RunConfig(
            engine=self.engine,  # type: ignore[arg-type]
            model=ModelConfig(**named, args=dict(self.args)),  # type: ignore[arg-type]
            data=DataConfig(source="image_folder", path=".", image_size=self.image_size),
            strategy=StrategyConfig(mesh=dict(self.mesh), plan=str(plan) if plan else None, **strategy),
            optimizer=OptimizerConfig(learning_rate=0.01, weight_decay=1e-4),
            train=TrainConfig(global_batch=self.global_batch, device="cpu"),
        )


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw.

    Args:
        seconds: Of each update.
        peak_bytes: Most that the process held.
        built_bytes: What it held once the network was built.
    """

    seconds: tuple[float, ...]
    peak_bytes: int
    built_bytes: int


def train(_engine: Engine, world: World, *, job: Job, plan: Path | None, num_updates: int, most_seconds: float) -> Seen:
    """Trains a plan for some updates; the first two, in which memory is taken and graphs are compiled, don't count."""
    engine, placed = importlib.import_module(_ON_MESH[job.engine]).on_mesh(world, job.mesh)
    run = job.run(plan)
    network = engine.build_network(
        run.model, num_classes=job.num_classes, num_channels=job.num_channels, seed=run.train.seed
    )
    scale = dataclasses.replace(SCALE)
    if job.num_channels != 3:
        scale = PixelScale((0.017,) * job.num_channels, (-2.0,) * job.num_channels)
    step = engine.build_step(network, run, pixel_scale=scale)
    built = psutil.Process().memory_info().rss
    batches = _batches(job, placed.mesh.size("data"), placed.shard)
    seconds: list[float] = []
    begun_all = time.monotonic()
    for index in range(num_updates + 2):
        begun = time.perf_counter()
        result = step.update(
            batches, global_count=job.global_batch, learning_rate=0.01, loss_scale=1.0, update_index=index
        )
        float(result.loss_sum)
        seconds.append(time.perf_counter() - begun)
        if len(seconds) > 2 and max(engine.all_gather(time.monotonic() - begun_all)) > most_seconds:
            break
    return Seen(seconds=tuple(seconds[2:]), peak_bytes=engine.peak_memory_bytes(), built_bytes=built)


def _batches(job: Job, num_shards: int, shard: int) -> list[Batch]:
    """The micro-batches of one shard, as even as integers allow."""
    generator = np.random.default_rng(shard)
    own = len(np.array_split(np.arange(job.global_batch), num_shards)[shard])
    sizes = [len(part) for part in np.array_split(np.arange(own), job.accumulation)]
    side, num_channels = job.image_size, job.num_channels
    return [
        Batch(
            generator.integers(0, 256, (size, side, side, num_channels), dtype=np.uint8),
            generator.integers(0, job.num_classes, size).astype(np.int32),
            np.ones(size, np.float32),
        )
        for size in sizes
    ]

"""Cases for ranks that follow advice: a few updates of a run on the ranks of a pool."""

from __future__ import annotations

from typing import Any

from torch import nn

from convmesh.config import parse_config
from convmesh.data.reader import TrainReader
from convmesh.engines.contract import Engine, World
from convmesh.training.rank import open_run


def losses(engine: Engine, world: World, *, settings: dict[str, Any], num_updates: int) -> list[float]:
    """Trains a few updates and returns this rank's part of the loss of each."""
    run = parse_config(settings)
    datasets, network = open_run(engine, run)
    step = engine.build_step(network, run, pixel_scale=datasets.pixel_scale)
    reader = TrainReader(datasets, run, num_shards=world.mesh.size("data"), shard=world.shard)
    keys = [key for key in reader.keys(0) if key[1] < num_updates]
    batches = engine.load(reader, keys, num_workers=run.data.num_workers)
    found = []
    for update in range(num_updates):
        result = step.update(
            [next(batches) for key in keys if key[1] == update],
            global_count=reader.global_count(0, update),
            learning_rate=0.05,
            loss_scale=1.0,
            update_index=update,
        )
        found.append(float(result.loss_sum))
    return found


def stages(num_classes: int = 10) -> nn.Module:
    """A network with blocks that can be recomputed, batch norm in them."""

    def block(num_inputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(num_inputs, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    return nn.Sequential(block(1), block(8), block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))

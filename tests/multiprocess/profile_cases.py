"""Updates on ranks with everything noted, and timed apart from the recorder."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from typing import Any
from unittest import mock

from convmesh.engines.contract import Engine, World
from convmesh.profiling.events import RankEvents
from convmesh.profiling.recorder import RECORDER
from tests.multiprocess.raw_timers import raw_timer

MODULES = {"torch": "channel_training", "mindspore": "mindspore_channel_training"}
WARMUP = 3
GLOBAL_BATCH = 16


def profiled(
    engine: Engine,
    world: World,
    *,
    sizes: Mapping[str, int],
    strategy: Mapping[str, Any],
    shared_memory: bool = True,
    num_updates: int = 20,
) -> tuple[RankEvents, list[float], list[float]]:
    """Trains cnn-small on a mesh.

    Returns:
        What the recorder noted, the seconds of raw collectives in each update, and those of each update.
    """
    cases = importlib.import_module(f"tests.multiprocess.{MODULES[engine.name]}")
    with mock.patch.dict(os.environ, {"CONVMESH_SHARED_MEMORY": "1" if shared_memory else "0"}):
        placed_engine, placed = cases.on_mesh(world, sizes)
        network = cases.network_of(*(("cnn-small", "float32") if engine.name == "torch" else ("cnn-small",)))
        run = cases.run_config(strategy=dict(strategy))
        step = placed_engine.build_step(network, run, pixel_scale=cases.SCALE)
        batches = [
            cases.batches_of(update, GLOBAL_BATCH, placed.mesh.size("data"), placed.shard, 1)
            for update in range(WARMUP + num_updates)
        ]

        def update(number: int) -> None:
            result = step.update(
                batches[number], global_count=GLOBAL_BATCH, learning_rate=0.01, loss_scale=1.0, update_index=number
            )
            float(result.loss_sum)

        for number in range(WARMUP):
            update(number)
        engine.all_gather(None)
        seconds = []
        with raw_timer(engine.name) as timer:
            RECORDER.start()
            for number in range(WARMUP, WARMUP + num_updates):
                begun, step_begun = time.monotonic(), RECORDER.now()
                update(number)
                RECORDER.add_step(number, start=step_begun, end=RECORDER.now(), num_samples=1)
                seconds.append(time.monotonic() - begun)
                timer.end_step()
            events = RECORDER.stop(world.rank)
    return events, timer.steps, seconds

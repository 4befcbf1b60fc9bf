"""What ranks of the advice loop do: a few updates of a run in the real training loop, the last ones profiled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from convmesh.config import parse_config
from convmesh.config.schema import ProfileConfig, RunConfig
from convmesh.engines.contract import Engine, World
from convmesh.training.metrics import Fanout
from convmesh.training.rank import loop_of, open_run
from convmesh.training.run_folder import RunFolder

_NEVER = 2**31


def profile(engine: Engine, world: World, *, settings: dict[str, Any], folder: Path, window: tuple[int, int]) -> None:
    """Trains ``window[0] + window[1]`` updates and writes a profile of the last ``window[1]`` into a folder."""
    run = shortened(parse_config(settings), start=window[0], steps=window[1])
    datasets, network = open_run(engine, run)
    step = engine.build_step(network, run, pixel_scale=datasets.pixel_scale)
    loop_of(engine, step, datasets, run=run, world=world, folder=RunFolder(folder), sink=Fanout()).fit()


def shortened(run: RunConfig, *, start: int, steps: int) -> RunConfig:
    """The run, ended after so many updates, without evaluation and checkpoints."""
    train = dataclasses.replace(
        run.train,
        profile=ProfileConfig(start=start, steps=steps),
        max_updates=start + steps,
        epochs=_NEVER,
        eval_every_epochs=_NEVER,
        checkpoint_every_steps=_NEVER,
        log_every_steps=_NEVER,
    )
    return dataclasses.replace(run, train=train)

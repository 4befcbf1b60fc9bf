"""Cases that try the pools themselves."""

from __future__ import annotations

import os
import time
from typing import Any

from convmesh.engines.contract import Engine, World


def whoami(engine: Engine, world: World, *, greeting: str) -> tuple[str, int, int, list[Any]]:
    return greeting, world.rank, world.num_ranks, engine.all_gather((world.rank, 0.1 * world.rank))


def fail_on(engine: Engine, world: World, *, rank: int) -> list[Any]:
    if world.rank == rank:
        raise ValueError("as asked")
    return engine.all_gather(None)


def hang_on(engine: Engine, world: World, *, rank: int) -> None:
    if world.rank == rank:
        time.sleep(600)


def die_on(engine: Engine, world: World, *, rank: int) -> None:
    if world.rank == rank:
        os._exit(7)

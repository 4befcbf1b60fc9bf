"""What each rank of a `RankPool` runs: join the others, then serve cases until told to stop."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from multiprocessing.connection import Client

from convmesh.engines import load_engine
from convmesh.engines.contract import World
from convmesh.mesh import Mesh
from convmesh.training.ranks import find_rank


def main(engine_name: str, port: int, num_threads: int) -> None:
    place = find_rank(os.environ)
    assert place is not None
    world = World(
        rank=place.rank,
        num_ranks=place.num_ranks,
        local_rank=place.local_rank,
        num_local_ranks=place.num_local_ranks,
        mesh=Mesh({"data": place.num_ranks}),
        device="cpu",
        num_threads=num_threads,
    )
    engine = load_engine(engine_name)
    engine.start(world)
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        return  # msrun runs the same command as its scheduler, which joins and serves nobody.
    with Client(("127.0.0.1", port), authkey=bytes.fromhex(os.environ["CONVMESH_TEST_KEY"])) as connection:
        connection.send(world.rank)
        while (request := connection.recv()) is not None:
            case, kwargs = request
            try:
                module, _, function = case.partition(":")
                answer = (True, getattr(importlib.import_module(module), function)(engine, world, **kwargs))
            except BaseException:
                answer = (False, traceback.format_exc())
            connection.send(answer)
    engine.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

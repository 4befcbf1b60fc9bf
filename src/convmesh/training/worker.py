"""What every launched rank runs: ``python -m convmesh.training.worker RUN_FOLDER MESH DEVICE THREADS``."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from convmesh.config import load_config
from convmesh.engines.contract import World
from convmesh.errors import ConvMeshError, LaunchError
from convmesh.mesh import parse_mesh
from convmesh.training.processes import end_with_starter
from convmesh.training.rank import run_rank
from convmesh.training.ranks import RankPlace, find_rank
from convmesh.training.run_folder import RunFolder, write_atomically, write_json


def main(arguments: list[str], run: Callable[..., None] = run_rank) -> int:
    """Runs one rank.

    Args:
        arguments: Run folder, mesh, device and number of threads.
        run: What it does, given the run, its world and folder.

    Returns:
        The exit code: 0, 1 for a crash, 2 for what a user can mend.
    """
    root, mesh, device, num_threads = arguments
    folder = RunFolder(root)
    place = find_rank(os.environ)
    if place is None:
        print("This is started by convmesh train, one process per rank.", file=sys.stderr)
        return 2
    end_with_starter()
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        return _serve_as_scheduler(place, folder)
    _redirect_output(folder.rank_file(place.rank, "log"))
    folder.rank_file(place.rank, "pid").write_text(str(os.getpid()))
    code = 1
    try:
        world = world_of(place, mesh=mesh, device=device, num_threads=int(num_threads))
        run(load_config(folder.config), world=world, folder=folder)
        code = 0
    except ConvMeshError as error:
        code = error.exit_code
        _note_error(folder, place.rank, error, code=code)
    except BaseException as error:
        _note_error(folder, place.rank, error, code=code)
        raise
    finally:
        folder.rank_file(place.rank, "done").write_text(str(code))
    return code


def world_of(place: RankPlace, *, mesh: str, device: str, num_threads: int) -> World:
    """The world of a rank, from where it stands and what its launcher decided.

    Args:
        place: Rank and number of ranks.
        mesh: The mesh, as text.
        device: The device, resolved.
        num_threads: Threads that the rank may compute with.

    Returns:
        The world.

    Raises:
        LaunchError: If the mesh does not have as many ranks as were started.
    """
    grid = parse_mesh(mesh)
    if grid.num_ranks != place.num_ranks:
        raise LaunchError(
            "the number of started ranks does not fit the mesh",
            got=f"{place.num_ranks} ranks from {place.starter}",
            expected=f"{grid.num_ranks} for {grid}",
        )
    return World(
        rank=place.rank,
        num_ranks=place.num_ranks,
        local_rank=place.local_rank,
        num_local_ranks=place.num_local_ranks,
        mesh=grid,
        device=device,
        num_threads=num_threads,
    )


def _serve_as_scheduler(place: RankPlace, folder: RunFolder) -> int:
    # msrun starts its scheduler with the same command as its workers; there, joining the cluster is all the work.
    from convmesh.engines import load_engine

    try:
        load_engine("mindspore").start(world_of(place, mesh=f"data={place.num_ranks}", device="cpu", num_threads=1))
    except ConvMeshError as error:
        port = os.environ.get("MS_SCHED_PORT", "")
        taken = port.isdigit() and not _can_listen(int(port))
        write_atomically(folder.scheduler_error, f"port {port}: address already in use" if taken else str(error))
        return error.exit_code
    return 0


def _can_listen(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _redirect_output(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)


def _note_error(folder: RunFolder, rank: int, error: BaseException, *, code: int) -> None:
    traceback.print_exc()
    what = str(error) if isinstance(error, ConvMeshError) else f"{type(error).__name__}: {error}"
    content = {"time": time.time(), "code": code, "type": type(error).__name__, "message": what}
    try:
        write_json(folder.rank_file(rank, "error"), content)
    except ConvMeshError:
        print(json.dumps(content), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Joining the ranks of a run: under msrun as it says, under Slurm by what a step of it tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping

from convmesh.engines.contract import World
from convmesh.errors import EngineError

_SLURM_FIRST_PORT = 29500
_SCHEDULER = "from mindspore.communication import init; import mindspore; mindspore.set_device('CPU'); init()"


def is_scheduler() -> bool:
    """Whether this process is msrun's scheduler, which runs the same command as its ranks and computes nothing."""
    return os.environ.get("MS_ROLE") == "MS_SCHED"


def join(world: World) -> None:
    """Meets the other ranks. In the scheduler it returns once all ranks have left.

    Args:
        world: Where this rank stands.

    Raises:
        EngineError: If it is not known where to meet, or the others can't be reached.
    """
    from mindspore import communication

    if "MS_ROLE" not in os.environ:
        meeting = slurm_meeting(os.environ, world)
        if world.rank == 0:
            subprocess.Popen([sys.executable, "-c", _SCHEDULER], env={**os.environ, **meeting, "MS_ROLE": "MS_SCHED"})
        os.environ.update(meeting)
    try:
        communication.init()
    except (RuntimeError, ValueError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip(" -\t")), type(error).__name__)
        raise EngineError(
            f"rank {world.rank} could not join the others",
            got=first,
            fix="See whether the other ranks have failed, or use another port",
        ) from error


def slurm_meeting(environment: Mapping[str, str], world: World) -> dict[str, str]:
    """The variables that msrun would have set, from those of a Slurm step.

    Args:
        environment: The process environment. ``MASTER_ADDR`` and ``MASTER_PORT`` go first where they are set.
        world: Where this rank stands.

    Returns:
        Variables by name.

    Raises:
        EngineError: If this is no Slurm step.
    """
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST"))
    host = environment.get("MASTER_ADDR") or (first_host(nodes) if nodes else None)
    if host is None:
        raise EngineError(
            "the ranks don't know where to meet",
            expected="the variables of msrun or of a Slurm step",
            fix="Start the ranks with convmesh train --ranks N, or with msrun or srun",
        )
    port = environment.get("MASTER_PORT") or str(_SLURM_FIRST_PORT + int(environment.get("SLURM_JOB_ID", "0")) % 10_000)
    return {
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": str(world.num_ranks),
        "MS_NODE_ID": str(world.rank),
        "MS_SCHED_HOST": host,
        "MS_SCHED_PORT": port,
        "RANK_ID": str(world.rank),
        "RANK_SIZE": str(world.num_ranks),
        "DEVICE_ID": str(world.local_rank),
    }


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: ``node03`` for ``node[03-05,9],other1``."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes

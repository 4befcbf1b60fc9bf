"""Which rank is this process? Read from what msrun, torchrun or Slurm set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Per starter: rank, number of ranks, rank on this machine, number of ranks on this machine.
_STARTERS = {
    "msrun": ("RANK_ID", "MS_WORKER_NUM", "DEVICE_ID", "MS_WORKER_NUM"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}


@dataclass(frozen=True)
class RankPlace:
    """Where a process stands among the ranks that something else started.

    Args:
        starter: ``"msrun"``, ``"torchrun"`` or ``"Slurm"``.
        rank: From 0 to ``num_ranks - 1``.
        num_ranks: All ranks.
        local_rank: Position on this machine.
        num_local_ranks: Ranks on this machine.
    """

    starter: str
    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int


def find_rank(environment: Mapping[str, str]) -> RankPlace | None:
    """Reads the rank from a process environment.

    Args:
        environment: Usually ``os.environ``.

    Returns:
        The place of this process, or None if it was started by hand.
    """
    for starter, (rank, num_ranks, local_rank, num_local_ranks) in _STARTERS.items():
        if not (environment.get(rank, "").isdigit() and environment.get(num_ranks, "").isdigit()):
            continue
        if starter == "Slurm" and int(environment[num_ranks]) == 1:
            continue  # An interactive allocation sets these variables too.
        total = int(environment[num_ranks])
        return RankPlace(
            starter=starter,
            rank=int(environment[rank]),
            num_ranks=total,
            local_rank=_number(environment.get(local_rank), int(environment[rank])),
            num_local_ranks=_number(environment.get(num_local_ranks), total),
        )
    return None


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdigit() else default

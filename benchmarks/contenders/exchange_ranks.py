"""Exchanging channels by each transport that PyTorch's ranks have on the CPU of one machine. Every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from tests.multiprocess.channel_cases import on_mesh

from convmesh.engines.contract import Engine, World
from convmesh.engines.torch.channel_transport import Transports


def measure(
    engine: Engine, world: World, *, sizes_bytes: Sequence[int], num_rounds: int
) -> dict[tuple[str, str, int], list[float]]:
    """Seconds of gathering and of reduce-scattering float32 images; the transports take turns.

    Args:
        engine: Of the ranks.
        world: The ranks.
        sizes_bytes: Of the whole tensor.
        num_rounds: Measurements of each.

    Returns:
        Transport, collective and size to its seconds.

    Raises:
        AssertionError: If the ranks share no memory.
    """
    channel, _ = on_mesh(world, {"data": 1, "channel": world.num_ranks})
    known = Transports(channel._channel)
    assert known._shared is not None, "the ranks share no memory"
    ways = {"shared memory": known._shared, "Gloo": known._messages}
    num_channels = 64
    share = num_channels // world.num_ranks
    lists = tuple(tuple(range(rank * share, (rank + 1) * share)) for rank in range(world.num_ranks))
    found: dict[tuple[str, str, int], list[float]] = {}
    for size in sizes_bytes:
        whole = torch.ones(1, num_channels, size // 4 // num_channels)
        part = torch.ones(1, share, whole.shape[2])
        for number in range(num_rounds + 1):
            for name, way in ways.items():
                for kind, work, arguments in (
                    ("all-gather", way.gather, (part, lists, whole)),
                    ("reduce-scatter", way.reduce_scatter, (whole, lists, part)),
                ):
                    dist.barrier(group=channel._channel)
                    begun = time.perf_counter()
                    work(*arguments)
                    seconds = time.perf_counter() - begun
                    whole.fill_(1.0)
                    part.fill_(1.0)
                    if number:  # The first one warms up.
                        found.setdefault((name, kind, size), []).append(seconds)
    return found

"""Pools of ranks, shared by all tests of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from convmesh.engines import is_installed
from tests.multiprocess.ranks import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[str, int], RankPool]]:
    """``rank_pool(engine, num_ranks)``: started on first use, started anew after a failure, ended with the session."""
    pools: dict[tuple[str, int], RankPool] = {}

    def pool_of(engine_name: str, num_ranks: int) -> RankPool:
        if not is_installed(engine_name):
            pytest.skip(f"{engine_name} is not installed")
        key = (engine_name, num_ranks)
        if key in pools and not pools[key].alive:
            pools.pop(key).close()
        if key not in pools:
            pools[key] = RankPool(engine_name, num_ranks)
        return pools[key]

    yield pool_of
    for pool in pools.values():
        pool.close()

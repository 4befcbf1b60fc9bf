"""How ranks of one machine share its cores."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from convmesh.engines import cores
from convmesh.engines.calibrating import TURNS, clock_of, repeat_after_work
from convmesh.engines.contract import World
from convmesh.mesh import Mesh


def world_of(num_ranks: int, *, rank: int = 0, device: str = "cpu", num_threads: int = 1) -> World:
    return World(
        rank=rank, num_ranks=num_ranks, local_rank=rank, num_local_ranks=num_ranks, mesh=Mesh({"data": num_ranks}),
        device=device, num_threads=num_threads,
    )  # fmt: skip


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[int]]]:
    """Cores that this process is bound to, one after the other, of a machine with the cores 4 and 7."""
    now = [{4, 7}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: now[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, wanted: now.append(set(wanted)))
    cores.cores.cache_clear()
    yield now
    cores.cores.cache_clear()


def test_ranks_are_spread_evenly_over_cores_and_let_go(bound: list[set[int]]) -> None:
    for rank, core in enumerate((4, 7, 4, 7)):
        world = world_of(4, rank=rank)
        cores.stay_on_a_core(world)
        assert bound[-1] == {core}
        assert cores.ranks_per_core(world) == 2.0
        cores.use_all_cores()
        assert bound[-1] == {4, 7}


@pytest.mark.parametrize("world", [world_of(2), world_of(1, num_threads=2), world_of(3), world_of(4, device="cuda")])
def test_ranks_that_have_cores_enough_or_can_not_be_spread_evenly_go_where_they_like(
    world: World, bound: list[set[int]]
) -> None:
    cores.stay_on_a_core(world)
    cores.use_all_cores()
    assert bound == [{4, 7}]
    assert cores.ranks_per_core(world) == (1.5 if world.num_ranks == 3 else 1.0)


def test_on_shared_cores_work_takes_processor_time_times_ranks(
    bound: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 3.0)
    assert clock_of(world_of(4))() == 6.0
    assert clock_of(world_of(2)) is time.perf_counter


def test_a_collective_takes_what_is_left_of_its_turn_but_at_least_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, own = [0.0], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: wall[0])

    def pass_by(*, wall_seconds: float, own_seconds: float) -> None:
        wall[0] += wall_seconds
        own[0] += own_seconds

    def seconds(waits: float) -> tuple[float, ...]:
        late = [100.0]  # Until the first collective after ranks have met.

        def run() -> None:
            pass_by(wall_seconds=1.0 + waits + late.pop() if late else 1.0 + waits, own_seconds=2.0)

        return repeat_after_work(
            run,
            lambda: pass_by(wall_seconds=1.0, own_seconds=2.0),
            2,
            gather=lambda _: late.append(100.0),
            now=lambda: own[0],
        )

    # Two ranks on a core: work of 2 by its clock, of which 1 had passed when another rank took over.
    assert seconds(waits=4.0) == (4.0, 4.0)
    assert seconds(waits=0.5) == (2.0, 2.0)
    assert TURNS > 1

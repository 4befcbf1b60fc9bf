"""Exchanges through shared memory, with threads in the place of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.engines import shared_exchange
from convmesh.engines.shared_exchange import SharedExchange
from convmesh.errors import EngineError
from convmesh.planner.memory import SLOTS_BYTES

pytestmark = pytest.mark.skipif(not shared_exchange.is_wanted(), reason="no /dev/shm")


def on_ranks(size: int, work: Callable[[SharedExchange | None, int], Any], *, timeout_seconds: float = 30) -> list[Any]:
    """What the work returns on each rank."""
    barrier, values = threading.Barrier(size, timeout=30), [None] * size

    def of_rank(rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            found = list(values)
            barrier.wait()
            return found

        exchange = SharedExchange.connect(position=rank, size=size, gather=gather, timeout_seconds=timeout_seconds)
        return work(exchange, rank)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(of_rank, range(size)))


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_parts_become_whole_and_sums_parts(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4))
    counts = data.draw(st.lists(st.integers(1, 4), min_size=size, max_size=size))
    order = data.draw(st.permutations(range(sum(counts))))
    outer, inner = data.draw(st.integers(0, 3)), data.draw(st.sampled_from([1, 5, 400_000]))
    dtype = data.draw(st.sampled_from([np.float64, np.float32, np.float16]))
    ends = np.cumsum(counts)
    lists = [tuple(order[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    # Whole numbers are added up exactly.
    wholes = [
        np.random.default_rng(rank).integers(-9, 9, (outer, len(order), inner)).astype(dtype) for rank in range(size)
    ]

    def work(exchange: SharedExchange | None, rank: int) -> tuple[np.ndarray, ...]:
        assert exchange is not None
        whole, own = np.full_like(wholes[0], 99), np.full_like(wholes[0][:, : counts[rank]], 99)
        exchange.gather(wholes[0][:, lists[rank]], lists, whole)
        exchange.reduce_scatter(wholes[rank], lists, own)
        total = wholes[rank].reshape(-1).copy()
        exchange.all_reduce(total, total)
        return whole, own, total

    for rank, (whole, own, total) in enumerate(on_ranks(size, work)):
        np.testing.assert_array_equal(whole, wholes[0])
        np.testing.assert_array_equal(own, sum(wholes)[:, lists[rank]])
        np.testing.assert_array_equal(total, sum(wholes).reshape(-1))


def test_nothing_is_left_behind() -> None:
    before = set(shared_exchange.FOLDER.glob("convmesh-*"))
    on_ranks(3, lambda exchange, rank: None)
    assert set(shared_exchange.FOLDER.glob("convmesh-*")) <= before


def test_too_little_memory_is_told_to_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(shared_exchange, "FOLDER", tmp_path)
    monkeypatch.setattr("os.posix_fallocate", full)
    assert on_ranks(2, lambda exchange, rank: exchange) == [None, None]
    assert not list(tmp_path.iterdir())


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shared_exchange.SWITCH, "0")
    assert on_ranks(2, lambda exchange, rank: exchange) == [None, None]


def test_a_rank_that_leaves_or_stays_away_is_told() -> None:
    def work(exchange: SharedExchange | None, rank: int) -> str:
        assert exchange is not None
        if rank == 1:
            return ""  # Its pipes close with it.
        with pytest.raises(EngineError) as raised:
            exchange.all_reduce(np.ones(2), np.ones(2))
        return str(raised.value)

    assert "another rank" in on_ranks(2, work, timeout_seconds=2)[0]


def test_the_planner_knows_how_much_memory_is_shared() -> None:
    assert SLOTS_BYTES == 2 * shared_exchange.SLOT_BYTES

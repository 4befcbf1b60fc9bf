"""Sums through shared memory, with threads in the place of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore")

from mindspore import Tensor

from convmesh.engines.mindspore import shared_memory
from convmesh.engines.mindspore.shared_memory import SharedSum

pytestmark = pytest.mark.mindspore

SHAPES = [(3, 2), (1,), (5,)]


class Ranks:
    """Threads that meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=30)
        self._values: list[Any] = [None] * size

    def run(self, work: Callable[[SharedSum, int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: work(self._new(rank), rank), range(self.size)))

    def _new(self, rank: int) -> SharedSum:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return SharedSum(position=rank, size=self.size, barrier=lambda: bool(self._barrier.wait()), gather=gather)


def tensors_of(rank: int, call: int) -> list[np.ndarray]:
    generator = np.random.default_rng([rank, call])
    return [generator.standard_normal(shape).astype(np.float32) for shape in SHAPES]


@pytest.mark.parametrize("size", [2, 3, 15])
def test_all_ranks_get_the_same_sums(size: int) -> None:
    def work(total: SharedSum, rank: int) -> list[list[np.ndarray]]:
        assert total.prepare(SHAPES)
        return [
            [sums.asnumpy().copy() for sums in total([Tensor(array) for array in tensors_of(rank, call)])]
            for call in range(3)
        ]

    before = set(shared_memory._FOLDER.glob("convmesh-*"))
    answers = Ranks(size).run(work)
    assert set(shared_memory._FOLDER.glob("convmesh-*")) <= before
    for call in range(3):
        for index, shape in enumerate(SHAPES):
            expected = sum(tensors_of(rank, call)[index].astype(float) for rank in range(size))
            for answer in answers:
                assert answer[call][index].shape == shape
                np.testing.assert_allclose(answer[call][index], expected, rtol=1e-5, atol=1e-6)
                np.testing.assert_array_equal(answer[call][index], answers[0][call][index])


def test_what_is_not_finite_stays_so() -> None:
    def work(total: SharedSum, rank: int) -> float:
        total.prepare([(2,)])
        return float(total([Tensor(np.array([np.inf if rank else 1, 1], np.float32))])[0].asnumpy()[0])

    assert Ranks(2).run(work) == [np.inf, np.inf]


def test_too_little_memory_is_told_to_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(shared_memory, "_FOLDER", tmp_path)
    monkeypatch.setattr("os.posix_fallocate", full)
    assert Ranks(2).run(lambda total, rank: total.prepare(SHAPES)) == [False, False]
    assert not list(tmp_path.iterdir())

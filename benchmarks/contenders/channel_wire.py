"""What a step of a split network sends, taken apart from what it computes: both are timed on their own. Every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from convmesh.engines.shared_exchange import SharedExchange

_METHODS = ("gather", "reduce_scatter", "all_reduce")


class Wire:
    """Stands between a network and the memory that its ranks share.

    Args:
        exchange: The memory; its methods are replaced.
    """

    def __init__(self, exchange: SharedExchange) -> None:
        self.silent = False
        self.recording = False
        self._calls: list[tuple[str, tuple[int, ...], tuple[int, ...], Any, np.dtype[Any]]] = []
        self._real = {name: getattr(exchange, name) for name in _METHODS}
        for name in _METHODS:
            setattr(exchange, name, self._replacement(name))

    @property
    def num_bytes(self) -> int:
        """Inputs of the recorded calls."""
        return sum(int(np.prod(shape)) * dtype.itemsize for _, shape, _, _, dtype in self._calls)

    def replay(self) -> float:
        """Seconds of the recorded calls on their own, one after the other."""
        seconds = 0.0
        for name, shape, result, lists, dtype in self._calls:
            taken, given = np.ones(shape, dtype), np.ones(result, dtype)
            begun = time.perf_counter()
            self._call(name, taken, lists, given)
            seconds += time.perf_counter() - begun
        return seconds

    def _call(self, name: str, taken: np.ndarray, lists: Any, given: np.ndarray) -> None:
        if name == "all_reduce":
            self._real[name](taken, given)
        else:
            self._real[name](taken, lists, given)

    def _replacement(self, name: str) -> Any:
        def call(taken: np.ndarray, *others: Any, **settings: Any) -> None:
            lists: Sequence[Sequence[int]] | None = None if name == "all_reduce" else others[0]
            given = others[0] if name == "all_reduce" else others[1]
            if self.recording:
                self._calls.append((name, taken.shape, given.shape, lists, taken.dtype))
            if self.silent:
                given[...] = 0
            else:
                self._real[name](taken, *others, **settings)

        return call

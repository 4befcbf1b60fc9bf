"""Tables of costs over ports, and the cheapest values of all ports by eliminating one after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """The cheapest option of an item for every combination of its ports' values.

    Args:
        ports: Its ports, in the order of the keys.
        cheapest_options: Values of the ports to the number of the cheapest option and its cost.
    """

    ports: tuple[str, ...]
    cheapest_options: Mapping[tuple[int, ...], tuple[int, float]]

    @classmethod
    def cheapest(cls, options: Sequence[tuple[Mapping[str, int], float]]) -> Table:
        """Keeps the cheapest option of each combination; of equal ones the first."""
        ports = tuple(next(names for names, cost in options if math.isfinite(cost)))
        found: dict[tuple[int, ...], tuple[int, float]] = {}
        for number, (names, cost) in enumerate(options):
            if math.isfinite(cost):
                key = tuple(names[port] for port in ports)
                if key not in found or cost < found[key][1]:
                    found[key] = number, cost
        return cls(ports, found)

    def best(self, values: Mapping[str, int]) -> int:
        """The number of the cheapest option with these values."""
        return self.cheapest_options[tuple(values[port] for port in self.ports)][0]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Per port the largest value, plus one."""
        return tuple(max(key[place] for key in self.cheapest_options) + 1 for place in range(len(self.ports)))


@dataclass(frozen=True)
class _Dense:
    """Costs of all combinations, as an array with one dim per port."""

    ports: tuple[str, ...]
    costs: Costs


def eliminate(tables: Sequence[Table], *, largest: int) -> dict[str, int] | None:
    """Finds the value of every port with which the tables cost least together.

    Args:
        tables: One per item.
        largest: Entries that a table may have.

    Returns:
        Port to value; None if nothing fits together, or a table would become too large.
    """
    sizes: dict[str, int] = {}
    for table in tables:
        for port, size in zip(table.ports, table.sizes, strict=True):
            sizes[port] = max(size, sizes.get(port, 0))
    if any(math.prod(sizes[port] for port in table.ports) > largest for table in tables):
        return None
    eliminator = _Eliminator(sizes, largest)
    for table in tables:
        eliminator.add(_dense(table, sizes))
    return eliminator.run()


def _dense(table: Table, sizes: Mapping[str, int]) -> _Dense:
    costs = np.full([sizes[port] for port in table.ports], math.inf)
    for key, (_, cost) in table.cheapest_options.items():
        costs[key] = cost
    return _Dense(table.ports, costs)


class _Eliminator:
    """The tables that are left, and how each eliminated port follows from the others."""

    def __init__(self, sizes: Mapping[str, int], largest: int) -> None:
        self._sizes = sizes
        self._largest = largest
        self._tables: dict[str, list[_Dense]] = {port: [] for port in sizes}
        self._neighbours: dict[str, set[str]] = {port: set() for port in sizes}
        self._constant = 0.0
        self._followed: list[tuple[str, tuple[str, ...], npt.NDArray[np.intp]]] = []

    def add(self, table: _Dense) -> None:
        """Adds a table."""
        if not table.ports:
            self._constant += float(table.costs)
        for port in table.ports:
            self._tables[port].append(table)
            self._neighbours[port] |= set(table.ports) - {port}

    def run(self) -> dict[str, int] | None:
        """Eliminates all ports, those with the smallest tables first, and finds their values on the way back."""
        waiting = {port: self._cost(port) for port in self._sizes}
        while waiting:
            port = min(waiting, key=waiting.__getitem__)
            if waiting.pop(port) > self._largest:
                return None
            touched = self._neighbours[port]
            self._remove(port)
            for other in touched:
                waiting[other] = self._cost(other)
        if not math.isfinite(self._constant):
            return None
        values: dict[str, int] = {}
        for port, others, best in reversed(self._followed):
            values[port] = int(best[tuple(values[other] for other in others)])
        return values

    def _cost(self, port: str) -> int:
        return math.prod(self._sizes[other] for other in self._neighbours[port]) * self._sizes[port]

    def _remove(self, port: str) -> None:
        others = tuple(sorted(self._neighbours[port]))
        tables = list({id(table): table for table in self._tables.pop(port)}.values())
        scope = (*others, port)
        total = np.zeros([self._sizes[name] for name in scope])
        for table in tables:
            total = total + _aligned(table, scope)
        best = np.argmin(total, axis=-1)
        self._followed.append((port, others, best))
        for other in others:
            self._tables[other] = [table for table in self._tables[other] if port not in table.ports]
            self._neighbours[other].discard(port)
        self.add(_Dense(others, np.asarray(total.min(axis=-1))))


def _aligned(table: _Dense, scope: tuple[str, ...]) -> Costs:
    """The costs with their dims in the order of a wider scope, ready to be added."""
    order = sorted(range(len(table.ports)), key=lambda place: scope.index(table.ports[place]))
    shape = [1] * len(scope)
    for place in order:
        shape[scope.index(table.ports[place])] = table.costs.shape[place]
    return table.costs.transpose(order).reshape(shape)

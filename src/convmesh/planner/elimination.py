"""The cheapest values of all ports, by eliminating one after the other.

The order and the shapes of all tables follow from which ports items share, and are found once; for each set of costs
only numbers are added and compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Step:
    """How one port is eliminated.

    Args:
        port: The port.
        others: The ports that it shares a table with.
        tables: Numbers of the tables that hold it, each with the order of its dims and the shape that aligns it with
            ``others`` and the port itself.
    """

    port: str
    others: tuple[str, ...]
    tables: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class _Layout:
    """How the options of an item are laid out in its table.

    Args:
        scope: Its ports, one dim each.
        shape: Number of values of each.
        strides: Entries from one value of a port to the next.
        cells: The entry of each option; None for one that can't be chosen.
    """

    scope: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    cells: tuple[int | None, ...]

    @property
    def size(self) -> int:
        """Its entries."""
        return math.prod(self.shape)


class Elimination:
    """Chooses one option per item, without limits.

    Args:
        items: Per item, per option: port to number of its value; None for an option that can't be chosen.
        largest: Entries that a table may have.
    """

    def __init__(self, items: Sequence[Sequence[Mapping[str, int] | None]], *, largest: int) -> None:
        self._sizes: dict[str, int] = {}
        for options in items:
            for ports in options:
                for port, value in (ports or {}).items():
                    self._sizes[port] = max(value + 1, self._sizes.get(port, 1))
        self._tables = [self._laid_out(options) for options in items]
        self._steps: list[_Step] = []
        self.possible = all(table.size <= largest for table in self._tables)
        if self.possible:
            self._starts = np.cumsum([0, *(table.size for table in self._tables)])
            unused = int(self._starts[-1])
            self._cells = np.asarray(
                [
                    unused if cell is None else int(start) + cell
                    for table, start in zip(self._tables, self._starts[:-1], strict=True)
                    for cell in table.cells
                ],
                dtype=np.intp,
            )
            self._numbers = np.asarray([len(table.cells) for table in self._tables])
            self.possible = self._order([table.scope for table in self._tables], largest)

    def _laid_out(self, options: Sequence[Mapping[str, int] | None]) -> _Layout:
        scope = tuple(next((ports for ports in options if ports is not None), {}))
        shape = tuple(self._sizes[port] for port in scope)
        strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
        cells = tuple(
            None if ports is None else sum(ports[port] * step for port, step in zip(scope, strides, strict=True))
            for ports in options
        )
        return _Layout(scope, shape, strides, cells)

    def _order(self, scopes: Sequence[tuple[str, ...]], largest: int) -> bool:
        """Plans the steps, those with the smallest tables first; False if a table would become too large."""
        tables: dict[int, tuple[str, ...]] = dict(enumerate(scopes))
        holders: dict[str, dict[int, None]] = {port: {} for port in self._sizes}
        for number, scope in tables.items():
            for port in scope:
                holders[port][number] = None

        def neighbours(port: str) -> set[str]:
            return {other for number in holders[port] for other in tables[number]} - {port}

        def size(port: str) -> int:
            return math.prod(self._sizes[other] for other in neighbours(port)) * self._sizes[port]

        waiting = {port: size(port) for port in self._sizes}
        while waiting:
            port = min(waiting, key=waiting.__getitem__)
            if waiting.pop(port) > largest:
                return False
            others = tuple(sorted(neighbours(port)))
            scope = (*others, port)
            held = list(holders.pop(port))
            self._steps.append(
                _Step(port, others, tuple(self._aligned(number, tables[number], scope) for number in held))
            )
            made = len(scopes) + len(self._steps) - 1
            tables[made] = others
            for other in others:
                for number in held:
                    holders[other].pop(number, None)
                holders[other][made] = None
            waiting.update((other, size(other)) for other in others)
        return True

    def _aligned(
        self, number: int, scope: tuple[str, ...], wider: tuple[str, ...]
    ) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        order = tuple(sorted(range(len(scope)), key=lambda place: wider.index(scope[place])))
        return number, order, tuple(self._sizes[port] if port in scope else 1 for port in wider)

    def solve(self, costs: Costs) -> tuple[int, ...] | None:
        """Finds the cheapest options.

        Args:
            costs: Of all options of all items, one after the other.

        Returns:
            The number of the chosen option of each item; None if nothing fits together.
        """
        cells = np.full(int(self._starts[-1]) + 1, math.inf)
        np.minimum.at(cells, self._cells, costs)
        tables: list[Any] = [
            cells[start:end].reshape(table.shape)
            for start, end, table in zip(self._starts[:-1], self._starts[1:], self._tables, strict=True)
        ]
        rest = [float(costs) for costs, table in zip(tables, self._tables, strict=True) if not table.scope]
        followed = []
        for step in self._steps:
            total: Any = 0.0
            for number, order, shape in step.tables:
                total = total + tables[number].transpose(order).reshape(shape)
            followed.append((step.port, step.others, total.argmin(axis=-1)))
            tables.append(total.min(axis=-1))
            if not step.others:
                rest.append(float(tables[-1]))
        if not all(map(math.isfinite, rest)):
            return None
        return self._chosen(_values(followed), costs)

    def _chosen(self, values: Mapping[str, int], costs: Costs) -> tuple[int, ...]:
        """Of the options of each item that have these values of its ports, the cheapest; of equal ones the first."""
        taken = [
            start + sum(values[port] * step for port, step in zip(table.scope, table.strides, strict=True))
            for start, table in zip(self._starts[:-1], self._tables, strict=True)
        ]
        fitting = np.where(self._cells == np.repeat(taken, self._numbers), costs, math.inf)
        firsts = np.cumsum([0, *self._numbers[:-1]])
        cheapest = np.repeat(np.minimum.reduceat(fitting, firsts), self._numbers)
        places = np.flatnonzero(fitting == cheapest)
        _, where = np.unique(np.repeat(np.arange(len(firsts)), self._numbers)[places], return_index=True)
        return tuple((places[where] - firsts).tolist())


def _values(followed: Sequence[tuple[str, tuple[str, ...], Any]]) -> dict[str, int]:
    """The values of all ports, from the one that was eliminated last to the first."""
    values: dict[str, int] = {}
    for port, others, best in reversed(followed):
        values[port] = int(best[tuple(values[other] for other in others)])
    return values

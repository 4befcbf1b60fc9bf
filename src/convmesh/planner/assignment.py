"""The cheapest choice of one option per item, exactly.

Items are operators of a network; the options of one are the ways in which it can run. Neighbours have to agree: on the
placement of the tensor between them, say. What they have to agree on is a *port*; an option names the value that each
of its item's ports has with it, and all items that share a port must choose options with the same value. Whatever an
edge costs is part of the option of the item at whose border it is spent. Some resources, such as memory at a moment of
the step, may be limited: each option has a load on each.

Without limits, ports are eliminated one after the other (dynamic programming on the graph of items; Bertelè and
Brioschi, Nonserial Dynamic Programming, 1972): the time grows with the number of items, and exponentially only with how
entangled they are. With limits that the unlimited optimum breaks, or where items are too entangled, the same problem is
solved as an integer program by HiGHS (https://highs.dev):

    minimise sum_io cost_io x_io  where  sum_o x_io = 1 for each item i,
    sum_{o: port p has a} x_io = sum_{o: port p has a} x_jo for items i, j of port p and each value a,
    sum_io load_io x_io <= limit for each resource,  x_io in {0, 1}.

Both are exact, and deterministic: nothing depends on time, and of equal costs the option that stands first is taken.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise

import numpy as np
import numpy.typing as npt

from convmesh.planner.elimination import Elimination
from convmesh.planner.integer import Row, solve_integer
from convmesh.planner.ports import Ports, merge_ports

LARGEST_TABLE = 2**16
"""Entries of a table up to which ports are eliminated; larger problems are left to HiGHS."""

_MOST_PRICES = 16

Numbers = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class Assignment:
    """One option per item.

    Args:
        options: Number of the chosen option of each item.
        cost: The sum of their costs.
        loads: The sum of their loads, per resource.
    """

    options: tuple[int, ...]
    cost: float
    loads: tuple[float, ...] = ()


class Problem:
    """Items, their options, and what neighbours have to agree on; costs and limits may then be tried in turn.

    Args:
        items: Per item, per option: port to value. All options of an item name the same ports.
    """

    def __init__(self, items: Sequence[Sequence[Ports]]) -> None:
        self._items = items
        self._starts = [0, *accumulate(map(len, items))]
        self._merged = merge_ports(items)
        self._elimination = Elimination(self._merged, largest=LARGEST_TABLE)

    def solve(
        self,
        costs: Numbers,
        *,
        loads: Sequence[Numbers] = (),
        limits: Sequence[float] = (),
    ) -> Assignment | None:
        """Chooses one option per item.

        Args:
            costs: Of all options of all items, one after the other; infinite for one that is impossible.
            loads: Per resource what each option takes of it, in the same order.
            limits: Per resource how much there is.

        Returns:
            The cheapest choice within the limits, or None if there is none.
        """
        free = self._elimination.solve(np.asarray(costs, dtype=float)) if self._elimination.possible else None
        if free is not None:
            found = self._summed(free, costs, loads)
            if all(load <= limit for load, limit in zip(found.loads, limits, strict=True)):
                return found
        elif self._elimination.possible:
            return None
        chosen = self._limited(costs, loads, limits)
        return None if chosen is None else self._summed(chosen, costs, loads)

    def at_a_price(self, costs: Numbers, *, loads: Numbers, limit: float) -> Assignment | None:
        """A choice within a limit that is the cheapest for what it takes of the resource.

        The resource gets a price, which is raised until the cheapest choice keeps the limit (Everett, Generalized
        Lagrange multiplier method, 1963). Of a large number of small items little is lost by that.

        Args:
            costs: As for ``solve``.
            loads: What each option takes of the resource.
            limit: How much of it there is.

        Returns:
            The choice; None if no price was found at which the limit is kept, or items are too entangled.
        """
        if not self._elimination.possible:
            return None
        own, taken = np.asarray(costs, dtype=float), np.asarray(loads, dtype=float)
        low, high, best = 0.0, float(np.max(own)) / max(limit, 1.0), None
        for _ in range(_MOST_PRICES):
            price = high if best is None else (low + high) / 2
            chosen = self._elimination.solve(own + price * taken)
            if chosen is None:
                return None
            found = self._summed(chosen, costs, [loads])
            if found.loads[0] > limit:
                low, high = price, max(high, 4 * price if best is None else high)
                continue
            high = price
            if best is None or found.cost < best.cost:
                best = found
        return best

    def below(
        self, costs: Numbers, *, loads: Numbers, limit: float, bound: Callable[[], float], most_steps: int
    ) -> Iterator[Assignment | None]:
        """Goes through all choices that cost less than a bound and keep a limit, which the caller may lower on the way.

        Args:
            costs: As for ``solve``.
            loads: What each option takes of the resource.
            limit: How much of it there is.
            bound: What a choice has to undercut now.
            most_steps: Options that are looked at, after which it gives up.

        Yields:
            One choice after the other; None at the end if it gave up.
        """
        rest = np.minimum.reduceat(np.asarray(costs, dtype=float), self._starts[:-1])
        remaining = [*np.cumsum(rest[::-1])[::-1].tolist(), 0.0]
        least = np.minimum.reduceat(np.asarray(loads, dtype=float), self._starts[:-1])
        needed = [*np.cumsum(least[::-1])[::-1].tolist(), 0.0]
        order = [sorted(range(start, end), key=lambda place: costs[place]) for start, end in pairwise(self._starts)]
        steps = 0
        stack: list[tuple[int, float, float, dict[str, int]]] = [(-1, 0.0, 0.0, {})]
        chosen = [0] * len(order)
        # Depth first; each entry is an option that was taken, with the sums and the values of ports up to it.
        while stack:
            option, cost, load, values = stack.pop()
            depth = self._depth(option) if option >= 0 else 0
            if option >= 0:
                chosen[depth - 1] = option - self._starts[depth - 1]
            if cost + remaining[depth] >= bound() or load + needed[depth] > limit:
                continue
            if depth == len(order):
                yield self._summed(chosen, costs, [loads])
                continue
            for other in reversed(order[depth]):
                steps += 1
                ports = self._keys[other]
                if ports is not None and all(values.get(port, value) == value for port, value in ports):
                    more = cost + float(costs[other]), load + float(loads[other])
                    stack.append((other, *more, {**values, **dict(ports)}))
            if steps > most_steps:
                yield None
                return

    def _depth(self, option: int) -> int:
        """How many items come up to the one of an option, itself included."""
        return bisect.bisect_right(self._starts, option)

    @property
    def has_choice(self) -> bool:
        """Whether any item has several options."""
        return self._starts[-1] > len(self._items)

    def _summed(self, chosen: Sequence[int], costs: Numbers, loads: Sequence[Numbers]) -> Assignment:
        places = [start + number for start, number in zip(self._starts, chosen, strict=False)]
        cost = math.fsum(float(costs[place]) for place in places)
        return Assignment(tuple(chosen), cost, tuple(math.fsum(float(own[place]) for place in places) for own in loads))

    def _limited(
        self,
        costs: Numbers,
        loads: Sequence[Numbers],
        limits: Sequence[float],
    ) -> list[int] | None:
        bounded = [(own, limit) for own, limit in zip(loads, limits, strict=True) if math.isfinite(limit)]
        kept = list(self._undominated(costs, [own for own, _ in bounded]))
        if not all(kept):
            return None
        flat = list(chain.from_iterable(kept))
        offsets = [0, *accumulate(map(len, kept))]
        rows = [
            *(Row(dict.fromkeys(range(start, end), 1.0), 1.0, 1.0) for start, end in pairwise(offsets)),
            *self._agreements(flat, offsets),
            *(
                Row({place: float(own[option]) for place, option in enumerate(flat)}, -math.inf, limit)
                for own, limit in bounded
            ),
        ]
        chosen = solve_integer([float(costs[option]) for option in flat], rows)
        if chosen is None:
            return None
        taken = [option for place, option in enumerate(flat) if chosen[place]]
        return [option - start for option, start in zip(taken, self._starts, strict=False)]

    @cached_property
    def _keys(self) -> list[tuple[tuple[str, int], ...] | None]:
        """Ports and values of every option, so that equal ones can be told."""
        return [None if ports is None else tuple(ports.items()) for options in self._merged for ports in options]

    def _undominated(self, costs: Numbers, loads: Sequence[Numbers]) -> Iterator[list[int]]:
        """Per item the options that no other one with the same ports beats in cost and in every load."""
        for start, end in pairwise(self._starts):
            best: dict[object, list[int]] = {}
            for option in sorted(range(start, end), key=lambda place: float(costs[place])):
                if self._keys[option] is None or not math.isfinite(float(costs[option])):
                    continue
                rivals = best.setdefault(self._keys[option], [])
                if not any(all(own[rival] <= own[option] for own in loads) for rival in rivals):
                    rivals.append(option)
            yield sorted(chain.from_iterable(best.values()))

    def _agreements(self, flat: Sequence[int], offsets: Sequence[int]) -> list[Row]:
        """One row per value of a port and item beyond the port's first: both choose it equally often."""
        users: dict[str, list[dict[int, list[int]]]] = {}
        for start, end in pairwise(offsets):
            seen: dict[str, dict[int, list[int]]] = {}
            for place in range(start, end):
                for port, value in self._keys[flat[place]] or ():
                    seen.setdefault(port, {}).setdefault(value, []).append(place)
            for port, by_value in seen.items():
                users.setdefault(port, []).append(by_value)
        rows = []
        for first, *others in users.values():
            for other in others:
                for value in dict.fromkeys([*first, *other]):
                    ahead, behind = first.get(value, ()), other.get(value, ())
                    rows.append(Row({**dict.fromkeys(ahead, 1.0), **dict.fromkeys(behind, -1.0)}, 0.0, 0.0))
        return rows

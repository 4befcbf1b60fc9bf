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

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

from convmesh.planner.elimination import Table, eliminate
from convmesh.planner.integer import Row, solve_integer
from convmesh.planner.ports import merge_ports

LARGEST_TABLE = 2**16
"""Entries of a table up to which ports are eliminated; larger problems are left to HiGHS."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way in which an item can be.

    Args:
        cost: What it costs; infinite if it is impossible.
        ports: Port to the value that it has with this option.
        loads: What it takes of each limited resource.
    """

    cost: float
    ports: Mapping[str, Hashable] = field(default_factory=dict)
    loads: tuple[float, ...] = ()


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


def assign(
    items: Sequence[Sequence[Option]], *, limits: Sequence[float] = (), relative_gap: float = 0.0
) -> Assignment | None:
    """Chooses one option per item.

    Args:
        items: The options of each item; all options of one name the same ports.
        limits: How much of each resource there is.
        relative_gap: How far from the optimum the answer may be where limits bind, as a share of its cost; 0 is exact.

    Returns:
        The cheapest choice within the limits, or None if there is none.
    """
    free = _unlimited(items)
    if free is not None and _fits(free, limits):
        return free
    if free is None and not _possible(items):
        return None
    return _limited(items, limits, relative_gap)


def lightest(items: Sequence[Sequence[Option]], resource: int) -> Assignment | None:
    """The choice that takes least of one resource, whatever it costs.

    Args:
        items: The options of each item.
        resource: Number of the resource.

    Returns:
        The choice; of equally light ones the cheapest is not sought. None if there is none.
    """
    swapped = [
        [
            Option(cost=option.loads[resource] if math.isfinite(option.cost) else math.inf, ports=option.ports)
            for option in options
        ]
        for options in items
    ]
    found = assign(swapped)
    return None if found is None else _summed(items, found.options)


def _summed(items: Sequence[Sequence[Option]], chosen: Sequence[int]) -> Assignment:
    options = [item[number] for item, number in zip(items, chosen, strict=True)]
    loads = zip(*(option.loads for option in options), strict=True)
    return Assignment(tuple(chosen), math.fsum(option.cost for option in options), tuple(map(math.fsum, loads)))


def _fits(found: Assignment, limits: Sequence[float]) -> bool:
    return all(load <= limit for load, limit in zip(found.loads, limits, strict=False))


def _possible(items: Sequence[Sequence[Option]]) -> bool:
    return all(any(math.isfinite(option.cost) for option in options) for options in items)


def _unlimited(items: Sequence[Sequence[Option]]) -> Assignment | None:
    """The optimum without limits; None if there is none, or if it takes an integer program to find it."""
    merged = merge_ports([[(option.ports, option.cost) for option in options] for options in items])
    if merged is None:
        return None
    tables = [Table.cheapest(options) for options in merged]
    values = eliminate(tables, largest=LARGEST_TABLE)
    if values is None:
        return None
    return _summed(items, [table.best(values) for table in tables])


def _limited(items: Sequence[Sequence[Option]], limits: Sequence[float], relative_gap: float) -> Assignment | None:
    kept = [_undominated(options) for options in items]
    offsets = [0, *accumulate(map(len, kept))]
    flat = [items[item][number] for item, numbers in enumerate(kept) for number in numbers]
    rows = [
        *(Row(dict.fromkeys(range(start, end), 1.0), 1.0, 1.0) for start, end in pairwise(offsets)),
        *_agreements(flat, offsets),
        *(
            Row({place: option.loads[number] for place, option in enumerate(flat)}, -math.inf, limit)
            for number, limit in enumerate(limits)
            if math.isfinite(limit)
        ),
    ]
    chosen = solve_integer([option.cost for option in flat], rows, relative_gap=relative_gap)
    if chosen is None:
        return None
    numbers = [
        numbers[next(place for place in range(len(numbers)) if chosen[start + place])]
        for numbers, start in zip(kept, offsets, strict=False)
    ]
    return _summed(items, numbers)


def _undominated(options: Sequence[Option]) -> list[int]:
    """Options that no other one with the same ports beats in cost and in every load."""
    best: dict[tuple[tuple[str, Hashable], ...], list[int]] = {}
    for number, option in sorted(enumerate(options), key=lambda pair: (pair[1].cost, pair[0])):
        if not math.isfinite(option.cost):
            continue
        rivals = best.setdefault(tuple(sorted(option.ports.items(), key=lambda port: port[0])), [])
        if not any(
            all(own <= other for own, other in zip(options[rival].loads, option.loads, strict=True)) for rival in rivals
        ):
            rivals.append(number)
    return sorted(chain.from_iterable(best.values()))


def _agreements(flat: Sequence[Option], offsets: Sequence[int]) -> list[Row]:
    """One row per value of a port and item beyond the port's first: both choose it equally often."""
    users: dict[str, list[dict[Hashable, list[int]]]] = {}
    for start, end in pairwise(offsets):
        seen: dict[str, dict[Hashable, list[int]]] = {}
        for place in range(start, end):
            for port, value in flat[place].ports.items():
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

"""The exact choice: against every combination on small random problems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.planner import assignment
from convmesh.planner.assignment import Assignment, Problem


@dataclass(frozen=True, kw_only=True)
class Option:
    cost: float
    ports: Mapping[str, object] = field(default_factory=dict)
    loads: tuple[float, ...] = (0.0, 0.0)


Items = Sequence[Sequence[Option]]


def assign(items: Items, limits: Sequence[float] = ()) -> Assignment | None:
    flat = [option for options in items for option in options]
    problem = Problem([[option.ports for option in options] for options in items])
    loads = [[option.loads[number] for option in flat] for number in range(len(limits))]
    costs = [option.cost for option in flat]
    return problem.solve(costs, loads=loads, limits=limits)


COSTS = st.one_of(st.integers(0, 20).map(float), st.just(math.inf))


@st.composite
def problems(draw: st.DrawFn) -> list[list[Option]]:
    """Up to six items with up to three ports among five, values that not all items know, two resources."""
    items = []
    for _ in range(draw(st.integers(1, 6))):
        ports = draw(st.lists(st.sampled_from("abcde"), max_size=3, unique=True))
        items.append(
            [
                Option(
                    cost=draw(COSTS),
                    ports={port: draw(st.sampled_from((0, "x", 2))) for port in ports},
                    loads=(float(draw(st.integers(0, 9))), float(draw(st.integers(0, 9)))),
                )
                for _ in range(draw(st.integers(1, 4)))
            ]
        )
    return items


def brute_force(items: Items, limits: Sequence[float] = ()) -> float | None:
    best = math.inf
    for chosen in itertools.product(*items):
        values: dict[str, object] = {}
        agree = all(
            values.setdefault(port, value) == value for option in chosen for port, value in option.ports.items()
        )
        fits = all(sum(option.loads[number] for option in chosen) <= limit for number, limit in enumerate(limits))
        if agree and fits:
            best = min(best, sum(option.cost for option in chosen))
    return best if math.isfinite(best) else None


def check(items: Items, limits: Sequence[float]) -> None:
    found, expected = assign(items, limits=limits), brute_force(items, limits)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.cost == pytest.approx(expected, abs=1e-6)
        chosen = [item[number] for item, number in zip(items, found.options, strict=True)]
        assert found.cost == sum(option.cost for option in chosen)
        assert all(load <= limit for load, limit in zip(found.loads, limits, strict=False))
        assert assign(items, limits=limits) == found


@given(items=problems())
@settings(max_examples=200, deadline=None)
def test_without_limits_it_is_the_optimum(items: list[list[Option]]) -> None:
    check(items, ())


@given(items=problems(), limits=st.tuples(st.integers(0, 30), st.one_of(st.integers(0, 30), st.just(math.inf))))
@settings(max_examples=150, deadline=None)
def test_with_limits_it_is_the_optimum_and_keeps_them(items: list[list[Option]], limits: tuple[float, float]) -> None:
    check(items, limits)


@given(items=problems())
@settings(max_examples=50, deadline=None)
def test_what_is_too_entangled_for_elimination_is_solved_all_the_same(items: list[list[Option]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignment, "LARGEST_TABLE", 1)
        check(items, ())


def test_a_block_of_concatenations_is_one_port() -> None:
    """Each layer reads all before it: forty ports that follow each other, far beyond any table."""
    names = [f"t{number}" for number in range(40)]
    items = [
        [Option(cost=0.0, ports=dict.fromkeys(names[: number + 2], value)) for value in ("whole", "split")]
        for number in range(38)
    ]
    items += [
        [Option(cost=float(value == "whole"), ports={name: value}) for value in ("whole", "split")] for name in names
    ]
    found = assign(items)
    assert found is not None
    assert found.cost == 0


def test_a_limit_in_bytes_is_kept_to_the_byte() -> None:
    size = 40 * 2**30
    items = [[Option(cost=0.0, loads=(size + 1.0, 0.0)), Option(cost=1.0, loads=(float(size), 0.0))]]
    found = assign(items, limits=(size,))
    assert found is not None
    assert found.loads == (size,)
    assert assign(items, limits=(size - 1,)) is None


@given(items=problems(), limit=st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_a_price_keeps_the_limit_and_never_beats_the_optimum(items: list[list[Option]], limit: int) -> None:
    flat = [option for options in items for option in options]
    problem = Problem([[option.ports for option in options] for options in items])
    costs, loads = [option.cost for option in flat], [option.loads[0] for option in flat]
    if any(math.isinf(cost) for cost in costs):
        return
    found, exact = problem.at_a_price(costs, loads=loads, limit=limit), assign(items, (limit,))
    if found is not None:
        assert exact is not None
        assert found.loads[0] <= limit
        assert found.cost >= exact.cost - 1e-9

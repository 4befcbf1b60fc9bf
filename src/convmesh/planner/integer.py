"""Integer programs over yes-or-no variables, solved by HiGHS through scipy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """``lower <= sum of coefficient x variable <= upper``.

    Args:
        coefficients: Number of the variable to its coefficient.
        lower: The lower bound.
        upper: The upper bound.
    """

    coefficients: Mapping[int, float]
    lower: float
    upper: float


def solve_integer(costs: Sequence[float], rows: Sequence[Row]) -> list[bool] | None:
    """Finds the cheapest choice.

    Args:
        costs: Cost of each variable.
        rows: What a choice has to keep, exactly.

    Returns:
        Which variables are chosen; None if no choice keeps all rows.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    rows, scale = list(rows), max(map(abs, costs), default=0.0) or 1.0
    while True:
        matrix, lower, upper = _scaled(rows)
        found: Any = milp(
            np.asarray(costs) / scale,
            integrality=np.ones(len(costs)),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(csr_array(matrix, shape=(len(rows), len(costs))), lower, upper),
            options={"mip_rel_gap": 0.0},
        )
        if found.x is None:
            return None
        chosen = [value > 0.5 for value in found.x]
        # HiGHS keeps rows within a tolerance of one millionth. What breaks a limit by less can't be chosen together.
        covers = [_cover(row, chosen) for row in rows if math.isinf(row.lower) and _sum(row, chosen) > row.upper]
        if not covers:
            return chosen
        rows += covers


def _cover(row: Row, chosen: Sequence[bool]) -> Row:
    members = [place for place, value in row.coefficients.items() if chosen[place] and value > 0]
    return Row(dict.fromkeys(members, 1.0), -math.inf, len(members) - 1.0)


def _sum(row: Row, chosen: Sequence[bool]) -> float:
    return math.fsum(value for place, value in row.coefficients.items() if chosen[place])


def _scaled(rows: Sequence[Row]) -> tuple[Any, list[float], list[float]]:
    """The rows as a sparse matrix, each divided by its largest bound so that one tolerance suits all."""
    data: list[float] = []
    columns: list[int] = []
    places: list[int] = []
    lower, upper = [], []
    for number, row in enumerate(rows):
        size = abs(row.upper) if math.isinf(row.lower) and row.upper else 1.0
        for place, value in row.coefficients.items():
            data.append(value / size)
            columns.append(place)
            places.append(number)
        lower.append(row.lower / size)
        upper.append(row.upper / size)
    return (data, (places, columns)), lower, upper

"""How evenly classes are spread over ranks: deviations from proportional shares, and grids small enough to look at.

Legend: R ranks, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BETWEEN = " … "
"""Stands between the first and the last class of a column that holds several."""


@dataclass(frozen=True)
class BalanceGrid:
    """Deviations in a grid that fits a page; neighbouring ranks or classes share a cell where there are too many.

    Args:
        deviation_RC: Samples above (or below) the proportional share, per cell: the largest in size that fell into it.
        row_labels: Ranks of each row, ``"3"`` or ``"4-7"``.
        column_labels: Class of each column, or first and last class of those it holds.
        largest: Largest size of a deviation in the whole table, in samples.
    """

    deviation_RC: Floats
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    largest: float


def deviations(counts_RC: npt.ArrayLike) -> Floats:
    """Samples of each class that a rank sees above its proportional share.

    The share of a rank is its part of all samples: ``expected = rows * columns / total`` of the table.

    Args:
        counts_RC: Samples per rank and class, shape (R, C).

    Returns:
        ``counts - expected``, shape (R, C); negative where a rank sees too few.
    """
    counts = np.asarray(counts_RC, dtype=np.float64)
    total = counts.sum()
    expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0, keepdims=True) / (total or 1.0)
    deviation: Floats = counts - expected
    return deviation


def balance_grid(
    counts_RC: npt.ArrayLike, class_names: Sequence[str], *, max_rows: int = 32, max_columns: int = 60
) -> BalanceGrid:
    """Deviations, put together where there are more ranks or classes than can be told apart.

    A cell that stands for several shows the one that deviates most, never a mean: means hide what one looks for.

    Args:
        counts_RC: Samples per rank and class, shape (R, C).
        class_names: Name of each class.
        max_rows: Most rows of the grid.
        max_columns: Most columns of the grid.

    Returns:
        The grid.
    """
    deviation = deviations(counts_RC)
    num_ranks, num_classes = deviation.shape
    names = [*map(str, class_names[:num_classes])]
    names += [str(index) for index in range(len(names), num_classes)]
    rows, columns = _parts(num_ranks, max_rows), _parts(num_classes, max_columns)
    grid = _extreme(_extreme(deviation, columns, axis=1), rows, axis=0)
    return BalanceGrid(
        deviation_RC=grid,
        row_labels=tuple(_label([str(rank) for rank in range(num_ranks)], part, "-") for part in rows),
        column_labels=tuple(_label(names, part, BETWEEN) for part in columns),
        largest=float(np.abs(deviation).max(initial=0.0)),
    )


def worst_classes(
    counts_RC: npt.ArrayLike, class_names: Sequence[str], *, limit: int = 5
) -> list[tuple[str, int, int, float]]:
    """The classes that are spread least evenly.

    Args:
        counts_RC: Samples per rank and class, shape (R, C).
        class_names: Name of each class.
        limit: How many are wanted.

    Returns:
        Class, rank, samples that the rank sees, and its share; only those off by one sample or more.
    """
    counts = np.asarray(counts_RC, dtype=np.float64)
    deviation = deviations(counts)
    size = np.abs(deviation)
    worst = np.argsort(-size.max(axis=0, initial=0.0), kind="stable")[:limit]
    found = [(int(size[:, column].argmax()), int(column)) for column in worst]
    return [
        (
            str(class_names[column]) if column < len(class_names) else str(column),
            rank,
            int(counts[rank, column]),
            float(counts[rank, column] - deviation[rank, column]),
        )
        for rank, column in found
        if size[rank, column] >= 1
    ]


def _parts(length: int, limit: int) -> list[range]:
    num_parts = min(length, limit)
    borders = [round(index * length / num_parts) for index in range(num_parts + 1)] if num_parts else []
    return [range(start, end) for start, end in pairwise(borders)]


def _extreme(values: Floats, parts: Sequence[range], *, axis: int) -> Floats:
    columns = []
    for part in parts:
        piece = np.take(values, np.asarray(part), axis=axis)
        index = np.abs(piece).argmax(axis=axis, keepdims=True)
        columns.append(np.take_along_axis(piece, index, axis=axis))
    return np.concatenate(columns, axis=axis) if columns else values


def _label(names: Sequence[str], part: range, between: str) -> str:
    first, last = names[part[0]], names[part[-1]]
    return first if len(part) == 1 else f"{first}{between}{last}"

"""Pictures as PNG files, made with matplotlib.

Legend: R ranks, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from convmesh.errors import DataError
from convmesh.report.balance import BETWEEN, BalanceGrid, balance_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_NUMBERED_CELLS = 260
_MAX_COLUMN_LABELS = 40


def save_class_balance(counts_RC: npt.ArrayLike, class_names: Sequence[str], path: Path | str) -> Path:
    """Draws how far each rank's samples of each class are from its proportional share.

    Up to 64 ranks and 120 classes have a cell each; of more, neighbours share one that shows the largest deviation.

    Args:
        counts_RC: Samples per rank and class, shape (R, C).
        class_names: Name of each class.
        path: The PNG file; its folder is made if missing.

    Returns:
        The path.

    Raises:
        DataError: If there is nothing to draw, or the file can't be written.
    """
    counts = np.asarray(counts_RC)
    if counts.ndim != 2 or counts.size == 0:
        raise DataError("a class balance needs ranks and classes", got=f"shape {counts.shape}", expected="(R, C)")
    from matplotlib.figure import Figure

    grid = balance_grid(counts, class_names, max_rows=64, max_columns=120)
    num_rows, num_columns = grid.deviation_RC.shape
    figure = Figure(
        figsize=(min(18.0, max(7.0, 2.4 + 0.62 * num_columns)), min(14.0, max(2.9, 2.2 + 0.34 * num_rows))),
        dpi=110,
        layout="constrained",
    )
    axes = figure.subplots()
    _draw_cells(axes, grid, counts)
    _label_axes(axes, grid)
    where = Path(path)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(where, format="png")
    except OSError as error:
        raise DataError(f"the picture can't be written to '{where}'", got=error.strerror or str(error)) from error
    return where


def _draw_cells(axes: Axes, grid: BalanceGrid, counts: npt.NDArray[np.generic]) -> None:
    num_rows, num_columns = grid.deviation_RC.shape
    limit = max(1.0, grid.largest)
    mesh = axes.pcolormesh(
        np.arange(num_columns + 1) - 0.5,
        np.arange(num_rows + 1) - 0.5,
        grid.deviation_RC,
        cmap="PuOr_r",
        vmin=-limit,
        vmax=limit,
        edgecolors="white",
        linewidth=0.6 if num_columns <= 60 else 0.0,
    )
    axes.invert_yaxis()
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.015, aspect=max(10, 0.8 * num_rows))
    bar.set_label("samples above its share", fontsize=9)
    bar.outline.set_visible(False)
    if grid.deviation_RC.shape != counts.shape or counts.size > _MAX_NUMBERED_CELLS:
        return
    for (row, column), deviation in np.ndenumerate(grid.deviation_RC):
        strong = abs(deviation) > 0.65 * limit
        axes.text(
            column,
            row,
            f"{int(counts[row, column])}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if strong else "#222222",
        )


def _label_axes(axes: Axes, grid: BalanceGrid) -> None:
    num_rows, num_columns = grid.deviation_RC.shape
    columns = range(0, num_columns, max(1, math.ceil(num_columns / _MAX_COLUMN_LABELS)))
    # Names come from folders of the user: a dollar sign in one is no formula.
    names = [grid.column_labels[index].partition(BETWEEN)[0].replace("$", r"\$") for index in columns]
    axes.set_xticks(list(columns), [name if len(name) < 24 else f"{name[:22]}…" for name in names])
    axes.tick_params(axis="x", labelrotation=45 if num_columns > 6 else 0, labelsize=8)
    for label in axes.get_xticklabels():
        label.set_horizontalalignment("right" if num_columns > 6 else "center")
        label.set_rotation_mode("anchor")
    rows = range(0, num_rows, max(1, math.ceil(num_rows / 32)))
    axes.set_yticks(list(rows), [grid.row_labels[index] for index in rows], fontsize=8)
    axes.set_ylabel("rank")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    even = ", as even as can be" if grid.largest < 1 else ""
    axes.set_title(
        f"Samples of each class, per rank and epoch\nat most {grid.largest:.2f} from the proportional share{even}",
        fontsize=10,
        loc="left",
    )

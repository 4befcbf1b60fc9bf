"""Which charts a run gets, made from its records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convmesh.report.balance import BETWEEN, BalanceGrid, Floats, balance_grid, worst_classes
from convmesh.report.charts import (
    ColumnChart,
    LineChart,
    Point,
    Series,
    column_chart,
    line_chart,
    smooth,
)
from convmesh.report.run_folder import Record, RunData, as_number, number, numbers, section
from convmesh.units import format_bytes

_HEAT_LEFT, _HEAT_TOP, _HEAT_WIDTH, _HEAT_RIGHT_MARGIN = 62, 8, 1120, 8
_MAX_TEXT_CELLS = 400
_SLOW_SHARE = 0.05


@dataclass(frozen=True)
class HeatCell:
    """A cell of the heat map: ``strength`` from 0 to 1, ``more`` or fewer samples than the proportional share."""

    x: float
    y: float
    strength: float
    more: bool
    number: str
    text: str


@dataclass(frozen=True)
class HeatMap:
    """The class balance of all ranks, ready to be written as SVG."""

    left: float
    top: float
    labels_y: float
    width: float
    height: float
    num_rows: int
    num_columns: int
    cell_width: float
    cell_height: float
    cells: tuple[HeatCell, ...]
    row_labels: tuple[tuple[float, str], ...]
    column_labels: tuple[tuple[float, str], ...]
    limit: float
    largest: float
    worst: tuple[tuple[str, int, int, float], ...]
    num_classes: int
    grouped: bool


def training_charts(run: RunData) -> list[LineChart]:
    """The charts over updates that the run has records for: loss, accuracy, throughput, learning rate and so on."""
    charts = [
        _loss_chart(run),
        _accuracy_chart(run.evals),
        _throughput_chart(run.steps),
        _learning_rate_chart(run.steps),
        _gradient_norm_chart(run.steps),
        *_loss_scale_charts(run),
    ]
    return [chart for chart in charts if chart is not None]


def rank_charts(run: RunData) -> list[ColumnChart]:
    """Step time, memory and optimizer state, rank by rank."""
    peaks = numbers(run.summary, "peak_memory_bytes")
    states = numbers(run.summary, "optimizer_bytes")
    charts = [
        _step_time_chart(run.steps),
        column_chart(
            "Peak memory",
            [[peak] for peak in peaks],
            legend=["peak memory"],
            texts=[f"rank {rank}: {format_bytes(peak)}" for rank, peak in enumerate(peaks)],
            unit_divisor=2**20,
            note="MiB, the largest of the whole run; on CPU the resident memory of the process.",
        ),
        column_chart(
            "Optimizer state",
            [[state] for state in states],
            legend=["optimizer state"],
            texts=[f"rank {rank}: {format_bytes(state)}" for rank, state in enumerate(states)],
            unit_divisor=2**10,
            note="KiB held by each rank.",
        ),
    ]
    return [chart for chart in charts if chart is not None]


def class_heat_map(run: RunData) -> HeatMap | None:
    """The heat map of samples per rank and class, or None if the summary has none."""
    balance = section(run.summary, "class_balance")
    counts = _table(balance.get("counts"))
    if counts is None:
        return None
    names = [str(name) for name in balance.get("class_names") or ()]
    grid = balance_grid(counts, names)
    num_rows, num_columns = grid.deviation_RC.shape
    width = (_HEAT_WIDTH - _HEAT_LEFT - _HEAT_RIGHT_MARGIN) / num_columns
    height = 30.0 if num_rows <= 8 else 20.0 if num_rows <= 16 else 13.0
    labels_y = _HEAT_TOP + num_rows * height + 14
    labels = tuple(
        (round(_HEAT_LEFT + (index + 0.5) * width, 1), _short(grid.column_labels[index].partition(BETWEEN)[0]))
        for index in range(0, num_columns, max(1, math.ceil(num_columns / 20)))
    )
    return HeatMap(
        labels_y=labels_y,
        left=_HEAT_LEFT,
        top=_HEAT_TOP,
        num_rows=num_rows,
        num_columns=num_columns,
        width=_HEAT_WIDTH,
        height=labels_y + 10 + 4.6 * max(len(label) for _, label in labels),
        cell_width=round(width, 2),
        cell_height=height,
        cells=_heat_cells(grid, counts, width, height),
        row_labels=tuple(
            (_HEAT_TOP + (row + 0.5) * height, grid.row_labels[row])
            for row in range(0, num_rows, 1 if height > 16 else 2)
        ),
        column_labels=labels,
        limit=max(1.0, grid.largest),
        largest=grid.largest,
        worst=tuple(worst_classes(counts, names)),
        num_classes=counts.shape[1],
        grouped=grid.deviation_RC.shape != counts.shape,
    )


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an update on one rank, as medians over the run.

    Args:
        own: Computing, and whatever else the rank does itself.
        communication: Exchanging, and waiting for other ranks in it; 0 if the run did not note it.
        data: Waiting for data before.
    """

    own: float
    communication: float
    data: float


def mean_step_times(steps: Sequence[Record]) -> list[StepTimes]:
    """How long an update takes on each rank.

    The first record is left out where others remain: it holds compilation and warm-up.
    """
    num_ranks = next((len(numbers(step, "step_seconds")) for step in reversed(steps)), 0)
    rows = []
    for step in steps:
        work, data = numbers(step, "step_seconds"), numbers(step, "data_seconds")
        communication = numbers(step, "communication_seconds") or [0.0] * num_ranks
        if len(work) == len(data) == len(communication) == num_ranks:
            rows.append(([a - b for a, b in zip(work, communication, strict=True)], communication, data))
    rows = rows[1:] if len(rows) > 1 else rows
    return [StepTimes(*(_median([row[part][rank] for row in rows]) for part in range(3))) for rank in range(num_ranks)]


def _heat_cells(grid: BalanceGrid, counts: Floats, width: float, height: float) -> tuple[HeatCell, ...]:
    numbered = grid.deviation_RC.shape == counts.shape and counts.size <= _MAX_TEXT_CELLS
    limit = max(1.0, grid.largest)
    cells = []
    for (row, column), deviation in np.ndenumerate(grid.deviation_RC):
        value = float(deviation)
        shown = str(int(counts[row, column])) if numbered else ""
        where = f"rank {grid.row_labels[row]}, {grid.column_labels[column]}"
        text = f"{where}: {shown + ' samples, ' if shown else ''}{value:+.2f} from its share"
        x, y = round(_HEAT_LEFT + column * width, 1), _HEAT_TOP + row * height
        cells.append(HeatCell(x, y, round(min(1.0, abs(value) / limit), 3), value > 0, shown, text))
    return tuple(cells)


def _loss_chart(run: RunData) -> LineChart | None:
    points = _points(run.steps, "loss")
    smoothed = smooth(points)
    evaluated = _points(run.evals, "loss")
    series = [Series("training", points, "faint" if smoothed else "line")]
    if smoothed:
        series.append(Series("training, smoothed", smoothed, "line"))
    series.append(Series("evaluation", evaluated, "dots", 2))
    broken = sum(not math.isfinite(y) for _, y in points)
    note = f"{broken} of {len(points)} logged losses are not finite: see the marks." if broken else ""
    return line_chart("Loss", series, note=note, log_base=None)


def _accuracy_chart(evals: Sequence[Record]) -> LineChart | None:
    points = [(x, 100 * y) for x, y in _points(evals, "accuracy")]
    finite = [point for point in points if math.isfinite(point[1])]
    best = max(finite, key=lambda point: point[1], default=None)
    note = f"Best: {best[1]:.2f} % at update {best[0]:,.0f}." if best else ""
    return line_chart("Accuracy, %", [Series("accuracy", points, "dots", 2, " %")], note=note)


def _throughput_chart(steps: Sequence[Record]) -> LineChart | None:
    points = _points(steps, "images_per_second")
    return line_chart(
        "Throughput", [Series("images per second", points, "line", 3)], note="Images per second.", from_zero=True
    )


def _learning_rate_chart(steps: Sequence[Record]) -> LineChart | None:
    points = _points(steps, "learning_rate")
    return line_chart("Learning rate", [Series("learning rate", points, "line", 4)], from_zero=True)


def _gradient_norm_chart(steps: Sequence[Record]) -> LineChart | None:
    points = _points([step for step in steps if step.get("gradient_norm") is not None], "gradient_norm")
    return line_chart(
        "Gradient norm", [Series("gradient norm", points, "line", 4)], note="Before clipping.", log_base=None
    )


def _loss_scale_charts(run: RunData) -> list[LineChart | None]:
    scales = _points(run.steps, "loss_scale")
    uses_scale = section(run.config, "precision").get("compute") == "float16"
    if not uses_scale and not any(math.isfinite(y) and y != 1 for _, y in scales):
        return []
    skipped = _points(run.steps, "skipped_updates")
    return [
        line_chart("Loss scale", [Series("loss scale", scales, "stairs", 1)], log_base=2),
        line_chart(
            "Skipped updates",
            [Series("skipped so far", skipped, "stairs", 4)],
            note="Updates left out because a gradient overflowed, counted from the start.",
            from_zero=True,
        ),
    ]


def _step_time_chart(steps: Sequence[Record]) -> ColumnChart | None:
    times = mean_step_times(steps)
    return column_chart(
        "Time of an update",
        [[1000 * rank.own, 1000 * rank.communication, 1000 * rank.data] for rank in times],
        legend=["own work", "communicating, and waiting for other ranks", "waiting for data"],
        colours=(1, 2, 6),
        texts=[
            f"rank {number}: {1000 * rank.own:.1f} ms of own work, {1000 * rank.communication:.1f} ms communicating "
            f"and {1000 * rank.data:.1f} ms waiting for data per update"
            for number, rank in enumerate(times)
        ],
        note=f"Milliseconds, median over the run. {slow_rank_sentence(times)}",
    )


def slow_rank_sentence(times: Sequence[StepTimes]) -> str:
    """Says which rank holds the others up, as far as the times tell.

    All ranks end an update together, at the reduction of the gradients: the others wait there for the slow one, so
    whole times are nearly equal whoever is slow. What a rank does on its own, and its wait for data, tell.

    Args:
        times: Of each rank.

    Returns:
        One sentence.
    """
    if len(times) < 2 or not all(math.isfinite(rank.data) for rank in times):
        return ""
    whole = _median([rank.own + rank.communication + rank.data for rank in times])
    waits = [rank.data for rank in times]
    works = [rank.own for rank in times] if any(rank.communication for rank in times) else [0.0] * len(times)
    extra_wait, extra_work = max(waits) - min(waits), max(works) - statistics.median_low(works)
    if max(extra_wait, extra_work) <= _SLOW_SHARE * whole:
        return "No rank stands out: ranks end each update together, and all wait for data about as long."
    if extra_work > extra_wait:
        slowest = works.index(max(works))
        return (
            f"Rank {slowest} works longest on its own, {1000 * extra_work:.1f} ms more than most; "
            "the others wait for it in the reduction."
        )
    return (
        f"Rank {waits.index(max(waits))} waits longest for its data, {1000 * extra_wait:.1f} ms more than the "
        "quickest; the others wait for it in the reduction."
    )


def _points(records: Sequence[Record], key: str) -> list[Point]:
    pairs = [(number(record, "update"), number(record, key)) for record in records if key in record]
    return [(x, y) for x, y in pairs if math.isfinite(x)]


def _table(rows: Any) -> Floats | None:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        return None
    if len({len(row) for row in rows}) != 1:
        return None
    table = np.array([[as_number(value) for value in row] for row in rows])
    return np.nan_to_num(table, nan=0.0, posinf=0.0, neginf=0.0)


def _median(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def _short(label: str, limit: int = 18) -> str:
    return label if len(label) <= limit else label[: limit - 1] + "…"

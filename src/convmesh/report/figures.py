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
    ColumnNames,
    LineChart,
    Point,
    Series,
    column_chart,
    line_chart,
    smooth,
)
from convmesh.report.facts import Words
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
    grouped: bool


def training_charts(run: RunData, words: Words) -> list[LineChart]:
    """The charts over updates that the run has records for: loss, accuracy, throughput, learning rate and so on."""
    charts = [
        _loss_chart(run, words),
        _accuracy_chart(run.evals, words),
        _throughput_chart(run.steps, words),
        _learning_rate_chart(run.steps, words),
        _gradient_norm_chart(run.steps, words),
        *_loss_scale_charts(run, words),
    ]
    return [chart for chart in charts if chart is not None]


def rank_charts(run: RunData, words: Words) -> list[ColumnChart]:
    """Step time, memory and optimizer state, rank by rank."""
    charts = [
        _step_time_chart(run.steps, words),
        _bytes_chart(run, "peak_memory_bytes", words, title="peak_memory", note="peak_memory_note", divisor=2**20),
        _bytes_chart(run, "optimizer_bytes", words, title="optimizer_state", note="optimizer_note", divisor=2**10),
    ]
    return [chart for chart in charts if chart is not None]


def _bytes_chart(run: RunData, key: str, words: Words, *, title: str, note: str, divisor: float) -> ColumnChart | None:
    sizes = numbers(run.summary, key)
    return column_chart(
        words[title],
        [[size] for size in sizes],
        legend=[words[title]],
        texts=[words["rank_size"].format(rank=rank, size=format_bytes(size)) for rank, size in enumerate(sizes)],
        unit_divisor=divisor,
        note=words[note],
        columns=ColumnNames(words["rank"], [str(rank) for rank in range(len(sizes))]),
    )


def class_heat_map(run: RunData, words: Words) -> HeatMap | None:
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
        cells=_heat_cells(grid, counts, (width, height), words),
        row_labels=tuple(
            (_HEAT_TOP + (row + 0.5) * height, grid.row_labels[row])
            for row in range(0, num_rows, 1 if height > 16 else 2)
        ),
        column_labels=labels,
        limit=max(1.0, grid.largest),
        largest=grid.largest,
        worst=tuple(worst_classes(counts, names)),
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


def median_step_times(steps: Sequence[Record]) -> list[StepTimes]:
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


def _heat_cells(grid: BalanceGrid, counts: Floats, size: tuple[float, float], words: Words) -> tuple[HeatCell, ...]:
    numbered = grid.deviation_RC.shape == counts.shape and counts.size <= _MAX_TEXT_CELLS
    limit = max(1.0, grid.largest)
    text = words["balance_cell_counted" if numbered else "balance_cell"]
    cells = []
    for (row, column), deviation in np.ndenumerate(grid.deviation_RC):
        value = float(deviation)
        shown = str(int(counts[row, column])) if numbered else ""
        said = text.format(
            rank=grid.row_labels[row], label=grid.column_labels[column], number=shown, deviation=f"{value:+.2f}"
        )
        x, y = round(_HEAT_LEFT + column * size[0], 1), _HEAT_TOP + row * size[1]
        cells.append(HeatCell(x, y, round(min(1.0, abs(value) / limit), 3), value > 0, shown, said))
    return tuple(cells)


def _loss_chart(run: RunData, words: Words) -> LineChart | None:
    points = _points(run.steps, "loss")
    smoothed = smooth(points)
    evaluated = _points(run.evals, "loss")
    series = [Series(words["training_line"], points, "faint" if smoothed else "line")]
    if smoothed:
        series.append(Series(words["smoothed_line"], smoothed, "line"))
    series.append(Series(words["evaluation_line"], evaluated, "dots", 2))
    broken = sum(not math.isfinite(y) for _, y in points)
    note = words["losses_not_finite"].format(broken=broken, number=len(points)) if broken else ""
    return line_chart(words["loss"], series, note=note, log_base=None, x_label=words["update"])


def _accuracy_chart(evals: Sequence[Record], words: Words) -> LineChart | None:
    points = [(x, 100 * y) for x, y in _points(evals, "accuracy")]
    finite = [point for point in points if math.isfinite(point[1])]
    best = max(finite, key=lambda point: point[1], default=None)
    note = words["best_note"].format(accuracy=f"{best[1]:.2f}", update=f"{best[0]:,.0f}") if best else ""
    series = [Series(words["accuracy_line"], points, "dots", 2, " %")]
    return line_chart(words["accuracy_percent"], series, note=note, x_label=words["update"])


def _throughput_chart(steps: Sequence[Record], words: Words) -> LineChart | None:
    series = [Series(words["images_per_second"], _points(steps, "images_per_second"), "line", 3)]
    note, x_label = words["throughput_note"], words["update"]
    return line_chart(words["throughput"], series, note=note, from_zero=True, x_label=x_label)


def _learning_rate_chart(steps: Sequence[Record], words: Words) -> LineChart | None:
    series = [Series(words["learning_rate"], _points(steps, "learning_rate"), "line", 4)]
    return line_chart(words["learning_rate"], series, from_zero=True, x_label=words["update"])


def _gradient_norm_chart(steps: Sequence[Record], words: Words) -> LineChart | None:
    points = _points([step for step in steps if step.get("gradient_norm") is not None], "gradient_norm")
    series = [Series(words["gradient_norm"], points, "line", 4)]
    note, x_label = words["before_clipping"], words["update"]
    return line_chart(words["gradient_norm"], series, note=note, log_base=None, x_label=x_label)


def _loss_scale_charts(run: RunData, words: Words) -> list[LineChart | None]:
    scales = _points(run.steps, "loss_scale")
    uses_scale = section(run.config, "precision").get("compute") == "float16"
    if not uses_scale and not any(math.isfinite(y) and y != 1 for _, y in scales):
        return []
    skipped = _points(run.steps, "skipped_updates")
    return [
        line_chart(
            words["loss_scale"],
            [Series(words["loss_scale"], scales, "stairs", 1)],
            log_base=2,
            x_label=words["update"],
        ),
        line_chart(
            words["skipped_updates"],
            [Series(words["skipped_line"], skipped, "stairs", 4)],
            note=words["skipped_note"],
            from_zero=True,
            x_label=words["update"],
        ),
    ]


def _step_time_chart(steps: Sequence[Record], words: Words) -> ColumnChart | None:
    times = median_step_times(steps)
    in_milliseconds = [(1000 * rank.own, 1000 * rank.communication, 1000 * rank.data) for rank in times]
    return column_chart(
        words["update_time"],
        in_milliseconds,
        legend=[words["own_work"], words["communicating"], words["waiting_for_data"]],
        colours=(1, 2, 6),
        texts=[
            words["update_time_text"].format(
                rank=rank, own=f"{own:.1f}", communication=f"{communication:.1f}", data=f"{data:.1f}"
            )
            for rank, (own, communication, data) in enumerate(in_milliseconds)
        ],
        note=f"{words['update_time_note']} {slow_rank_sentence(times, words)}".strip(),
        columns=ColumnNames(words["rank"], [str(rank) for rank in range(len(times))]),
    )


def slow_rank_sentence(times: Sequence[StepTimes], words: Words) -> str:
    """Says which rank holds the others up, as far as the times tell.

    All ranks end an update together, at the reduction of the gradients: the others wait there for the slow one, so
    whole times are nearly equal whoever is slow. What a rank does on its own, and its wait for data, tell.

    Args:
        times: Of each rank.
        words: Texts of the page.

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
        return words["nobody_slow"]
    if extra_work > extra_wait:
        return words["slow_worker"].format(rank=works.index(max(works)), excess=f"{1000 * extra_work:.1f}")
    return words["slow_loader"].format(rank=waits.index(max(waits)), excess=f"{1000 * extra_wait:.1f}")


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

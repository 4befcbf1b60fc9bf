"""Pictures of a profile as geometry: the timeline of a step, the division of time, the heat map of slow ranks.

Legend: R ranks, S steps, B bins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convmesh.profiling.analysis import Analysis
from convmesh.profiling.breakdown import step_bounds
from convmesh.profiling.events import NONE, Floats, Integers, RankEvents
from convmesh.profiling.intervals import Cover
from convmesh.profiling.stragglers import excess_over_ranks
from convmesh.report.scales import Scale, format_number

WIDTH, LEFT, RIGHT, TOP = 1120.0, 62.0, 1112.0, 8.0
MAX_ROWS = 64
MAX_STEPS = 120
_LEAST_PIXELS = 0.6
_LEAST_SECONDS = 1e-6
KINDS = ("data", "communication", "compute", "optimizer")
"""What a timeline shows, each drawn over those before it: a moment counts as in the division of time."""


@dataclass(frozen=True)
class Bar:
    """A stretch of time on a rank: position, width, kind, and what a pointer is told."""

    x: float
    width: float
    kind: str
    text: str


@dataclass(frozen=True)
class Row:
    """A rank in a picture."""

    label: str
    y: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Timeline:
    """One step on all ranks, ready to be written as SVG."""

    step: int
    height: float
    row_height: float
    rows: tuple[Row, ...]
    ticks: tuple[tuple[float, str], ...]
    num_left_out: int


@dataclass(frozen=True)
class Cell:
    """A cell of the heat map; strength from 0 to 1."""

    x: float
    y: float
    strength: float
    text: str


@dataclass(frozen=True)
class SlowMap:
    """How much later than the others each rank was in each step, ready to be written as SVG."""

    height: float
    cell_width: float
    cell_height: float
    num_rows: int
    num_columns: int
    cells: tuple[Cell, ...]
    row_labels: tuple[tuple[float, str], ...]
    column_labels: tuple[tuple[float, str], ...]
    largest_seconds: float


def timeline(analysis: Analysis) -> Timeline:
    """The step whose length is the median of the steady ones, all ranks on one scale of milliseconds.

    Args:
        analysis: The profile.

    Returns:
        The picture; of more than ``MAX_ROWS`` ranks those that stand out and an even choice of the others.
    """
    steady = analysis.steady
    slowest_S = steady.step_RS.max(axis=0)
    place = int(np.argsort(slowest_S, kind="stable")[(len(slowest_S) - 1) // 2])
    step_S = steady.step_S[place : place + 1]
    chosen = _chosen_ranks(analysis)
    bounds = [step_bounds(events, step_S) for events in analysis.trace.ranks]
    begin = min(float(start_S[0]) for start_S, _ in bounds)
    scale = Scale(0.0, max(1e-9, max(float(end_S[0]) for _, end_S in bounds) - begin), LEFT, RIGHT)
    row_height = 26.0 if len(chosen) <= 12 else 18.0 if len(chosen) <= 32 else 11.0
    rows = tuple(
        Row(
            label=str(analysis.ranks[rank]),
            y=TOP + line * row_height,
            bars=_bars(analysis.trace.ranks[rank], bounds[rank], scale, begin),
        )
        for line, rank in enumerate(chosen)
    )
    bottom = TOP + len(rows) * row_height
    in_milliseconds = Scale(0.0, 1000 * scale.high, LEFT, RIGHT)
    return Timeline(
        step=int(step_S[0]),
        height=bottom + 26,
        row_height=row_height,
        rows=rows,
        ticks=tuple(in_milliseconds.ticks(8)),
        num_left_out=len(analysis.ranks) - len(rows),
    )


def slow_map(analysis: Analysis, words: Mapping[str, str]) -> SlowMap | None:
    """Own time of each rank (computing, waiting for data, idling) over the lower median of all ranks, step by step.

    Args:
        analysis: The profile.
        words: Texts of the page.

    Returns:
        The picture, or None for a single rank. Where there are many ranks or steps, several share a cell, which shows
        the latest of them.
    """
    steady = analysis.steady
    if len(analysis.ranks) < 2:
        return None
    own_RS = steady.compute_RS + steady.data_RS + steady.idle_RS
    excess_RS = np.maximum(excess_over_ranks(own_RS), 0.0)
    rows, columns = _bins(len(excess_RS), MAX_ROWS), _bins(excess_RS.shape[1], MAX_STEPS)
    binned = np.array([[excess_RS[a:b, c:d].max() for c, d in columns] for a, b in rows])
    largest = float(binned.max())
    limit = max(largest, 0.05 * float(np.median(steady.step_RS)))
    width = (RIGHT - LEFT) / len(columns)
    height = 26.0 if len(rows) <= 8 else 18.0 if len(rows) <= 24 else 11.0
    cells = tuple(
        Cell(
            round(LEFT + column * width, 1),
            TOP + row * height,
            round(float(value) / limit, 3),
            f"{words['rank']} {_range(analysis.ranks, rows[row])}, "
            f"{words['step']} {_range(steady.step_S.tolist(), columns[column])}: {1000 * float(value):.1f} ms",
        )
        for (row, column), value in np.ndenumerate(binned)
        if value > 0.02 * limit
    )
    every = max(1, math.ceil(len(columns) / 16))
    return SlowMap(
        height=TOP + len(rows) * height + 26,
        cell_width=round(width, 2),
        cell_height=height,
        num_rows=len(rows),
        num_columns=len(columns),
        cells=cells,
        row_labels=tuple(
            (TOP + (row + 0.5) * height, _range(analysis.ranks, rows[row]))
            for row in range(0, len(rows), 1 if height > 12 else 2)
        ),
        column_labels=tuple(
            (round(LEFT + (column + 0.5) * width, 1), str(steady.step_S[columns[column][0]]))
            for column in range(0, len(columns), every)
        ),
        largest_seconds=largest,
    )


def division(analysis: Analysis) -> list[tuple[str, Floats]]:
    """Seconds of an average steady step, as parts of shape (R,): communication without and with waiting for others."""
    steady = analysis.steady
    exposed_R = steady.exposed_RS.mean(axis=1)
    waiting_R = np.minimum(analysis.steady_waiting.mean(axis=1), exposed_R)
    return [
        ("compute", steady.compute_RS.mean(axis=1)),
        ("communication", exposed_R - waiting_R),
        ("waiting", waiting_R),
        ("data", steady.data_RS.mean(axis=1)),
        ("idle", steady.idle_RS.mean(axis=1)),
    ]


def axis_division(analysis: Analysis) -> list[tuple[str, tuple[float, float, float]]]:
    """Seconds that an average rank communicates in an average steady step, by axis.

    Args:
        analysis: The profile.

    Returns:
        Each axis with what moving bytes takes, what waiting for other ranks takes, and what compute hides of both.
    """
    steady = analysis.steady
    found = []
    for place, axis in enumerate(steady.axes):
        exposed = float(steady.exposed_ARS[place].mean())
        rows = [row for row in analysis.collectives if row.axis == axis]
        waiting = min(exposed, sum(row.num_per_step * row.waiting_seconds for row in rows))
        hidden = float(np.mean([_hidden(events, axis, steady.step_S) for events in analysis.trace.ranks]))
        found.append((axis or "-", (exposed - waiting, waiting, hidden)))
    return found


def _hidden(events: RankEvents, axis: str, step_S: Integers) -> float:
    """Seconds per step in which a rank computes while it communicates on an axis."""
    start_S, end_S = step_bounds(events, step_S)
    index = events.names.index(axis) if axis in events.names else NONE
    own_E = events.of_kind("communication") & (events.axis_E == index)
    computes_E = events.of_kind("compute", "optimizer")

    def covered(mask_E: npt.NDArray[np.bool_]) -> float:
        return float(Cover(events.start_E[mask_E], events.end_E[mask_E]).within(start_S, end_S).mean())

    return max(0.0, covered(own_E) + covered(computes_E) - covered(own_E | computes_E))


def _chosen_ranks(analysis: Analysis) -> list[int]:
    number = len(analysis.ranks)
    if number <= MAX_ROWS:
        return list(range(number))
    marked = {analysis.ranks.index(rank) for straggler in analysis.stragglers for rank in straggler.ranks}
    even = np.linspace(0, number - 1, MAX_ROWS - min(len(marked), MAX_ROWS // 2)).round().astype(int).tolist()
    return sorted(set(even) | set(sorted(marked)[: MAX_ROWS // 2]))


def _bars(events: RankEvents, bounds: tuple[Floats, Floats], scale: Scale, begin: float) -> tuple[Bar, ...]:
    start, end = float(bounds[0][0]), float(bounds[1][0])
    bars = []
    for kind in KINDS:
        mask = events.of_kind(kind)  # type: ignore[arg-type]
        mask = mask & (events.end_E > start) & (events.start_E < end)
        cover = Cover(np.maximum(events.start_E[mask], start), np.minimum(events.end_E[mask], end))
        bars += [
            Bar(
                scale.position(first - begin),
                round(max(_LEAST_PIXELS, scale.position(last - begin) - scale.position(first - begin)), 1),
                kind,
                f"{1000 * (last - first):.2f} ms",
            )
            for first, last in _closed_up(cover, gap=(end - start) * _LEAST_PIXELS / (RIGHT - LEFT))
        ]
    return tuple(bars)


def _closed_up(cover: Cover, *, gap: float) -> list[tuple[float, float]]:
    """Stretches with gaps that nobody could see left out, so that a page stays small."""
    if not len(cover.start_U):
        return []
    opens = np.concatenate([[True], cover.start_U[1:] - cover.end_U[:-1] > gap])
    starts = cover.start_U[opens]
    ends = cover.end_U[np.concatenate([opens[1:], [True]])]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _bins(number: int, limit: int) -> list[tuple[int, int]]:
    edges: Integers = np.linspace(0, number, min(number, limit) + 1).round().astype(np.int64)
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def _range(values: Sequence[int], pair: tuple[int, int]) -> str:
    first, last = values[pair[0]], values[pair[1] - 1]
    return str(first) if first == last else f"{first}-{last}"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds with three digits; less than a microsecond is rounding and reads 0."""
    return format_number(float(f"{1000 * seconds:.3g}")) if abs(seconds) >= _LEAST_SECONDS else "0"

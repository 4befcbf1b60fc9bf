"""Charts as geometry: numbers go in, positions and labels come out. The templates turn them into SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from convmesh.report.scales import Scale, fit_scale, format_number

Point = tuple[float, float]
Style = Literal["faint", "line", "dots", "stairs"]

WIDTH, HEIGHT = 560, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 546, 14, 246
_MAX_POINTS = 360
_HOVER_POINTS = 240


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Args:
        label: Its name in the legend.
        points: x and y, x rising; a y that is not finite leaves a gap.
        style: ``faint`` behind a ``line``, ``dots`` joined by a line, or ``stairs``.
        colour: 1 to 4, a colour of the page's palette.
        unit: Written after values.
    """

    label: str
    points: Sequence[Point]
    style: Style = "line"
    colour: int = 1
    unit: str = ""


@dataclass(frozen=True)
class DrawnLine:
    """A series as an SVG path and dots, in positions of the chart."""

    label: str
    path: str
    dots: tuple[Point, ...]
    style: Style
    colour: int


@dataclass(frozen=True)
class LineChart:
    """A chart of lines, ready to be written as SVG.

    Args:
        title: Above the chart.
        note: One sentence below the title, or empty.
        x_label: What the x axis counts.
        x_ticks: Position and label.
        y_ticks: Position and label.
        lines: The series, drawn in order.
        not_finite: x positions at which a value was not finite.
        hover: x position, y position and text of points that a pointer can ask about.
    """

    title: str
    note: str
    x_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: tuple[DrawnLine, ...]
    not_finite: tuple[float, ...]
    hover: list[tuple[float, float, str]]


@dataclass(frozen=True)
class Column:
    """One column of a chart: its parts from bottom to top as y, height and number of the colour."""

    x: float
    width: float
    parts: tuple[tuple[float, float, int], ...]
    text: str


@dataclass(frozen=True)
class ColumnNames:
    """What the columns of a chart are, and the name of each."""

    what: str
    names: Sequence[str]


@dataclass(frozen=True)
class ColumnChart:
    """A chart of stacked columns, one per rank, ready to be written as SVG."""

    title: str
    note: str
    x_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    columns: tuple[Column, ...]
    legend: tuple[tuple[str, int], ...]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    log_base: int | None = 0,
    from_zero: bool = False,
    x_label: str = "update",
    from_first: bool = False,
) -> LineChart | None:
    """Lays out a chart over updates.

    Args:
        title: Above the chart.
        series: The lines.
        note: One sentence below the title.
        log_base: 2 or 10 for a logarithmic y axis, 0 for a linear one, None to decide by the values.
        from_zero: Whether the y axis starts at zero.
        x_label: What the x axis counts.
        from_first: Whether the x axis starts at the first point, not at zero.

    Returns:
        The chart, or None if there is no point to show.
    """
    points = [point for one in series for point in one.points]
    if not points:
        return None
    x_scale = _update_scale([x for x, _ in points], from_first=from_first)
    y_scale = fit_scale([y for _, y in points], start=_BOTTOM, end=_TOP, log_base=log_base, from_zero=from_zero)
    broken = {x_scale.position(x) for x, y in points if not math.isfinite(y)}
    return LineChart(
        title=title,
        note=note,
        x_label=x_label,
        x_ticks=[(x, label) for x, label in x_scale.ticks(5) if "." not in label],  # there is no half update
        y_ticks=y_scale.ticks(5),
        lines=tuple(_draw(one, x_scale, y_scale) for one in series if one.points),
        not_finite=tuple(sorted(broken))[:_MAX_POINTS],
        hover=[entry for one in series if one.style != "faint" for entry in _hover(one, x_scale, y_scale, x_label)],
    )


def column_chart(  # noqa: PLR0913 - one keyword per thing that can be seen
    title: str,
    stacks: Sequence[Sequence[float]],
    *,
    legend: Sequence[str],
    texts: Sequence[str],
    unit_divisor: float = 1.0,
    note: str = "",
    columns: ColumnNames | None = None,
    colours: Sequence[int] = (),
) -> ColumnChart | None:
    """Lays out stacked columns, one per rank.

    Args:
        title: Above the chart.
        stacks: Per rank the parts from bottom to top; parts that are not finite count as 0.
        legend: Name of each part.
        texts: Per rank what a pointer is told.
        unit_divisor: Divides values to give the labels of the y axis their unit.
        note: One sentence below the title.
        columns: What the columns are called; default ranks from 0.
        colours: Number of the colour of each part; default 1, 2 and so on.

    Returns:
        The chart, or None if there is no rank to show.
    """
    if not stacks or not any(value > 0 for stack in stacks for value in stack):
        return None
    clean = [[max(0.0, value) / unit_divisor if math.isfinite(value) else 0.0 for value in stack] for stack in stacks]
    y_scale = fit_scale([sum(stack) for stack in clean], start=_BOTTOM, end=_TOP, from_zero=True)
    pitch = (_RIGHT - _LEFT) / len(clean)
    # Gaps of less than a pixel would make stripes of many columns.
    width = min(56.0, 0.72 * pitch) if pitch >= 6 else pitch + 0.2
    centres = [_LEFT + (rank + 0.5) * pitch for rank in range(len(clean))]
    stride = max(1, math.ceil(len(clean) / 11))
    columns = columns or ColumnNames("rank", [str(rank) for rank in range(len(clean))])
    colours = colours or range(1, len(legend) + 1)
    return ColumnChart(
        title=title,
        note=note,
        x_label=columns.what,
        x_ticks=[(round(centres[rank], 1), columns.names[rank]) for rank in range(0, len(clean), stride)],
        y_ticks=y_scale.ticks(5),
        columns=tuple(
            Column(round(x - width / 2, 1), round(width, 1), _stack(stack, y_scale, colours), text)
            for x, stack, text in zip(centres, clean, texts, strict=True)
        ),
        legend=tuple(zip(legend, colours, strict=True)) if len(legend) > 1 else (),
    )


def column_texts(
    names: Sequence[str], legend: Sequence[str], stacks: Sequence[Sequence[float]], *, form: str = ".3g"
) -> list[str]:
    """What a pointer is told of each column of milliseconds.

    Args:
        names: Of the columns.
        legend: Of the parts of each.
        stacks: The parts of each column, in milliseconds.
        form: How they are written.

    Returns:
        A text per column, like ``"rank 0: compute 12.1 ms, idle 3 ms"``.
    """
    return [
        f"{name}: " + ", ".join(f"{part} {value:{form}} ms" for part, value in zip(legend, stack, strict=True))
        for name, stack in zip(names, stacks, strict=True)
    ]


def smooth(points: Sequence[Point], *, share: float = 0.05) -> list[Point]:
    """An exponential mean whose start is not biased towards its first value.

    Args:
        points: x and y, x rising; points whose y is not finite are left out.
        share: Window as a share of all points; at least three.

    Returns:
        The smoothed points; empty if there are too few to smooth.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) < 8:
        return []
    keep = 1 - 2 / (max(3.0, share * len(finite)) + 1)
    total = weight = 0.0
    smoothed = []
    for x, y in finite:
        total, weight = keep * total + y, keep * weight + 1
        smoothed.append((x, total / weight))
    return smoothed


def thin(points: Sequence[Point], limit: int = _MAX_POINTS) -> list[Point]:
    """Fewer points that draw the same line: the lowest and highest of each stretch stay, and so does every gap.

    Args:
        points: x and y, x rising.
        limit: Points to keep, roughly.

    Returns:
        The points that stay, in their order.
    """
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept: set[int] = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        finite = [index for index in stretch if math.isfinite(points[index][1])]
        gaps = [index for index in stretch if not math.isfinite(points[index][1])]
        kept.update(gaps[:1])
        if finite:
            kept |= {min(finite, key=lambda index: points[index][1]), max(finite, key=lambda index: points[index][1])}
    return [points[index] for index in sorted(kept)]


def _update_scale(xs: Sequence[float], *, from_first: bool) -> Scale:
    # All charts of a run start at update 0 and so stand above each other in step.
    first = min(xs) if from_first else 0.0
    return Scale(first, max(first + 1.0, *xs), _LEFT, _RIGHT)


def _draw(series: Series, x_scale: Scale, y_scale: Scale) -> DrawnLine:
    pieces: list[list[Point]] = [[]]
    for x, y in thin(series.points):
        if math.isfinite(y):
            pieces[-1].append((x_scale.position(x), y_scale.position(y)))
        elif pieces[-1]:
            pieces.append([])
    whole = [piece for piece in pieces if piece]
    dots = [piece[0] for piece in whole if len(piece) == 1]
    if series.style == "dots" and sum(map(len, whole)) <= 60:
        dots = [point for piece in whole for point in piece]
    path = "".join(_path(piece, stairs=series.style == "stairs") for piece in whole)
    return DrawnLine(series.label, path, tuple(dots), series.style, series.colour)


def _path(piece: Sequence[Point], *, stairs: bool) -> str:
    first, *rest = piece
    steps = [f"H{x:g}V{y:g}" if stairs else f"L{x:g} {y:g}" for x, y in rest]
    return f"M{first[0]:g} {first[1]:g}" + "".join(steps)


def _hover(series: Series, x_scale: Scale, y_scale: Scale, x_label: str) -> list[tuple[float, float, str]]:
    return [
        (
            x_scale.position(x),
            y_scale.position(y),
            f"{x_label} {format_number(x)}: {series.label} {format_number(y)}{series.unit}",
        )
        for x, y in thin(series.points, _HOVER_POINTS)
        if math.isfinite(y)
    ]


def _stack(parts: Sequence[float], y_scale: Scale, colours: Sequence[int]) -> tuple[tuple[float, float, int], ...]:
    drawn, total = [], 0.0
    for part, colour in zip(parts, colours, strict=True):
        bottom, top = y_scale.position(total), y_scale.position(total + part)
        drawn.append((top, round(bottom - top, 1), colour))
        total += part
    return tuple(drawn)

"""The page of two compared runs: one HTML file, in English or Chinese, that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convmesh.report.charts import (
    ColumnChart,
    ColumnNames,
    LineChart,
    Point,
    Series,
    column_chart,
    column_texts,
    line_chart,
    smooth,
)
from convmesh.report.comparison import Comparison, compare_sides
from convmesh.report.comparison_sides import Side
from convmesh.report.comparison_view import (
    MAX_CHANGES,
    change_lines,
    change_text,
    collective_lines,
    label,
    layer_lines,
    lines,
    remark_sentences,
    time_note,
    tone,
    verdict,
)
from convmesh.report.facts import Words
from convmesh.report.page import render_page, write_page
from convmesh.report.profile_text import texts
from convmesh.report.run_folder import Record, number

_TILES = ("step", "images_per_second", "peak_memory_bytes", "accuracy", "loss", "run_images_per_second")
_MAX_TILES = 4
_PARTS = {"compute": 1, "communication": 2, "all_communication": 2, "data": 6, "idle": 7}


@dataclass(frozen=True)
class Tile:
    """A headline change."""

    label: str
    value: str
    detail: str
    tone: str


def write_comparison(before: Side, after: Side, path: Path, *, language: str = "en") -> Path:
    """Writes the page of two runs.

    Args:
        before: The first run.
        after: The second run.
        path: The file.
        language: ``"en"`` or ``"zh"``.

    Returns:
        The path.

    Raises:
        ConfigError: If the language is unknown.
        RunFolderError: If it can't be written.
    """
    return write_page(render_comparison(before, after, language=language), path)


def render_comparison(before: Side, after: Side, *, language: str = "en") -> str:
    """The page as HTML; all text that comes from a run is escaped.

    Args:
        before: The first run.
        after: The second run.
        language: ``"en"`` or ``"zh"``.

    Returns:
        The page.
    """
    words = texts(language, "comparison")
    comparison = compare_sides(before, after)
    context: dict[str, Any] = {
        "comparison": comparison,
        "title": words["title"].format(before=before.name, after=after.name),
        "tiles": list(_tiles(comparison, words)),
        "remarks": remark_sentences(comparison, words),
        "changes": [
            (words[key], change_lines(entries, words), max(0, len(entries) - MAX_CHANGES))
            for key in ("config", "plan", "versions")
            if (entries := getattr(comparison, key))
        ],
        "time": lines(comparison.time, words),
        "time_note": time_note(comparison, words),
        "parts_chart": _parts_chart(comparison, words),
        "step_chart": _step_chart(before, after, words),
        "layers": layer_lines(comparison, words),
        "collectives": collective_lines(comparison),
        "memory": lines(comparison.memory, words),
        "result": lines(comparison.result, words),
        "result_charts": [chart for chart in _result_charts(before, after, words) if chart is not None],
    }
    return render_page("comparison.html.j2", **context, words=words, language=language)


def _tiles(comparison: Comparison, words: Words) -> Iterator[Tile]:
    known = {entry.kind: entry for entry in (*comparison.time, *comparison.memory, *comparison.result) if not entry.of}
    shown = [known[kind] for kind in _TILES if kind in known]
    if "images_per_second" in known:  # It is told with its spread there.
        shown = [entry for entry in shown if entry.kind != "run_images_per_second"]
    shown = shown[:_MAX_TILES]
    for entry, line in zip(shown, lines(shown, words), strict=True):
        unit = " ms" if entry.kind == "step" else ""
        detail = f"{line.before.partition(' (')[0]} → {line.after.partition(' (')[0]}{unit}"
        said = verdict(entry, words)
        yield Tile(label(entry, words), change_text(entry), f"{detail}, {said}" if said else detail, tone(entry))


def _parts_chart(comparison: Comparison, words: Words) -> ColumnChart | None:
    parts = [entry for entry in comparison.time if entry.kind in _PARTS]
    labels = [label(entry, words) for entry in parts]
    stacks = [[1000 * entry.before.value for entry in parts], [1000 * entry.after.value for entry in parts]]
    return column_chart(
        words["parts"],
        stacks,
        legend=labels,
        texts=column_texts(comparison.names, labels, stacks),
        note="ms",
        columns=ColumnNames("", [_short(name) for name in comparison.names]),
        colours=[_PARTS[entry.kind] for entry in parts],
    )


def _step_chart(before: Side, after: Side, words: Words) -> LineChart | None:
    series = []
    for side, colour in ((before, 1), (after, 4)):
        if side.analysis is not None:
            whole = side.analysis.breakdown
            slowest_S = 1000 * whole.step_RS.max(axis=0)
            points = list(zip(whole.step_S.astype(float).tolist(), slowest_S.tolist(), strict=True))
            series.append(Series(side.name, points, "line", colour, " ms"))
    return line_chart(words["steps_chart"], series, note="ms", from_zero=True, x_label=words["step"], from_first=True)


def _result_charts(before: Side, after: Side, words: Words) -> Iterator[LineChart | None]:
    sides = ((before, 1), (after, 4))
    losses = [(side.name, _points(side.run.steps, "loss"), colour) for side, colour in sides]
    series = [Series(name, smooth(points) or points, "line", colour) for name, points, colour in losses]
    yield line_chart(words["loss_chart"], series, log_base=None, x_label=words["update"])
    series = [
        Series(side.name, [(x, 100 * y) for x, y in _points(side.run.evals, "accuracy")], "dots", colour, " %")
        for side, colour in sides
    ]
    yield line_chart(words["accuracy_chart"], series, x_label=words["update"])


def _points(records: tuple[Record, ...], key: str) -> list[Point]:
    """Points of a curve; none where there is a single one, which is no curve."""
    found = [(number(record, "update"), number(record, key)) for record in records if number(record, "update") >= 0]
    return found if len(found) > 1 else []


def _short(name: str, limit: int = 26) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"

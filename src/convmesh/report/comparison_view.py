"""Two compared runs in words and numbers: the lines that a terminal and a page show, and how a terminal shows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from convmesh.report.comparison import LEAST_VALUES, Change, Comparison, Measure, Sample
from convmesh.report.facts import Words, percent
from convmesh.report.profile_figures import milliseconds
from convmesh.report.profile_text import texts
from convmesh.report.scales import format_number
from convmesh.units import format_bytes, format_seconds

MAX_LAYERS = 12
MAX_CHANGES = 40
_LARGER_IS_BETTER = ("images_per_second", "accuracy", "best_accuracy", "run_images_per_second")
_NEITHER_IS_BETTER = ("hidden", "run_num_updates", "num_per_step", "num_bytes")
_LEAST_CHANGE = 0.005
_LEAST_BYTES_CHANGE = 0.05
_STYLES = {"better": "green", "worse": "red", "": ""}

Tone = Literal["better", "worse", ""]


@dataclass(frozen=True)
class Line:
    """A line of a table: ``tone`` is empty where a change is not clear, or neither good nor bad."""

    label: str
    before: str
    after: str
    change: str
    verdict: str
    tone: Tone


@dataclass(frozen=True)
class CollectiveLine:
    """A line of the table of collectives: number, bytes and milliseconds of both runs."""

    name: str
    cells: tuple[str, ...]
    change: str


def lines(measures: Sequence[Measure], words: Words) -> list[Line]:
    """Lines of a table.

    Args:
        measures: What was compared.
        words: Texts of the page.

    Returns:
        One line each.
    """
    return [
        Line(
            label=label(measure, words),
            before=_with_range(measure.before, measure),
            after=_with_range(measure.after, measure),
            change=change_text(measure),
            verdict=verdict(measure, words),
            tone=tone(measure),
        )
        for measure in measures
    ]


def layer_lines(comparison: Comparison, words: Words) -> list[tuple[str, Line]]:
    """Kind and line of the layers that changed most; those that changed by less than half a percent are left out."""
    measures = [entry for entry in comparison.layers if _matters(entry)][:MAX_LAYERS]
    return [
        (
            words[f"kind_{entry.kind}"],
            Line(entry.of, _value(entry.before, entry), _value(entry.after, entry), change_text(entry), "", ""),
        )
        for entry in measures
    ]


def collective_lines(comparison: Comparison) -> list[CollectiveLine]:
    """One line per collective: how often, how many bytes and how many milliseconds, before and after."""
    by_name: dict[str, list[Measure]] = {}
    for entry in comparison.collectives:
        by_name.setdefault(entry.of, []).append(entry)
    return [
        CollectiveLine(
            name,
            tuple(_value(side, entry) for entry in entries for side in (entry.before, entry.after)),
            change_text(entries[-1]),
        )
        for name, entries in by_name.items()
    ]


def change_lines(changes: Sequence[Change], words: Words) -> list[tuple[str, str, str]]:
    """Key and both values of settings that differ, at most ``MAX_CHANGES``."""

    def text(value: str | None) -> str:
        return words["unset"] if value is None else value

    return [(change.key, text(change.before), text(change.after)) for change in changes[:MAX_CHANGES]]


def remark_sentences(comparison: Comparison, words: Words) -> list[str]:
    """What to know before comparing."""
    return [words[f"remark_{remark.key}"].format(**remark.values) for remark in comparison.remarks]


def time_note(comparison: Comparison, words: Words) -> str:
    """What the figures of the table of times are."""
    return words["time_note" if comparison.profiled else "time_note_metrics"]


def label(measure: Measure, words: Words) -> str:
    """What a measure is, in words."""
    return words[f"measure_{measure.kind}"].format(of=measure.of)


def change_text(measure: Measure) -> str:
    """A change in per cent; a dash where the first value is nothing."""
    if measure.unit == "share":
        return f"{100 * (measure.after.value - measure.before.value):+.2f} %"
    if measure.before.value == measure.after.value:
        return "0 %"
    if not math.isfinite(measure.change):
        return "–"
    return f"{100 * measure.change:+.1f} %" if abs(measure.change) < 10 else f"x {1 + measure.change:.3g}"


def verdict(measure: Measure, words: Words) -> str:
    """Whether a change exceeds the spread, in words; empty where there is no change, or nothing that could vary."""
    if measure.before.value == measure.after.value or measure.unit == "bytes" or measure.kind == "run_num_updates":
        return ""
    if measure.clear is None:
        return words["unknown"]
    return words["clear" if measure.clear else "within"]


def tone(measure: Measure) -> Tone:
    """Whether a clear change is for the better; of sizes in bytes a change by a twentieth counts."""
    certain = measure.clear or (measure.unit == "bytes" and abs(measure.change) > _LEAST_BYTES_CHANGE)
    if not certain or measure.kind in _NEITHER_IS_BETTER:
        return ""
    grows = measure.after.value > measure.before.value
    return "better" if grows == (measure.kind in _LARGER_IS_BETTER) else "worse"


def print_comparison(comparison: Comparison, console: Console, *, language: str = "en") -> None:
    """Prints two compared runs.

    Args:
        comparison: The runs.
        console: Where to.
        language: ``"en"`` or ``"zh"``.

    Raises:
        ConfigError: If the language is unknown.
    """
    words = texts(language, "comparison")
    before, after = comparison.names
    console.print(words["title"].format(before=before, after=after), style="bold", highlight=False, markup=False)
    for sentence in remark_sentences(comparison, words):
        console.print(f"- {sentence}", highlight=False, markup=False)
    for key in ("config", "plan", "versions"):
        _print_changes(getattr(comparison, key), console, title=words[key], words=words, names=comparison.names)
    for key in ("time", "memory", "result"):
        _print_measures(lines(getattr(comparison, key), words), console, title=words[key], words=words)
        if key == "time":
            _print_layers(comparison, console, words)


def _print_changes(
    changes: Sequence[Change], console: Console, *, title: str, words: Words, names: tuple[str, str]
) -> None:
    if not changes:
        return
    rows = ((Text(key), Text(before), Text(after)) for key, before, after in change_lines(changes, words))
    _print_table(console, title, (words["key"], *names), rows, numeric=False)
    if len(changes) > MAX_CHANGES:
        console.print(words["more_changes"].format(number=len(changes) - MAX_CHANGES), highlight=False)


def _print_measures(rows: Sequence[Line], console: Console, *, title: str, words: Words) -> None:
    if not rows:
        return
    titles = (words["what"], words["first"], words["second"], words["change"], words["verdict"])
    cells = (
        (row.label, row.before, row.after, Text(row.change, _STYLES[row.tone]), Text(row.verdict, _STYLES[row.tone]))
        for row in rows
    )
    _print_table(console, title, titles, cells)


def _print_layers(comparison: Comparison, console: Console, words: Words) -> None:
    rows = layer_lines(comparison, words)
    if rows:
        titles = (words["layers"], words["kind"], words["first"], words["second"], words["change"])
        cells = ((Text(line.label), kind, line.before, line.after, line.change) for kind, line in rows)
        _print_table(console, f"{words['layers']}, ms", titles, cells)
    collectives = collective_lines(comparison)
    if collectives:
        pairs = [f"{words[key]} {place}" for key in ("number", "bytes", "transfer") for place in (1, 2)]
        headings = (words["collectives"], *pairs, words["change"])
        _print_table(
            console, words["collectives"], headings, ((Text(row.name), *row.cells, row.change) for row in collectives)
        )


def _print_table(
    console: Console,
    title: str,
    titles: Sequence[str],
    rows: Iterator[tuple[str | Text, ...]],
    *,
    numeric: bool = True,
) -> None:
    console.print(f"\n{title}", style="bold", highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    for place, heading in enumerate(titles):
        table.add_column(Text(heading), justify="right" if numeric and place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)


_FORMATS: dict[str, Callable[[float], str]] = {
    "seconds": milliseconds,
    "bytes": format_bytes,
    "share": percent,
    "loss": lambda value: f"{value:.4f}",
    "number": lambda value: format_number(float(f"{value:.4g}")),
}


def _value(sample: Sample, measure: Measure) -> str:
    if measure.kind == "run_seconds":
        return format_seconds(sample.value)
    return _FORMATS[measure.unit](sample.value)


def _with_range(sample: Sample, measure: Measure) -> str:
    said = _value(sample, measure)
    if sample.num_values < LEAST_VALUES:
        return said
    form = _FORMATS[measure.unit]
    return f"{said} ({form(sample.low)}–{form(sample.high)})"


def _matters(measure: Measure) -> bool:
    return abs(measure.after.value - measure.before.value) > _LEAST_CHANGE * max(
        measure.before.value, measure.after.value
    )

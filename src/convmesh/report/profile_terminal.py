"""What a profile says, on a terminal: the division of a step, what stands out, and the costliest lines."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from convmesh.profiling.analysis import Analysis
from convmesh.report.profile_facts import collective_lines, findings, layer_lines
from convmesh.report.profile_figures import division, milliseconds
from convmesh.report.profile_text import texts

_BAR = 28
_MAX_RANKS = 16
_MAX_LINES = 8
_STYLES = {
    "compute": "blue",
    "communication": "dark_orange",
    "waiting": "yellow",
    "data": "green",
    "idle": "bright_black",
}
_SHORT = {"communication": "comm.", "waiting": "wait"}
_LETTERS = {"compute": "#", "communication": "=", "waiting": "-", "data": "~", "idle": "."}


def print_profile(analysis: Analysis, console: Console) -> None:
    """Prints a profile.

    Args:
        analysis: The profile.
        console: Where to; it knows whether it is a terminal, and how wide.
    """
    words = texts("en")
    spread = analysis.spread
    console.print(
        f"{len(analysis.ranks)} ranks, {len(analysis.steady.step_S)} steps of {milliseconds(spread.median_seconds)} ms "
        f"(5 % to 95 %: {milliseconds(spread.p5_seconds)} to {milliseconds(spread.p95_seconds)} ms)",
        highlight=False,
    )
    console.print(_bars(analysis))
    for sentence in findings(analysis, words):
        console.print(f"- {sentence}", highlight=False)
    collectives = collective_lines(analysis)[:_MAX_LINES]
    if collectives:
        console.print(
            _table(
                ("collective", "axis (ranks)", "per step", "bytes", "transfer ms", "waiting ms", "bandwidth"),
                collectives,
            )
        )
    layers = layer_lines(analysis, words)[:_MAX_LINES]
    if layers:
        rows = [(line.name, line.kind_label, line.events, line.milliseconds) for line in layers]
        console.print(_table(("layer or operation", "kind", "events", "ms per step"), rows))


def _bars(analysis: Analysis) -> Table:
    """A bar per rank, as long as its step, and its parts in milliseconds; of many ranks the first ones."""
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("step", width=_BAR)
    parts = division(analysis)
    for name, _ in parts:
        table.add_column(
            Text(f"{_LETTERS[name]}{_SHORT.get(name, name)}", _STYLES[name], no_wrap=True), justify="right"
        )
    longest = max(float(sum(value_R[rank] for _, value_R in parts)) for rank in range(len(analysis.ranks))) or 1.0
    for rank, number in enumerate(analysis.ranks[:_MAX_RANKS]):
        bar = Text(no_wrap=True)
        for name, value_R in parts:
            bar.append(_LETTERS[name] * round((_BAR - 1) * float(value_R[rank]) / longest), _STYLES[name])
        table.add_row(str(number), bar, *(milliseconds(float(value_R[rank])) for _, value_R in parts))
    left_out = len(analysis.ranks) - _MAX_RANKS
    if left_out > 0:
        table.add_row("", f"{left_out} more ranks: see the report")
    return table


def _table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for place, title in enumerate(titles):
        table.add_column(title, justify="left" if place < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table

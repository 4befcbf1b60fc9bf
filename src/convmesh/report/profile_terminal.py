"""What a profile says, on a terminal: the division of a step, what stands out, and the costliest lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from convmesh.planner.cluster import Cluster
from convmesh.profiling.analysis import Analysis
from convmesh.report.achieved import against_cluster
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
_LETTERS = {"compute": "#", "communication": "=", "waiting": "-", "data": "~", "idle": "."}


def print_profile(
    analysis: Analysis, console: Console, *, language: str = "en", cluster: Cluster | None = None
) -> None:
    """Prints a profile.

    Args:
        analysis: The profile.
        console: Where to; it knows whether it is a terminal, and how wide.
        language: ``"en"`` or ``"zh"``.
        cluster: What links can do, to hold measured collectives against.

    Raises:
        ConfigError: If the language is unknown, or the cluster lacks links of the profile.
    """
    words = texts(language)
    achieved = None if cluster is None else against_cluster(analysis, cluster)
    spread = analysis.spread
    console.print(
        words["terminal_steps"].format(
            ranks=len(analysis.ranks),
            steps=len(analysis.steady.step_S),
            median=milliseconds(spread.median_seconds),
            p5=milliseconds(spread.p5_seconds),
            p95=milliseconds(spread.p95_seconds),
        ),
        highlight=False,
    )
    console.print(_bars(analysis, words))
    for sentence in findings(analysis, words):
        console.print(f"- {sentence}", highlight=False)
    collectives = collective_lines(analysis, achieved)[:_MAX_LINES]
    if collectives:
        titles = ["name", "group_axis", "number", "bytes", "transfer_ms", "waits_ms", "bandwidth"]
        titles += ["promised", "reached"] if achieved is not None else []
        console.print(_table([words[title] for title in titles], collectives))
    layers = layer_lines(analysis, words)[:_MAX_LINES]
    if layers:
        rows = [(line.name, line.kind_label, line.events, line.milliseconds) for line in layers]
        console.print(_table([words[title] for title in ("layer", "kind", "events", "ms_per_step")], rows))


def _bars(analysis: Analysis, words: Mapping[str, str]) -> Table:
    """A bar per rank, as long as its step, and its parts in milliseconds; of many ranks those that stand out."""
    table = Table(box=None, pad_edge=False)
    table.add_column(words["rank"], justify="right")
    table.add_column(words["step"], width=_BAR)
    parts = division(analysis)
    for name, _ in parts:
        table.add_column(
            Text(f"{_LETTERS[name]}{words[f'short_{name}']}", _STYLES[name], no_wrap=True), justify="right"
        )
    longest = max(float(sum(value_R[rank] for _, value_R in parts)) for rank in range(len(analysis.ranks))) or 1.0
    for rank in _shown(analysis):
        bar = Text(no_wrap=True)
        for name, value_R in parts:
            bar.append(_LETTERS[name] * round((_BAR - 1) * float(value_R[rank]) / longest), _STYLES[name])
        table.add_row(str(analysis.ranks[rank]), bar, *(milliseconds(float(value_R[rank])) for _, value_R in parts))
    left_out = len(analysis.ranks) - _MAX_RANKS
    if left_out > 0:
        table.add_row("", words["rank_left_out"].format(number=left_out))
    return table


def _shown(analysis: Analysis) -> list[int]:
    """Places of the ranks that get a bar: all, or of many those that stand out and the first others."""
    marked = [analysis.ranks.index(rank) for straggler in analysis.stragglers for rank in straggler.ranks]
    return sorted(list(dict.fromkeys([*marked, *range(len(analysis.ranks))]))[:_MAX_RANKS])


def _table(titles: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for place, title in enumerate(titles):
        table.add_column(title, justify="left" if place < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table

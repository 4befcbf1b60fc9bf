"""What a report says, on a terminal: the headline, what to know, where the time goes, and predictions against it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from convmesh.planner.cluster import Cluster
from convmesh.profiling.advice import Advised
from convmesh.report import facts
from convmesh.report.advice_view import print_advice
from convmesh.report.html import Report
from convmesh.report.profile_terminal import print_profile
from convmesh.report.profile_text import texts


def print_report(
    report: Report,
    console: Console,
    *,
    language: str = "en",
    cluster: Cluster | None = None,
    advised: Advised | None = None,
) -> None:
    """Prints the short form of a report.

    Args:
        report: The run and its profile.
        console: Where to.
        language: ``"en"`` or ``"zh"``.
        cluster: To hold measured collectives against, and to make predictions anew from.
        advised: Advice on the profile.

    Raises:
        ConfigError: If the language is unknown, or the cluster lacks links of the profile.
    """
    words, run = texts(language, "report"), report.run
    status = words[f"status_{facts.status(run)}"]
    console.print(f"{facts.title(run, words)}: {status}", highlight=False, markup=False, style="bold")
    table = Table(box=None, pad_edge=False, show_header=False)
    for tile in facts.headline(run, words):
        table.add_row(tile.label, tile.value, tile.detail)
    console.print(table, highlight=False)
    for remark in facts.remarks(run, words):
        console.print(f"- {remark}", highlight=False, markup=False)
    if report.analysis is not None:
        console.print(f"\n{words['profile_title']}", highlight=False, style="bold")
        print_profile(report.analysis, console, language=language, cluster=cluster)
        if advised is not None:
            print_advice(advised, console, language=language, folder=str(report.profile_dir))
    else:
        console.print(f"- {report.why_no_profile(words)}", highlight=False, markup=False)
    _print_plan(report, console, language=language, cluster=cluster)


def _print_plan(report: Report, console: Console, *, language: str, cluster: Cluster | None) -> None:
    words, plan = texts(language, "report"), report.plan(language, cluster)
    if not plan.rows:
        for remark in plan.remarks:
            console.print(f"- {remark}", highlight=False, markup=False)
        return
    console.print(f"\n{words['plan']}: {plan.about}", highlight=False, markup=False, style="bold")
    table = Table(box=None, pad_edge=False)
    for place, title in enumerate(("what", "predicted", "measured", "error")):
        table.add_column(words[title], justify="right" if place else "left")
    for row in plan.rows:
        table.add_row(*row)
    console.print(table, highlight=False)

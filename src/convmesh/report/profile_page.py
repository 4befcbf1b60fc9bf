"""The report of a profile: one HTML file, in English or Chinese, that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.planner.cluster import Cluster
from convmesh.profiling.advice import Advised
from convmesh.profiling.analysis import Analysis
from convmesh.profiling.perfetto import write_chrome_trace
from convmesh.report import profile_facts, profile_figures
from convmesh.report.achieved import against_cluster
from convmesh.report.advice_view import advice_context
from convmesh.report.charts import ColumnChart, ColumnNames, LineChart, Series, column_chart, column_texts, line_chart
from convmesh.report.page import render_page, write_page
from convmesh.report.profile_text import texts
from convmesh.units import format_bytes

PAGE_NAME = "profile.html"
TRACE_NAME = "trace.json"
_MAX_COLUMNS = 64
_COLOURS = (1, 2, 5, 6, 7)
"""Of the parts of a step, in the page's palette: compute, communication, waiting, data, idle."""
_MAX_TRACE_EVENTS = 3_000_000


def write_profile_page(
    analysis: Analysis,
    folder: Path,
    *,
    language: str = "en",
    cluster: Cluster | None = None,
    advised: Advised | None = None,
) -> Path:
    """Writes ``profile.html`` and, for Perfetto, ``trace.json``.

    Args:
        analysis: The profile.
        folder: Where to.
        language: ``"en"`` or ``"zh"``.
        cluster: What links can do, to hold measured collectives against.
        advised: Advice on it.

    Returns:
        The path of the page.

    Raises:
        ConfigError: If the language is unknown, or the cluster lacks links of the profile.
        RunFolderError: If the page can't be written.
        ProfileError: If the trace can't be written.
    """
    advice = advice_context(advised, language=language, folder=str(folder))
    path = write_page(render_profile(analysis, language=language, cluster=cluster, advice=advice), folder / PAGE_NAME)
    write_trace(analysis, folder)
    return path


def write_trace(analysis: Analysis, folder: Path) -> None:
    """Writes ``trace.json`` for Perfetto, unless it would hold more events than that can take.

    Args:
        analysis: The profile.
        folder: Where to.

    Raises:
        ProfileError: If it can't be written.
    """
    if sum(events.num_events for events in analysis.trace.ranks) <= _MAX_TRACE_EVENTS:
        write_chrome_trace(analysis.trace, folder / TRACE_NAME)


def render_profile(
    analysis: Analysis,
    *,
    language: str = "en",
    cluster: Cluster | None = None,
    advice: dict[str, Any] | None = None,
) -> str:
    """The page as HTML; all text that comes from a profile is escaped.

    Args:
        analysis: The profile.
        language: ``"en"`` or ``"zh"``.
        cluster: What links can do, to hold measured collectives against.
        advice: As ``advice_context`` makes it.

    Returns:
        The page.
    """
    return render_page(
        "profile_page.html.j2",
        profile=profile_context(analysis, language=language, cluster=cluster),
        advice=advice,
        words=texts(language),
        language=language,
    )


def profile_context(analysis: Analysis, *, language: str, cluster: Cluster | None = None) -> dict[str, Any]:
    """What the template of a profile's sections needs."""
    words = texts(language)
    drawn, slow = profile_figures.timeline(analysis), profile_figures.slow_map(analysis, words)
    left_out = words["left_out"].format(number=drawn.num_left_out) if drawn.num_left_out else ""
    mesh = ", ".join(f"{axis}={size}" for axis, size in analysis.trace.mesh.items())
    about = (
        f"{len(analysis.ranks)} {words['ranks']}",
        f"{len(analysis.breakdown.step_S)} {words['steps']}",
        mesh,
        analysis.trace.engine,
        analysis.trace.source,
    )
    return {
        "under": " · ".join(part for part in about if part),
        "tiles": profile_facts.tiles(analysis, words),
        "findings": profile_facts.findings(analysis, words),
        "timeline": drawn,
        "timeline_note": words["timeline_note"].format(step=drawn.step, left_out=left_out).strip(),
        "division": _division(analysis, language),
        "axis_chart": _axis_chart(analysis, words),
        "step_chart": _step_chart(analysis, language),
        "memory_chart": _memory_chart(analysis, language),
        "slow_map": slow,
        "slow_note": words["slow_note"].format(
            largest=profile_figures.milliseconds(slow.largest_seconds) if slow is not None else ""
        ),
        "collectives": profile_facts.collective_lines(
            analysis, None if cluster is None else against_cluster(analysis, cluster)
        ),
        "cluster": None if cluster is None else words["by_cluster"].format(cluster=cluster.name),
        "layers": profile_facts.layer_lines(analysis, words),
    }


def _division(analysis: Analysis, language: str) -> ColumnChart | None:
    words = texts(language)
    parts = profile_figures.division(analysis)
    number = len(analysis.ranks)
    edges = np.linspace(0, number, min(number, _MAX_COLUMNS) + 1).round().astype(int)
    groups = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    stacks = [[1000 * float(value_R[first:last].mean()) for _, value_R in parts] for first, last in groups]
    labels, firsts = [words[name] for name, _ in parts], [analysis.ranks[first] for first, _ in groups]
    return column_chart(
        words["division"],
        stacks,
        legend=labels,
        texts=column_texts([f"{words['rank']} {rank}" for rank in firsts], labels, stacks, form=".1f"),
        columns=ColumnNames(words["rank"], [str(rank) for rank in firsts]),
        colours=_COLOURS,
        note=words["division_note"],
    )


def _axis_chart(analysis: Analysis, words: Mapping[str, str]) -> ColumnChart | None:
    """What an average rank spends on communication in an average step, axis by axis, in milliseconds."""
    axes = profile_figures.axis_division(analysis)
    legend = [words["transfer"], words["waiting"], words["hidden_part"]]
    names, stacks = [axis for axis, _ in axes], [[1000 * seconds for seconds in parts] for _, parts in axes]
    return column_chart(
        words["axis_chart"],
        stacks,
        legend=legend,
        texts=column_texts(names, legend, stacks),
        columns=ColumnNames(words["axis"], names),
        colours=(2, 5, 7),
        note=words["axis_note"],
    )


def _step_chart(analysis: Analysis, language: str) -> LineChart | None:
    words = texts(language)
    step_RS, step_S = 1000 * analysis.breakdown.step_RS, analysis.breakdown.step_S
    if len(step_S) < 2:
        return None

    def points(value_S: Any) -> list[tuple[float, float]]:
        return list(zip(step_S.astype(float).tolist(), value_S.tolist(), strict=True))

    series = [Series(words["slowest"], points(step_RS.max(axis=0)), "line", 4, " ms")]
    if len(step_RS) > 1:
        series.append(Series(words["quickest"], points(step_RS.min(axis=0)), "line", 1, " ms"))
    return line_chart(words["step_chart"], series, note="ms", from_zero=True, x_label=words["step"], from_first=True)


def _memory_chart(analysis: Analysis, language: str) -> ColumnChart | None:
    words, peaks = texts(language), analysis.peak_memory_bytes
    return column_chart(
        words["memory"],
        [[peak] for peak in peaks],
        legend=[words["memory"]],
        texts=[
            f"{words['rank']} {rank}: {format_bytes(peak)}" for rank, peak in zip(analysis.ranks, peaks, strict=True)
        ],
        unit_divisor=2**20,
        note="MiB",
        columns=ColumnNames(words["rank"], [str(rank) for rank in analysis.ranks]),
    )

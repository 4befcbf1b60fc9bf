"""A plan and its predictions against what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from convmesh.errors import ConvMeshError
from convmesh.plan import Foretold, Plan
from convmesh.plan.load import load_plan
from convmesh.planner.cluster import Cluster
from convmesh.profiling.analysis import Analysis
from convmesh.report.charts import ColumnChart, ColumnNames, column_chart
from convmesh.report.facts import Words, num_ranks
from convmesh.report.figures import median_step_times
from convmesh.report.foretelling import PLAN_NAME, foretell
from convmesh.report.profile_figures import milliseconds
from convmesh.report.run_folder import RunData, number, numbers, section
from convmesh.units import format_bytes

_COMPUTE = ("forward", "backward", "recomputation")
_COMMUNICATION = "communication, "
_COLOURS = {"compute": 1, "optimizer": 3, "communication": 2, "data": 6, "overhead": 7}
_MEMORY_COLOURS = {"fixed": 7, "parameters": 1, "gradients": 9, "optimizer": 3, "activations": 2, "other": 5}
_MEMORY_TOGETHER = {"other": ("passing", "workspace", "spare")}
_MAX_TEXT = 100_000


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One figure, foretold and measured.

    Args:
        kind: What it is: ``step``, ``compute``, ``optimizer``, ``communication``, ``data``, ``overhead`` or ``memory``.
        axis: Mesh axis of communication.
        unit: Of both values.
        predicted: By the plan.
        measured: In the run.
    """

    kind: str
    axis: str = ""
    unit: Literal["seconds", "bytes"] = "seconds"
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """What was foretold too much, as a share of what was measured; ``nan`` where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class PlanSection:
    """What a page says of a plan.

    Args:
        about: Mesh and execution, in a few words.
        remarks: Sentences on the plan and its predictions.
        rows: Lines of the table: what, predicted, measured, error.
        charts: The parts of an update and of memory, predicted and measured.
        reasons: Why this plan was chosen.
        text: The plan file; empty if there is none.
    """

    about: str = ""
    remarks: tuple[str, ...] = ()
    rows: tuple[tuple[str, str, str, str], ...] = ()
    charts: tuple[ColumnChart, ...] = ()
    reasons: tuple[str, ...] = ()
    text: str = ""


def plan_section(
    run: RunData, analysis: Analysis | None, words: Words, *, cluster: Cluster | None = None
) -> PlanSection:
    """Reads the plan of a run and holds its predictions against the run.

    Args:
        run: The run.
        analysis: Its profile, if there is one.
        words: Texts of the page.
        cluster: Predictions are made anew from it; default those that stand in the plan.

    Returns:
        What to say; a missing or damaged plan is a remark.
    """
    path = run.run_dir / PLAN_NAME
    text = path.read_text("utf-8", errors="replace")[:_MAX_TEXT] if path.is_file() else ""
    plan, problems = None, []
    if cluster is not None:
        try:
            plan = foretell(run, cluster)
        except ConvMeshError as error:
            # How to mend it is told for commands that have other options.
            problems.append(words["plan_unforeseen"].format(reason=getattr(error, "what", str(error))))
    if plan is None and text:
        try:
            plan = load_plan(path)
        except ConvMeshError as error:
            problems.append(words["plan_broken"].format(reason=error))
    if plan is None:
        nothing = words["plan_none"].format(ranks=num_ranks(run) or "N")
        return PlanSection(remarks=tuple(problems) or (nothing,), text=text)
    shown = PlanSection(about=" · ".join([str(plan.mesh), *_execution(plan)]), text=text)
    foretold = plan.foretold
    if foretold is None:
        return replace(shown, remarks=(*problems, words["plan_by_rule"]))
    compared = compare_with_run(foretold, run, analysis)
    return replace(
        shown,
        remarks=(*problems, *_remarks(foretold, run, analysis, words)),
        rows=tuple(_row(entry, words) for entry in compared),
        charts=tuple(_charts(foretold, compared, words)),
        reasons=foretold.reasons,
    )


def compare_with_run(foretold: Foretold, run: RunData, analysis: Analysis | None) -> list[Compared]:
    """Holds predictions against a run.

    Args:
        foretold: The predictions.
        run: The run.
        analysis: Its profile; without one only whole updates, waiting for data and memory are known.

    Returns:
        The figures that both have.
    """
    compared = _of_profile(foretold, analysis) if analysis is not None else _of_metrics(foretold, run)
    peaks = [value for value in numbers(run.summary, "peak_memory_bytes") if value > 0]
    peaks = peaks or [float(peak) for peak in (analysis.peak_memory_bytes if analysis is not None else ()) if peak]
    if peaks:
        compared.append(
            Compared(kind="memory", unit="bytes", predicted=foretold.memory_bytes, measured=max(peaks)),
        )
    return compared


def _of_profile(foretold: Foretold, analysis: Analysis) -> list[Compared]:
    steady, kinds = analysis.steady, foretold.seconds_by_kind
    optimizer = float(steady.optimizer_RS.mean())
    exposed = {axis: float(steady.exposed_ARS[place].mean()) for place, axis in enumerate(steady.axes)}
    promised = {
        kind.removeprefix(_COMMUNICATION): value for kind, value in kinds.items() if kind.startswith(_COMMUNICATION)
    }
    compute = sum(kinds.get(kind, 0.0) for kind in _COMPUTE)
    found = [
        Compared(kind="step", predicted=foretold.seconds, measured=analysis.spread.median_seconds),
        Compared(kind="compute", predicted=compute, measured=float(steady.compute_RS.mean()) - optimizer),
        Compared(kind="optimizer", predicted=kinds.get("optimizer", 0.0), measured=optimizer),
    ]
    found += [
        Compared(kind="communication", axis=axis, predicted=promised.get(axis, 0.0), measured=exposed.get(axis, 0.0))
        for axis in sorted(promised.keys() | exposed.keys())
    ]
    found += [
        Compared(kind="data", predicted=kinds.get("data", 0.0), measured=float(steady.data_RS.mean())),
        Compared(kind="overhead", predicted=kinds.get("overhead", 0.0), measured=float(steady.idle_RS.mean())),
    ]
    return found


def _of_metrics(foretold: Foretold, run: RunData) -> list[Compared]:
    times = [rank for rank in median_step_times(run.steps) if math.isfinite(rank.own + rank.communication + rank.data)]
    if not times:
        return []
    step = max(rank.own + rank.communication + rank.data for rank in times)
    data = max(rank.data for rank in times)
    return [
        Compared(kind="step", predicted=foretold.seconds, measured=step),
        Compared(kind="data", predicted=foretold.seconds_by_kind.get("data", 0.0), measured=data),
    ]


def _execution(plan: Plan) -> list[str]:
    said = {name: value for name, value in vars(plan.execution).items() if value not in (None, ())}
    if "bucket_bytes" in said:
        said["bucket_bytes"] = format_bytes(said["bucket_bytes"])
    if "recompute" in said:
        said["recompute"] = ", ".join(said["recompute"])
    return [f"{name}: {value}" for name, value in said.items()]


def _remarks(foretold: Foretold, run: RunData, analysis: Analysis | None, words: Words) -> list[str]:
    limit = format_bytes(foretold.memory_limit_bytes)
    found = [words["plan_foretold"].format(cluster=foretold.cluster, batch=foretold.global_batch, limit=limit)]
    batch = number(section(run.config, "train"), "global_batch")
    if math.isfinite(batch) and batch != foretold.global_batch:
        found.append(words["plan_other_batch"].format(batch=f"{batch:.0f}"))
    found.append(words["from_profile" if analysis is not None else "from_metrics"])
    found.append(words["memory_on_cpu"])
    return found


def _row(entry: Compared, words: Words) -> tuple[str, str, str, str]:
    def text(value: float) -> str:
        return format_bytes(value) if entry.unit == "bytes" else f"{milliseconds(value)} ms"

    # Of what was foretold to be nothing, any trace is an infinite part: that tells nobody anything.
    says_something = entry.predicted > 0 and math.isfinite(entry.error)
    error = f"{100 * entry.error:+.0f} %" if says_something else "–"
    return words[f"row_{entry.kind}"].format(axis=entry.axis), text(entry.predicted), text(entry.measured), error


def _charts(foretold: Foretold, compared: Sequence[Compared], words: Words) -> Iterator[ColumnChart]:
    parts = [entry for entry in compared if entry.kind in _COLOURS]
    if len(parts) > 1:
        labels = [words[f"row_{entry.kind}"].format(axis=entry.axis) for entry in parts]
        seconds = [(1000 * entry.predicted, 1000 * entry.measured) for entry in parts]
        colours = [_COLOURS[entry.kind] for entry in parts]
        yield from _pair(words["row_step"], labels, seconds, colours, unit="ms", words=words)
    measured = next((entry.measured for entry in compared if entry.kind == "memory"), 0.0)
    if measured:
        kinds = [kind for kind in _MEMORY_COLOURS if any(foretold.memory_by_kind.get(part) for part in _parts_of(kind))]
        labels = [*(words[f"memory_{kind}"] for kind in kinds), words["memory_measured"]]
        sizes = [sum(foretold.memory_by_kind.get(part, 0) for part in _parts_of(kind)) / 2**20 for kind in kinds]
        columns = [*((size, 0.0) for size in sizes), (0.0, measured / 2**20)]
        colours = [*(_MEMORY_COLOURS[kind] for kind in kinds), 8]
        yield from _pair(words["row_memory"], labels, columns, colours, unit="MiB", words=words)


def _parts_of(kind: str) -> tuple[str, ...]:
    return _MEMORY_TOGETHER.get(kind, (kind,))


def _pair(
    title: str,
    labels: Sequence[str],
    values: Sequence[tuple[float, float]],
    colours: Sequence[int],
    *,
    unit: str,
    words: Words,
) -> Iterator[ColumnChart]:
    """A column of what was foretold beside one of what was measured; each value a part of both."""
    names = (words["predicted"], words["measured"])
    stacks = [[pair[column] for pair in values] for column in range(2)]
    texts = [
        f"{name}: "
        + ", ".join(f"{label} {value:.3g} {unit}" for label, value in zip(labels, stack, strict=True) if value)
        for name, stack in zip(names, stacks, strict=True)
    ]
    chart = column_chart(
        title, stacks, legend=labels, texts=texts, note=unit, columns=ColumnNames("", names), colours=colours
    )
    if chart is not None:
        yield chart

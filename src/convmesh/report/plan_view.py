"""A plan for people: the table of candidates, bars of its time and memory, the layers that cost most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from convmesh.graph import Node
from convmesh.plan import Resolved
from convmesh.planner.found import Judged
from convmesh.planner.prediction import OperatorCost, Prediction
from convmesh.planner.scaling import ScalingPoint, efficiency
from convmesh.training.auto_plan import Planned, describe, notable, recomputed_blocks, seconds_by_kind
from convmesh.units import format_bytes

_BAR_CELLS = 30
_COSTLIEST = 5
_STYLES = {"chosen": "bold green", "refused": "red", "too large": "red", "not tried": "dim"}


def candidates_table(planned: Planned, *, every: bool = False) -> RenderableType:
    """The table of candidates.

    Args:
        planned: What the search has found.
        every: Whether to list all of them, not only the best of each mesh.

    Returns:
        A table and what was left out of it.
    """
    found = planned.found
    shown = list(found.candidates) if every else notable(found)
    table = Table(
        "mesh", "micro-batches", "recomputed", "optimizer", "s / update", "images/s", "memory", "waits", "why"
    )
    for column in table.columns[4:8]:
        column.justify = "right"
    for entry in shown:
        table.add_row(*_cells(planned, entry), style=_STYLES.get(entry.verdict))
    for mesh, reason in found.refused:
        table.add_row(_mesh(dict(mesh.sizes)), "", "", "", "", "", "", "", reason, style="dim")
    hidden = len(found.candidates) - len(shown)
    more = [Text(f"{hidden} more candidates differ in micro-batches, recomputation or optimizer: --all lists them.")]
    return Group(table, *(more if hidden else ()))


def plan_view(planned: Planned) -> RenderableType:
    """The chosen plan: its figures, bars and costliest layers."""
    chosen = planned.found.chosen
    if chosen is None or chosen.prediction is None:
        return Text("Nothing fits.")
    prediction = chosen.prediction
    seconds, memory = seconds_by_kind(prediction.seconds), prediction.memory
    limit = format_bytes(planned.found.memory_bytes)
    parts: list[RenderableType] = [
        Text(f"Chosen: {describe(chosen)}.", style="bold"),
        Text(f"\nTime of an update: {prediction.seconds.total:.4g} s"),
        _bars(seconds, {kind: f"{value:.4g} s" for kind, value in seconds.items()}),
    ]
    hidden = sum(prediction.seconds.hidden.values())
    if hidden > 1e-9:
        parts.append(Text(f"Besides, {hidden:.4g} s of gradient reduction run behind the backward."))
    used = {kind: value for kind, value in memory.parts.items() if value}
    parts += [
        Text(f"\nMemory of a rank: {format_bytes(memory.total)} of {limit}, most at: {memory.moment}"),
        _bars(used, {kind: format_bytes(value) for kind, value in used.items()}),
        Text("\nThe layers that cost most, and what the plan does with them:"),
        _layers(prediction),
    ]
    return Group(*parts)


def scaling_table(points: list[ScalingPoint]) -> RenderableType:
    """Predicted scaling, one row per number of devices."""
    table = Table("scaling", "devices", "global batch", "best plan", "images/s", "efficiency", "data parallel images/s")
    for column in (*table.columns[1:3], *table.columns[4:]):
        column.justify = "right"
    for kind in ("strong", "weak"):
        own = [point for point in points if point.kind == kind]
        for point in own:
            share = efficiency(point, own[0])
            plan = "nothing fits" if point.outline is None else _mesh(dict(point.outline.mesh.sizes))
            table.add_row(
                kind,
                f"{point.num_ranks:,}",
                f"{point.global_batch:,}",
                plan,
                _rate(point.samples_per_second),
                "" if share is None else f"{share:.0%}",
                _rate(point.plain_samples_per_second),
            )
        table.add_section()
    return table


def layer_words(node: Node, entry: Resolved) -> str:
    """What a plan does with an operator: its split and the changes at its border."""
    words = ["whole" if entry.split == "whole" else f"split by {entry.split}"]
    words += [
        f"{change.kind} {place}"
        for change, place in ((entry.before, "before"), (entry.after, "after"))
        if change.kind != "none"
    ]
    if entry.keep_input:
        words.append("keeps the gathered input")
    return f"{node.kind}, " + ", ".join(words)


def _cells(planned: Planned, entry: Judged) -> tuple[str, ...]:
    outline, prediction = entry.outline, entry.prediction
    samples = planned.pricer.samples(outline)
    updates = planned.pricer.training.global_batch
    at_least = "" if prediction is not None else "≥ "
    recomputed = "" if outline.recompute == "none" else "blocks"
    if prediction is not None and outline.recompute != "none":
        recomputed = f"{recomputed_blocks(prediction)} of {len(planned.pricer.blocks)} blocks"
    return (
        _mesh(dict(outline.mesh.sizes)),
        f"{outline.accumulation} x {samples}",
        recomputed,
        "sharded" if outline.optimizer_sharding else "",
        f"{at_least}{entry.seconds:.4g}",
        _rate(updates / entry.seconds if prediction is not None else None),
        _memory(entry),
        f"{prediction.communication_share:.0%}" if prediction is not None else "",
        entry.reason,
    )


def _memory(entry: Judged) -> str:
    if entry.prediction is not None:
        return format_bytes(entry.prediction.memory.total)
    return f"≥ {format_bytes(entry.floor_bytes)}" if entry.floor_bytes else ""


def _mesh(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one rank"


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _bars(values: Mapping[str, float], texts: Mapping[str, str]) -> Table:
    total = sum(values.values())
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    grid.add_column()
    for kind, value in values.items():
        share = value / total if total else 0.0
        grid.add_row(f"  {kind}", texts[kind], f"{share:.0%}", "█" * max(round(share * _BAR_CELLS), int(share > 0)))
    return grid


def _layers(prediction: Prediction) -> Table:
    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column()
    grid.add_column(justify="right")
    grid.add_column()
    resolved, times = prediction.candidate.resolved, prediction.candidate.accumulation
    for cost in costliest(prediction):
        words = layer_words(resolved.graph.node(cost.node), resolved.operators[cost.node])
        again = ", recomputed" if cost.recomputed else ""
        share = times * cost.seconds / prediction.seconds.total
        grid.add_row(f"  {cost.node}", f"{times * cost.seconds:.4g} s", f"{share:.0%}", words + again)
    return grid


def costliest(prediction: Prediction) -> list[OperatorCost]:
    """The operators that take longest, communication included."""
    return sorted(prediction.operators, key=lambda cost: -cost.seconds)[:_COSTLIEST]


def origin_lines(prediction: Prediction) -> Iterator[str]:
    """Where figures come from."""
    for what, where in prediction.origins.items():
        yield f"{what}: {where}"

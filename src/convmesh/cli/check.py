"""``convmesh check``: everything that is wrong with a run, before any process starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convmesh.cli.train import ConfigArgument, EngineOption, MeshOption, PlanOption, SetOption
from convmesh.units import format_bytes

if TYPE_CHECKING:
    from convmesh.api import PreparedRun
    from convmesh.errors import ConvMeshError
    from convmesh.plan import ResolvedPlan
    from convmesh.training.planning import RunPlan

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]
RanksOption = Annotated[int | None, typer.Option(min=1, help="Number of ranks, one process each.")]


def check(  # noqa: PLR0913, PLR0917 - one parameter per option
    config: ConfigArgument,
    ranks: RanksOption = None,
    engine: EngineOption = None,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    write_plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan, to be edited.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell everything that is wrong with a run, and how its network is split; start nothing."""
    from convmesh import api

    prepared, mistakes = api.check(
        config, ranks=ranks, mesh=mesh, engine=engine, plan=plan, overrides=tuple(set_ or ())
    )
    if prepared is not None and write_plan is not None:
        _write_plan(prepared, write_plan)
    if as_json:
        typer.echo(json.dumps(_as_dict(prepared, mistakes), indent=2, ensure_ascii=False))
    elif mistakes:
        for number, mistake in enumerate(mistakes, start=1):
            typer.echo(f"{number}. {mistake}")
        typer.echo(f"{len(mistakes)} {'thing needs' if len(mistakes) == 1 else 'things need'} mending.")
    elif prepared is not None:
        typer.echo(f"{config}: nothing is wrong on {prepared.mesh} with {prepared.run.engine} on {prepared.device}.")
        if prepared.plan is not None:
            for resolved in prepared.plan.resolved.split_axes:
                typer.echo(_describe(resolved, prepared.run.engine))
            for line in _execution_lines(prepared.plan, prepared):
                typer.echo(line)
    if mistakes:
        raise typer.Exit(1)


def _write_plan(prepared: PreparedRun, path: Path) -> None:
    from convmesh.errors import ConfigError
    from convmesh.plan.load import dump_plan

    if prepared.plan is None:
        raise ConfigError(
            f"there is no plan to write: {prepared.mesh} splits samples only", fix="Give a --mesh with an axis channel"
        )
    try:
        path.write_text(dump_plan(prepared.plan.plan), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the plan {path} can't be written", got=error.strerror or str(error)) from None


def _as_dict(prepared: PreparedRun | None, mistakes: tuple[ConvMeshError, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ok": not mistakes,
        "mistakes": [
            {
                "type": type(mistake).__name__,
                "what": mistake.what,
                "got": None if mistake.got is None else str(mistake.got),
                "expected": None if mistake.expected is None else str(mistake.expected),
                "fix": mistake.fix,
            }
            for mistake in mistakes
        ],
    }
    if prepared is not None:
        found["mesh"] = dict(prepared.mesh.sizes)
        if prepared.plan is not None:
            found["operators"] = [row for resolved in prepared.plan.resolved.split_axes for row in _operators(resolved)]
            found["collectives"] = [
                {"axis": resolved.axis, **vars(entry)}
                for resolved in prepared.plan.resolved.split_axes
                for entry in _collectives(resolved, prepared.run.engine)
            ]
            found["execution"] = dataclasses.asdict(prepared.plan.plan.execution)
            found["recomputed"] = [block.name for block in prepared.plan.resolved.recomputed]
    return found


def _operators(resolved: ResolvedPlan) -> list[dict[str, Any]]:
    return [
        {
            "axis": resolved.axis,
            "name": node.name,
            "kind": node.kind,
            "split": entry.split,
            "before": entry.before.kind,
            "after": entry.after.kind,
            "output": str(entry.output),
        }
        for node in resolved.graph
        for entry in [resolved.operators[node.name]]
    ]


def _collectives(resolved: ResolvedPlan, engine: str) -> tuple[Any, ...]:
    from convmesh.plan.collectives import SAMPLES_TOLD, channel_collectives

    return channel_collectives(resolved, position=0, samples=SAMPLES_TOLD[engine])


def _execution_lines(plan: RunPlan, prepared: PreparedRun) -> Iterator[str]:
    """What holds of running an update, whether the plan says it or the run file."""
    from convmesh.plan.activations import rank_activations
    from convmesh.planner.recomputing import saves_nothing

    execution, resolved = plan.plan.execution, plan.resolved
    shards = "sharded" if execution.optimizer_sharding else "whole"
    yield (
        f"Per update {execution.accumulation} micro-batches, optimizer state {shards}, gradients in buckets of "
        f"{format_bytes(execution.bucket_bytes or 0)}."
    )
    names = [block.name for block in resolved.recomputed]
    if not names:
        yield "No block is recomputed."
        return
    kept = rank_activations(resolved)
    whole = rank_activations(dataclasses.replace(resolved, recomputed=()))
    once = max(sum(kept.again[name] for name in block.nodes) for block in resolved.recomputed)
    yield f"Recomputed: {', '.join(names)}."
    reason = saves_nothing(prepared.run.engine, prepared.device)
    if reason is not None:
        yield (
            f"A micro-batch keeps {format_bytes(whole.kept_bytes)} of activations on rank 0 as without it, and up to "
            f"{format_bytes(once)} more while a block is computed again: {reason}."
        )
        return
    yield (
        f"A micro-batch keeps {format_bytes(kept.kept_bytes)} of activations on rank 0 instead of "
        f"{format_bytes(whole.kept_bytes)}, and {format_bytes(once)} more while a block is computed again."
    )


def _describe(resolved: ResolvedPlan, engine: str) -> str:
    operators = _operators(resolved)
    rows = [row for row in operators if row["kind"] in ("convolution", "dense") or _communicates(row)]
    width = max((len(row["name"]) for row in rows), default=0)
    lines = []
    for row in rows:
        border = ", ".join(f"{row[place]} {place} it" for place in ("before", "after") if _talks(row[place]))
        lines.append(f"  {row['name']:{width}}  {row['split']:12}  {border}".rstrip())
    if all(row["split"] == "whole" for row in operators):
        lines.append(_unsplit(resolved))
    lines.append(f"Per micro-batch over the {resolved.axis} axis, on rank 0:")
    found = _collectives(resolved, engine)
    lines += [f"  {entry.number} x {entry.kind}, {format_bytes(entry.num_bytes)}" for entry in found]
    return "\n".join(lines)


def _unsplit(resolved: ResolvedPlan) -> str:
    """Why a plan gains nothing on an axis, as far as the network tells."""
    said = f"Nothing is split over the {resolved.axis} axis: each of {resolved.num_ranks} ranks computes all of it."
    unknown = [f"{node.name} ({node.attributes['operator']})" for node in resolved.graph if node.kind == "opaque"]
    return f"{said} ConvMesh has no rule for these as they are used here: {', '.join(unknown)}." if unknown else said


def _communicates(row: dict[str, Any]) -> bool:
    return _talks(row["before"]) or _talks(row["after"])


def _talks(change: str) -> bool:
    return change != "none"

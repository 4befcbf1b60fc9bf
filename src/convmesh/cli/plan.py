"""``convmesh plan``: the best strategy for a network, devices and memory, with its reasons; nothing is run."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convmesh.cli.report import wide_console
from convmesh.cli.train import ClusterOption, ConfigArgument, EngineOption, MemoryOption, SetOption
from convmesh.units import parse_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from convmesh.planner.candidates import Wishes
    from convmesh.training.auto_plan import Planned, Task


class Kept(StrEnum):
    """A setting of the run file that the planner leaves as it is."""

    MESH = "mesh"
    ACCUMULATION = "accumulation"
    RECOMPUTE = "recompute"
    OPTIMIZER_SHARDING = "optimizer_sharding"


def plan(  # noqa: PLR0913, PLR0917 - one parameter per option
    config: ConfigArgument,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks, one device each.")],
    memory: MemoryOption = None,
    cluster: ClusterOption = None,
    engine: EngineOption = None,
    keep: Annotated[list[Kept] | None, typer.Option(help="Leave this as the run file says; may be repeated.")] = None,
    set_: SetOption = None,
    image_shape: Annotated[
        str | None, typer.Option(metavar="HxWxC", help="Shape of the images, like 224x224x3 [default: the data's].")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Number of classes [default: the data's].")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan.")] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="NODE", help="Tell every number behind one operator's choice.")
    ] = None,
    scaling: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw predicted scaling from 8 to 4,096 devices.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List all candidates.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Find the fastest plan within memory, and tell why not the others; run nothing."""
    from convmesh.training.auto_plan import make_plan

    task = _task(
        config, ranks, memory=memory, cluster=cluster, engine=engine, keep=keep or [], overrides=tuple(set_ or ()),
        image_shape=image_shape, classes=classes,
    )  # fmt: skip
    planned = make_plan(task)
    console = wide_console(160)
    if as_json:
        from convmesh.report.plan_json import as_dict

        typer.echo(json.dumps(as_dict(planned), indent=2, ensure_ascii=False))
    else:
        _show(planned, console, every=every)
    if explain is not None:
        _print_all(console, _explained(planned, explain))
    if scaling is not None:
        _scaling(planned, scaling, console)
    chosen = planned.plan  # Where nothing fits, this says so.
    if output is not None:
        from convmesh.plan.load import dump_plan
        from convmesh.training.run_folder import write_atomically

        write_atomically(output, dump_plan(chosen))
        if not as_json:
            typer.echo(f"\nPlan: {output}. Train with it: convmesh train {config} --plan {output}")


def _task(config: Path, ranks: int, *, keep: list[Kept], **options: Any) -> Task:
    from convmesh.cli.graph import parse_image_shape
    from convmesh.config import load_config
    from convmesh.training.auto_plan import Task

    engine = options["engine"]
    run = load_config(config, overrides=(*options["overrides"], *([f"engine={engine}"] if engine else [])))
    return Task(
        run=run,
        num_ranks=ranks,
        memory_bytes=None if options["memory"] is None else parse_bytes(options["memory"]),
        cluster=options["cluster"],
        wishes=_wishes(run, ranks, keep),
        image_shape_HWC=parse_image_shape(options["image_shape"]),
        num_classes=options["classes"],
    )


def _wishes(run: Any, ranks: int, keep: list[Kept]) -> Wishes:
    from convmesh.config.rules import resolve_mesh
    from convmesh.planner.candidates import Wishes

    strategy = run.strategy
    return Wishes(
        mesh=resolve_mesh(run, num_ranks=ranks) if Kept.MESH in keep else None,
        accumulation=strategy.accumulation if Kept.ACCUMULATION in keep else None,
        recompute=("none" if strategy.recompute in {"none", ()} else "blocks") if Kept.RECOMPUTE in keep else None,
        optimizer_sharding=strategy.optimizer_sharding if Kept.OPTIMIZER_SHARDING in keep else None,
    )


def _show(planned: Planned, console: Console, *, every: bool) -> None:
    from convmesh.report.plan_view import candidates_table, origin_lines, plan_view
    from convmesh.units import format_bytes

    training = planned.pricer.training
    console.print(
        f"{planned.task.num_ranks} ranks, a global batch of {training.global_batch}, {training.optimizer}, "
        f"{training.compute_dtype}; each rank may fill {format_bytes(planned.found.memory_bytes)}.\n"
        f"Devices: {planned.cluster_reason}.",
        highlight=False,
    )
    console.print(candidates_table(planned, every=every))
    chosen = planned.found.chosen
    if chosen is not None and chosen.prediction is not None:
        console.print(plan_view(planned))
        console.print("\nWhere the figures come from:", highlight=False)
        for line in origin_lines(chosen.prediction):
            console.print(f"  {line}", highlight=False, soft_wrap=True)


def _explained(planned: Planned, name: str) -> list[RenderableType]:
    from convmesh.report.plan_explanation import explanation

    return explanation(planned, name)


def _print_all(console: Console, parts: list[RenderableType]) -> None:
    for part in parts:
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))


def _scaling(planned: Planned, path: Path, console: Console) -> None:
    from convmesh.planner.scaling import scaling_points
    from convmesh.report.plan_view import scaling_table
    from convmesh.report.scaling_plot import save_scaling

    training = planned.pricer.training
    per_rank = max(1, training.global_batch // planned.task.num_ranks)
    points = list(scaling_points(planned.pricer, samples_per_rank=per_rank, memory_bytes=planned.found.memory_bytes))
    save_scaling(points, path, title=f"Predicted scaling on {planned.cluster.name}")
    console.print(scaling_table(points))
    console.print(f"Curves: {path}", highlight=False)

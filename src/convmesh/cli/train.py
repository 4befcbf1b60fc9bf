"""``convmesh train``: trains, and shows how it goes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convmesh.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from convmesh.api import TrainResult
    from convmesh.training.run_folder import RunFolder

ConfigArgument = Annotated[Path, typer.Argument(help="A run file, as in the folder examples/.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change one setting; may be repeated.")
]
EngineOption = Annotated[str | None, typer.Option(metavar="mindspore|torch", help="The framework that computes.")]
MeshOption = Annotated[
    str | None, typer.Option(metavar="AXIS=SIZE,...", help="The mesh of ranks, like data=4 or data=2,channel=2.")
]
PlanOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE|auto", help="How the network is split and run; auto: planned now [default: by rule]."),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(metavar="FILE|PRESET", help="What devices and links can do [default: the preset of this machine]."),
]
MemoryOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="What a rank may fill, like 40GiB [default: the device's].")
]


def train(  # noqa: PLR0913, PLR0917 - one parameter per option
    config: ConfigArgument,
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of ranks, one process each.")] = None,
    engine: EngineOption = None,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    cluster: ClusterOption = None,
    memory: MemoryOption = None,
    set_: SetOption = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/NAME-TIME].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the start, start nothing.")
    ] = False,
) -> None:
    """Train a network on one or many ranks."""
    options: dict[str, Any] = {
        "ranks": ranks,
        "mesh": mesh,
        "engine": engine,
        "plan": plan,
        "cluster": cluster,
        "memory_bytes": None if memory is None else parse_bytes(memory),
        "overrides": tuple(set_ or ()),
    }
    if dry_run:
        _dry_run(config, run_dir=run_dir, **options)
        return
    from convmesh import api

    try:
        with _display() as watch:
            result = api.train(config, **options, run_dir=run_dir, resume=resume, on_start=watch)
    except KeyboardInterrupt:
        typer.echo("convmesh: stopped; the same command with --resume and the --run-dir goes on", err=True)
        raise typer.Exit(130) from None
    if result.report is not None:
        _print_result(result)


@contextlib.contextmanager
def _display() -> Iterator[Callable[[RunFolder], None]]:
    """Follows the metrics file of the run from a thread, whichever processes write it."""
    from rich.console import Console

    from convmesh.report.display import Display, follow_metrics

    display, stop, threads = Display(Console()), threading.Event(), []

    def watch(folder: RunFolder) -> None:
        typer.echo(f"Run folder: {folder.root}")
        _tell_plan(folder)
        offset = folder.metrics.stat().st_size if folder.metrics.exists() else 0
        thread = threading.Thread(
            target=follow_metrics, args=(folder.metrics, display, stop), kwargs={"offset": offset}, daemon=True
        )
        thread.start()
        threads.append(thread)

    try:
        yield watch
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        display.close()


def _tell_plan(folder: RunFolder) -> None:
    """What the planner foretold of the plan in a run folder, and for which devices."""
    from convmesh.plan.load import load_plan
    from convmesh.planner.found import REFUSED

    foretold = load_plan(folder.plan).foretold if folder.plan.exists() else None
    if foretold is None:
        return
    typer.echo(
        f"Plan: {foretold.seconds:.4g} s per update and {format_bytes(foretold.memory_bytes)} per rank foretold.\n  "
        + "\n  ".join((*foretold.reasons[:2], *(text for text in foretold.reasons[2:] if REFUSED in text)))
    )


def _dry_run(config: Path, *, run_dir: Path | None, **options: Any) -> None:
    from convmesh import api
    from convmesh.training.run_folder import RunFolder, default_run_dir

    prepared = api.prepare(config, **options, builds=True)
    folder = RunFolder(run_dir or default_run_dir(config, resume=False))
    run, data = prepared.run, prepared.data
    micro_batch = run.train.global_batch // (prepared.mesh.size("data") * run.strategy.accumulation)
    typer.echo(
        f"{config}: nothing is wrong.\n"
        f"Engine {run.engine} on {prepared.device}, mesh {prepared.mesh}; global batch {run.train.global_batch} = "
        f"{prepared.mesh.size('data')} ranks x {run.strategy.accumulation} micro-batches x {micro_batch} samples.\n"
        f"{data.num_updates} updates per epoch, {run.train.epochs} epochs; "
        f"{data.num_dropped} samples left out per epoch.\n"
        f"Run folder: {folder.root}"
    )
    launch = prepared.launch_plan(folder)
    typer.echo(f"Would start: {launch}" if launch else "Would train in this process.")


def _print_result(result: TrainResult) -> None:
    summary = result.summary
    lines = [f"Run folder: {os.path.relpath(result.run_dir)}", f"Report:     {os.path.relpath(str(result.report))}"]
    if summary.get("accuracy") is not None:
        speed = summary["images_per_second"]
        lines.insert(
            0,
            f"Accuracy {100 * summary['accuracy']:.2f} % on the evaluation set "
            f"(best {100 * summary['best_accuracy']:.2f} %), "
            + (f"{speed:,.0f} images/s, " if speed else "")
            + f"{format_seconds(summary['seconds'])}, peak memory {format_bytes(max(summary['peak_memory_bytes']))} "
            "per rank",
        )
    typer.echo("\n".join(lines))

"""What the commands do, as functions: ``convmesh train`` is ``convmesh.train``, and so on."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from convmesh.config import RunConfig, check_config, load_config, parse_config
from convmesh.config.rules import resolve_mesh, unsplit_axes
from convmesh.config.schema import ChannelsConfig
from convmesh.data.inspect import DataReport, inspect_data
from convmesh.data.open import open_data
from convmesh.engines import load_engine, load_launcher
from convmesh.engines.contract import World
from convmesh.errors import ConfigError, ConvMeshError, MistakeList, raise_all
from convmesh.mesh import Mesh, parse_mesh
from convmesh.plan import CHANNEL
from convmesh.plan.load import load_plan
from convmesh.training.auto_plan import AUTO, auto_plan, is_for
from convmesh.training.launch import LaunchPlan, launch, plan_launch, threads_per_rank
from convmesh.training.metrics import Record
from convmesh.training.planning import RunPlan, as_planned, build_network, missing_engine, plan_run
from convmesh.training.rank import balance_path, run_rank
from convmesh.training.ranks import RankPlace, find_rank
from convmesh.training.run_folder import RunFolder, default_run_dir, write_json
from convmesh.training.sinks import missing_sinks
from convmesh.training.verification import Subject, Verification, check_dtype, check_length, verify_run


@dataclass(frozen=True)
class PreparedRun:
    """A run that was checked and could start.

    Args:
        run: The run with its mesh filled in.
        mesh: Its mesh.
        device: Its device, resolved.
        data: What the ranks will read.
        plan: How its network is split and recomputed; None if only samples are split and all is kept.
    """

    run: RunConfig
    mesh: Mesh
    device: str
    data: DataReport
    plan: RunPlan | None = None

    def placed_in(self, folder: RunFolder) -> PreparedRun:
        """The same run with its plan read from its own folder, where ``write_plan`` puts it."""
        if self.plan is None:
            return self
        strategy = dataclasses.replace(self.run.strategy, plan=str(folder.plan))
        return dataclasses.replace(self, run=dataclasses.replace(self.run, strategy=strategy))

    def launch_plan(self, folder: RunFolder) -> LaunchPlan | None:
        """How its ranks would be started; None for a single rank, which runs in this process."""
        if self.mesh.num_ranks == 1:
            return None
        return plan_launch(self.run, folder=folder, mesh=self.mesh, device=self.device)


@dataclass(frozen=True)
class TrainResult:
    """What a finished run left.

    Args:
        run_dir: The run folder.
        report: The page to look at; None where another process writes it.
        summary: The content of ``summary.json``; empty where another process writes it.
    """

    run_dir: Path
    report: Path | None
    summary: dict[str, Any]


def prepare(  # noqa: PLR0913 - one parameter per option of the command
    config: RunConfig | str | Path,
    *,
    ranks: int | None = None,
    mesh: Mesh | str | None = None,
    engine: str | None = None,
    plan: str | Path | None = None,
    cluster: str | Path | None = None,
    memory_bytes: int | None = None,
    overrides: tuple[str, ...] = (),
    builds: bool = False,
) -> PreparedRun:
    """Checks a run without starting it: settings, engine, device and data.

    Args:
        config: A run, or the path of a run file.
        ranks: Number of ranks; default as in the run file, else 1.
        mesh: A mesh, or text like ``"data=4"``; default as in the run file, else all ranks on the data axis.
        engine: ``"mindspore"`` or ``"torch"``; default as in the run file.
        plan: A plan file, whose mesh counts where no other one is asked for; or ``"auto"`` to have one made.
        cluster: Cluster file or preset that ``"auto"`` plans for; default the preset for this machine.
        memory_bytes: What a rank may fill by that plan; default what a device has.
        overrides: Settings as ``a.b=value``; only with a path.
        builds: Whether to build the network too and run one image through it. One that is split along channels is
            built in any case, and so is one that takes regrouped images; else the ranks tell what is wrong with it.

    Returns:
        The run, ready to start.

    Raises:
        ConvMeshError: If anything is wrong; if several things are, a ``MistakeList`` of all.
    """
    run = config if isinstance(config, RunConfig) else load_config(config, overrides=overrides)
    if engine is not None:
        run = parse_config({**_as_mapping(run), "engine": engine})
    if plan is not None and str(plan) == AUTO:
        wanted = parse_mesh(mesh) if isinstance(mesh, str) else mesh
        raise_all(missing_engine(run))
        with auto_plan(run, num_ranks=ranks, mesh=wanted, cluster=cluster, memory_bytes=memory_bytes) as path:
            return prepare(run, plan=path)
    if plan is not None:
        run = dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, plan=str(plan)))
        if mesh is None:
            planned_for = load_plan(plan).mesh
            mesh = planned_for if ranks in {None, planned_for.num_ranks} else None
    run = as_planned(run)
    grid = resolve_mesh(run, num_ranks=ranks, mesh=parse_mesh(mesh) if isinstance(mesh, str) else mesh)
    run = dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, mesh=dict(grid.sizes)))
    mistakes: list[ConvMeshError] = [*missing_engine(run)]
    planned = grid.size(CHANNEL) > 1 or run.strategy.plan is not None or run.strategy.recompute not in {"none", ()}
    planned = planned and not mistakes and not unsplit_axes(run, mesh=grid)
    mistakes += [*check_config(run, mesh=grid), *missing_sinks(run)]
    launcher = load_launcher(run.engine)
    device = launcher.resolve_device(run.train.device)
    mistakes += launcher.check(run, device=device, num_ranks=grid.num_ranks)
    builds = (builds or run.data.channels != ChannelsConfig()) and not planned and not missing_engine(run)
    data, split = _look_ahead(run, grid, mistakes, planned=planned, builds=builds)
    raise_all(mistakes)
    if data is None:
        raise AssertionError("unreachable: every failure above is an error")
    return PreparedRun(run=run, mesh=grid, device=device, data=data, plan=split)


def _look_ahead(
    run: RunConfig, mesh: Mesh, mistakes: list[ConvMeshError], *, planned: bool, builds: bool
) -> tuple[DataReport | None, RunPlan | None]:
    """Looks at the data, and at the network where a plan tells of it or it is wanted; adds what is wrong."""
    data: DataReport | None = None
    split: RunPlan | None = None
    sound = not mistakes
    try:
        datasets = open_data(run.data)
        if sound:
            data = inspect_data(run, num_ranks=mesh.size("data"))
        if planned:
            split = plan_run(run, mesh=mesh, datasets=datasets)
        if builds:
            build_network(load_engine(run.engine), run, datasets)
    except MistakeList as found:
        mistakes += found.errors
    except ConvMeshError as found:
        mistakes.append(found)
    return data, split


def train(  # noqa: PLR0913 - one parameter per option of the command
    config: RunConfig | str | Path,
    *,
    ranks: int | None = None,
    mesh: Mesh | str | None = None,
    engine: str | None = None,
    plan: str | Path | None = None,
    cluster: str | Path | None = None,
    memory_bytes: int | None = None,
    overrides: tuple[str, ...] = (),
    run_dir: str | Path | None = None,
    resume: bool = False,
    on_record: Callable[[Record], None] | None = None,
    on_start: Callable[[RunFolder], None] | None = None,
) -> TrainResult:
    """Trains a network: in this process for one rank, through msrun or torchrun for more.

    Under an outer msrun, torchrun or Slurm it joins the ranks that those have started.

    Args:
        config: A run, or the path of a run file.
        ranks: Number of ranks; default as in the run file, else 1.
        mesh: A mesh, or text like ``"data=4"``.
        engine: ``"mindspore"`` or ``"torch"``; default as in the run file.
        plan: A plan file that says how the network is split, or ``"auto"``; default as in the run file, else by rule.
            A resumed run goes on by the plan in its folder, unless that was for other ranks.
        cluster: Cluster file or preset that ``"auto"`` plans for.
        memory_bytes: What a rank may fill by that plan.
        overrides: Settings as ``a.b=value``; only with a path.
        run_dir: The run folder; default ``runs/<name>-<time>``.
        resume: Go on with the run in that folder.
        on_record: Called with every record of ``metrics.jsonl``; only for a run in this process.
        on_start: Called with the run folder when it is ready, before ranks start.

    Returns:
        Where the run is and how it ended.

    Raises:
        ConvMeshError: If something is wrong that the user can mend; the run folder keeps what was reached.
    """
    place = find_rank(os.environ)
    if place is not None:
        ranks = ranks or place.num_ranks
    name = Path("run" if isinstance(config, RunConfig) else config)
    if resume and str(plan) == AUTO:
        earlier = RunFolder(run_dir or default_run_dir(name, resume=True)).plan
        plan = earlier if is_for(earlier, ranks=ranks, mesh=mesh) else AUTO
    prepared = prepare(
        config, ranks=ranks, mesh=mesh, engine=engine, plan=plan, cluster=cluster, memory_bytes=memory_bytes,
        overrides=overrides,
    )  # fmt: skip
    if place is not None:
        return _join(prepared, place, run_dir=run_dir, resume=resume, on_record=on_record)
    folder = RunFolder(run_dir or default_run_dir(name, resume=resume))
    prepared = prepared.placed_in(folder)
    try:
        _prepare_folder(folder, prepared, resume=resume)
        if on_start:
            on_start(folder)
        _run_here_or_launch(prepared, folder, on_record)
    finally:
        folder.release()
        report = _report(folder)
    return TrainResult(run_dir=folder.root, report=report, summary=json.loads(folder.summary.read_text()))


def check(
    config: RunConfig | str | Path,
    *,
    ranks: int | None = None,
    mesh: Mesh | str | None = None,
    engine: str | None = None,
    plan: str | Path | None = None,
    overrides: tuple[str, ...] = (),
) -> tuple[PreparedRun | None, tuple[ConvMeshError, ...]]:
    """Finds everything that is wrong with a run, at once and before any process starts.

    Args:
        config: A run, or the path of a run file.
        ranks: Number of ranks; default as in the run file, else 1.
        mesh: A mesh, or text like ``"data=2,channel=2"``.
        engine: ``"mindspore"`` or ``"torch"``; default as in the run file.
        plan: A plan file; default as in the run file, else a plan by rule.
        overrides: Settings as ``a.b=value``; only with a path.

    Returns:
        The run, if it could start, and what is wrong.
    """
    try:
        prepared = prepare(config, ranks=ranks, mesh=mesh, engine=engine, plan=plan, overrides=overrides, builds=True)
    except MistakeList as found:
        return None, found.errors
    except ConvMeshError as found:
        return None, (found,)
    return prepared, ()


def verify(  # noqa: PLR0913 - one parameter per option of the command
    config: RunConfig | str | Path,
    *,
    ranks: int | None = None,
    mesh: Mesh | str | None = None,
    engine: str | None = None,
    plan: str | Path | None = None,
    overrides: tuple[str, ...] = (),
    steps: int = 3,
    dtype: Literal["float32", "float64"] = "float32",
) -> Verification:
    """Trains a few updates on ranks and on one device from the same state, and compares everything.

    Args:
        config: A run, or the path of a run file.
        ranks: Number of ranks; default as in the run file, else 1.
        mesh: A mesh, or text like ``"data=2,channel=2"``.
        engine: ``"mindspore"`` or ``"torch"``; default as in the run file.
        plan: A plan file; default as in the run file, else a plan by rule.
        overrides: Settings as ``a.b=value``; only with a path.
        steps: Updates; at most those of an epoch with a full global batch.
        dtype: Of parameters and computation.

    Returns:
        What differs, what was communicated, and the memory.

    Raises:
        ConfigError: If there is one rank only and nothing is recomputed, or the data is too short.
        ConvMeshError: If something else is wrong that the user can mend, or a rank fails.
    """
    prepared = prepare(config, ranks=ranks, mesh=mesh, engine=engine, plan=plan, overrides=overrides)
    if prepared.mesh.num_ranks == 1 and (prepared.plan is None or not prepared.plan.resolved.recomputed):
        raise ConfigError("there is nothing to verify on one rank", fix="Give a --mesh, like data=2,channel=2")
    check_dtype(dtype, engine=prepared.run.engine)
    check_length(steps, num_full=int(prepared.data.counts_RC.sum()) // prepared.run.train.global_batch)
    with tempfile.TemporaryDirectory(prefix="convmesh-verify-") as root:
        folder = RunFolder(root)
        if prepared.plan is not None:
            prepared.plan.write(folder.plan)
        placed = prepared.placed_in(folder)
        subject = Subject(
            run=placed.run, mesh=placed.mesh, device=placed.device, plan=placed.plan, num_updates=steps, dtype=dtype
        )
        return verify_run(subject, root=Path(root))


def _run_here_or_launch(prepared: PreparedRun, folder: RunFolder, on_record: Callable[[Record], None] | None) -> None:
    try:
        plan = prepared.launch_plan(folder)
        if plan is not None:
            launch(plan, folder=folder)
        else:
            world = World(
                rank=0,
                num_ranks=1,
                local_rank=0,
                num_local_ranks=1,
                mesh=prepared.mesh,
                device=prepared.device,
                num_threads=threads_per_rank(1),
            )
            run_rank(prepared.run, world=world, folder=folder, on_record=on_record)
    except (ConvMeshError, KeyboardInterrupt) as error:
        stopped = isinstance(error, KeyboardInterrupt)
        write_json(folder.summary, {"status": "stopped" if stopped else "failed", "error": str(error) or "interrupted"})
        raise


def _join(
    prepared: PreparedRun,
    place: RankPlace,
    *,
    run_dir: str | Path | None,
    resume: bool,
    on_record: Callable[[Record], None] | None,
) -> TrainResult:
    if run_dir is None:
        raise ConfigError(
            f"ranks that {place.starter} started need to agree on a run folder", fix="Give --run-dir to all of them"
        )
    if prepared.mesh.num_ranks != place.num_ranks:
        raise ConfigError(
            f"the mesh {prepared.mesh} does not fit the ranks that {place.starter} started",
            got=f"{place.num_ranks} ranks",
            expected=str(prepared.mesh.num_ranks),
        )
    folder = RunFolder(run_dir)
    prepared = prepared.placed_in(folder)
    world = World(
        rank=place.rank,
        num_ranks=place.num_ranks,
        local_rank=place.local_rank,
        num_local_ranks=place.num_local_ranks,
        mesh=prepared.mesh,
        device=prepared.device,
        num_threads=threads_per_rank(place.num_local_ranks),
    )

    def prepare_folder() -> None:
        _prepare_folder(folder, prepared, resume=resume)

    try:
        run_rank(prepared.run, world=world, folder=folder, on_record=on_record, prepare=prepare_folder)
    finally:
        folder.release()
    if place.rank != 0:
        return TrainResult(run_dir=folder.root, report=None, summary={})
    return TrainResult(run_dir=folder.root, report=_report(folder), summary=json.loads(folder.summary.read_text()))


def _prepare_folder(folder: RunFolder, prepared: PreparedRun, *, resume: bool) -> None:
    folder.prepare(prepared.run, resume=resume)
    data = prepared.data
    balance = {
        "class_names": list(data.class_names),
        "counts": data.counts_RC.tolist(),
        "largest_deviation": float(data.largest_deviation),
    }
    write_json(balance_path(folder), balance)
    if prepared.plan is not None:
        prepared.plan.write(folder.plan)


def _report(folder: RunFolder) -> Path | None:
    if not folder.metrics.exists():
        return None
    from convmesh.report.html import write_report

    return write_report(folder.root)


def _as_mapping(run: RunConfig) -> dict[str, Any]:
    return {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}

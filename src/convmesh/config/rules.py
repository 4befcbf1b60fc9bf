"""Rules that span several settings of a run, checked together and before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from convmesh.config.schema import RunConfig
from convmesh.errors import ConfigError, ConvMeshError
from convmesh.mesh import Mesh

SPLIT_AXES = {"torch": ("data", "channel"), "mindspore": ("data", "channel")}
"""Axes along which an engine can split a network."""


def unsplit_axes(run: RunConfig, *, mesh: Mesh) -> list[str]:
    """Axes of the mesh along which the run's engine can't split a network."""
    return [axis for axis, size in mesh.sizes.items() if size > 1 and axis not in SPLIT_AXES[run.engine]]


def resolve_mesh(run: RunConfig, *, num_ranks: int | None, mesh: Mesh | None = None) -> Mesh:
    """Decides the mesh from the command line and the run file.

    Args:
        run: The run; its ``strategy.mesh`` counts where the command line says nothing.
        num_ranks: Ranks asked for, or None.
        mesh: Mesh asked for, or None.

    Returns:
        The mesh; all ranks on the data axis unless something else was asked for.

    Raises:
        ConfigError: If the number of ranks and the mesh contradict each other.
    """
    wanted = mesh or (Mesh(run.strategy.mesh) if run.strategy.mesh else None)
    if wanted is None or (mesh is None and num_ranks is not None and set(wanted.sizes) <= {"data"}):
        return Mesh({"data": num_ranks or (wanted.num_ranks if wanted else 1)})
    if num_ranks is not None and wanted.num_ranks != num_ranks:
        raise ConfigError(
            f"the mesh {wanted} does not fit the number of ranks",
            got=f"{num_ranks} ranks",
            expected=f"{wanted.num_ranks}",
            fix=f"Use --ranks {wanted.num_ranks}, or another --mesh",
        )
    return wanted


def check_config(run: RunConfig, *, mesh: Mesh) -> list[ConvMeshError]:
    """Finds everything that is wrong with a run as a whole, without data, engine or processes.

    Args:
        run: The run.
        mesh: The mesh it shall run on.

    Returns:
        The mistakes, in the order of the run file; empty if there are none.
    """
    return [*_model(run), *_data(run), *_strategy(run, mesh), *_schedule(run), *_train(run)]


def _model(run: RunConfig) -> Iterator[ConvMeshError]:
    if (run.model.name is None) == (run.model.factory is None):
        yield ConfigError(
            "a network has a name or a factory, one of them",
            got=f"model.name {run.model.name}, model.factory {run.model.factory}",
            fix="Set 'model.name: resnet18', or 'model.factory: package.module:function' for your own network",
        )


def _data(run: RunConfig) -> Iterator[ConvMeshError]:
    data = run.data
    if (data.mean is None) != (data.std is None):
        yield ConfigError("data.mean and data.std belong together", fix="Give both, or none of them")
    elif data.mean is not None and data.std is not None and len(data.mean) != len(data.std):
        yield ConfigError("data.mean and data.std differ in length", got=f"{len(data.mean)} and {len(data.std)}")
    if data.source in ("image_folder", "idx") and data.path is None:
        yield ConfigError(f"the source {data.source} needs the folder of the data", fix="Set 'data.path'")


def _strategy(run: RunConfig, mesh: Mesh) -> Iterator[ConvMeshError]:
    for axis in unsplit_axes(run, mesh=mesh):
        able = SPLIT_AXES[run.engine]
        yield ConfigError(
            f"this version splits a network on {run.engine} along {' and '.join(able)} only, not along '{axis}'",
            got=str(mesh),
            fix=f"Use --mesh data={mesh.num_ranks}",
        )
    micro_batches = mesh.size("data") * run.strategy.accumulation
    batch = run.train.global_batch
    if batch % micro_batches:
        below, above = batch // micro_batches * micro_batches, -(-batch // micro_batches) * micro_batches
        nearest = f"{below} or {above}" if below else str(above)
        yield ConfigError(
            "train.global_batch is not divisible into micro-batches",
            got=f"{batch} samples over {mesh.size('data')} ranks x {run.strategy.accumulation} micro-batches",
            fix=f"Set 'train.global_batch: {nearest}'",
        )
    if run.strategy.optimizer_sharding and mesh.size("data") == 1:
        yield ConfigError(
            "strategy.optimizer_sharding needs more than one rank on the data axis",
            got=str(mesh),
            fix="Use more ranks, or set 'strategy.optimizer_sharding: false'",
        )


def _schedule(run: RunConfig) -> Iterator[ConvMeshError]:
    schedule = run.schedule
    if schedule.name == "steps" and not schedule.milestones:
        yield ConfigError("a schedule in steps needs its milestones", fix="Set 'schedule.milestones: [30, 60, 80]'")
    if list(schedule.milestones) != sorted(set(schedule.milestones)):
        yield ConfigError("schedule.milestones must rise", got=list(schedule.milestones))
    if schedule.warmup_epochs >= run.train.epochs and schedule.warmup_epochs > 0:
        yield ConfigError(
            "the warm-up is as long as the training",
            got=f"{schedule.warmup_epochs:g} of {run.train.epochs} epochs",
            fix="Set 'schedule.warmup_epochs' lower",
        )


def _train(run: RunConfig) -> Iterator[ConvMeshError]:
    sinks = run.train.sinks
    if len(set(sinks)) != len(sinks):
        yield ConfigError("a sink stands twice in train.sinks", got=", ".join(sinks), fix="Name each once")

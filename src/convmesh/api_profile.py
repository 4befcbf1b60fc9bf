"""Profiling a run from Python: a short run whose steps are kept event by event, and what they say."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from convmesh.api import prepare, train
from convmesh.config import dump_config
from convmesh.config.schema import ProfileConfig, RunConfig
from convmesh.mesh import Mesh
from convmesh.planner.cluster_file import load_cluster
from convmesh.profiling.analysis import Analysis, analyse
from convmesh.profiling.store import load_trace
from convmesh.training.advice import RUN_NAME, Advising, advise
from convmesh.training.profiling import FOLDER
from convmesh.training.run_folder import RunFolder, write_atomically

_NEVER = 2**31


@dataclass(frozen=True)
class Profiled:
    """A profiled run.

    Args:
        run_dir: The folder of the run; its ``profile`` holds the events.
        analysis: What they say.
    """

    run_dir: Path
    analysis: Analysis

    def advise(self, *, cluster: str | Path | None = None) -> Advising:
        """What to change, and what it is predicted to give.

        Args:
            cluster: A cluster file, or the name of a preset; default the preset for this machine.

        Returns:
            The advice; its ``write`` writes the run file that follows it.

        Raises:
            ConfigError: If the cluster file is wrong.
        """
        known = None if cluster is None else load_cluster(cluster)
        return advise(self.analysis, self.run_dir / FOLDER, cluster=known)


def profile(  # noqa: PLR0913 - one parameter per option of the command
    config: RunConfig | str | Path,
    *,
    window: ProfileConfig | None = None,
    ranks: int | None = None,
    mesh: Mesh | str | None = None,
    engine: str | None = None,
    plan: str | Path | None = None,
    overrides: tuple[str, ...] = (),
    run_dir: str | Path | None = None,
    on_start: Callable[[RunFolder], None] | None = None,
) -> Profiled:
    """Runs just long enough to profile some updates; evaluates nothing and saves no checkpoint.

    Args:
        config: A run, or the path of a run file.
        window: Which updates, and how closely; default 20 after 5.
        ranks: Number of ranks; default as in the run file, else 1.
        mesh: A mesh, or text like ``"data=2,channel=2"``.
        engine: ``"mindspore"`` or ``"torch"``; default as in the run file.
        plan: A plan file; default as in the run file, else by rule.
        overrides: Settings as ``a.b=value``; only with a path.
        run_dir: The run folder; default ``runs/profile-<name>-<time>``.
        on_start: Called with the run folder when it is ready, before ranks start.

    Returns:
        The run folder, and what the profile says.

    Raises:
        ConvMeshError: If something is wrong that the user can mend.
    """
    window = window or ProfileConfig(start=5, steps=20)
    prepared = prepare(config, ranks=ranks, mesh=mesh, engine=engine, plan=plan, overrides=overrides)
    num_updates = window.start + window.steps
    # One update more than is run, so that no epoch ends: its evaluation would be none of the profile's business. Not
    # fewer than the run has: its schedule may count on them.
    epochs = max(prepared.run.train.epochs, num_updates // max(1, prepared.data.num_updates) + 1)
    settings = dataclasses.replace(
        prepared.run.train,
        profile=window,
        max_updates=num_updates,
        epochs=epochs,
        eval_every_epochs=epochs,
        checkpoint_every_steps=_NEVER,
        check_sync_every=0,
        log_every_steps=num_updates,
        sinks=(),
    )
    name = "run" if isinstance(config, RunConfig) else Path(config).stem
    folder = Path(run_dir or Path("runs") / f"profile-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    run = dataclasses.replace(prepared.run, train=settings)
    result = train(run, mesh=prepared.mesh, run_dir=folder, on_start=on_start)
    write_atomically(result.run_dir / FOLDER / RUN_NAME, dump_config(prepared.run))
    # Ranks of one machine share its clock; those of several are brought together by their collectives.
    return Profiled(run_dir=result.run_dir, analysis=analyse(load_trace(result.run_dir / FOLDER)))

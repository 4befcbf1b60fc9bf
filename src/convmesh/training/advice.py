"""Advice on a profiled run, with the gain that the planner's cost model predicts from what the profile measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from convmesh.config import RunConfig, dump_config, load_config
from convmesh.config.rules import resolve_mesh
from convmesh.data.open import DataSets, open_data
from convmesh.errors import ConfigError, ConvMeshError, ProfileError
from convmesh.plan import CHANNEL, Plan
from convmesh.plan.by_rule import plan_by_rule
from convmesh.plan.load import dump_plan, load_plan
from convmesh.plan.network import network_facts
from convmesh.planner.cluster import Cluster
from convmesh.planner.cluster_file import load_cluster
from convmesh.planner.messages import way_of
from convmesh.profiling.advice import MIN_GAIN, MIN_GAIN_OF_MESH, MIN_GAIN_OF_UNKNOWN, Advice, Advised
from convmesh.profiling.analysis import Analysis
from convmesh.profiling.observed import observe
from convmesh.profiling.stragglers import MIN_STEPS
from convmesh.training.auto_plan import machine_preset
from convmesh.training.foresight import Foresight, Machine, Setting
from convmesh.training.hand_over import HAND_OVER
from convmesh.training.proposals import PLAN_FILE, Proposal, best_of, options, replanned, seconds_with
from convmesh.training.run_folder import RunFolder, write_atomically
from convmesh.training.run_graph import cached_graph

RUN_NAME = "run.yaml"
"""In the folder of a profile, the run file without what profiling changes in it."""

_ADDS = 0.005
"""Share of a step that a piece must still save beside those before it."""


@dataclass(frozen=True, kw_only=True)
class Advising:
    """Advice, and the run that follows it.

    Args:
        advised: The advice.
        setting: The run with all advice applied that goes together; None where there is none.
    """

    advised: Advised
    setting: Setting | None = None

    def write(self, path: Path) -> list[Path]:
        """Writes the run file with all advice applied, and beside it the plan file if it needs one.

        Args:
            path: The run file.

        Returns:
            The files.

        Raises:
            ConfigError: If there is no advice to apply.
            RunFolderError: If a file can't be written.
        """
        if self.setting is None:
            raise ConfigError(
                "there is no advice to apply",
                got=self.advised.silent.rstrip(".") or "nothing that is worth it",
                fix="Leave out --advice-config",
            )
        run, written = self.setting.run, [path]
        if self.advised.plan:
            plan_path = path.with_name(f"{path.stem}.{PLAN_FILE}")
            write_atomically(plan_path, self.advised.plan)
            run = dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, plan=str(plan_path)))
            written.append(plan_path)
        write_atomically(path, dump_config(run))
        return written


def advise(analysis: Analysis, folder: Path, *, cluster: Cluster | None = None) -> Advising:
    """Advises on a profile that lies in a run folder.

    Args:
        analysis: What the profile says.
        folder: The folder of the profile; the run folder is the one above.
        cluster: The devices; default the preset for this machine.

    Returns:
        The advice. Where nothing can be predicted, it says why.
    """
    seconds = float(analysis.steady.step_RS.mean())
    try:
        foresight = foresight_of(analysis, folder, cluster=cluster)
    except ConvMeshError as error:
        return Advising(advised=Advised(seconds=seconds, silent=str(error)))
    return advise_on(foresight)


def foresight_of(analysis: Analysis, folder: Path, *, cluster: Cluster | None = None) -> Foresight:
    """Takes from a profile in a run folder what predicts the run with other settings.

    Args:
        analysis: What the profile says.
        folder: The folder of the profile; the run folder is the one above.
        cluster: The devices; default the preset for this machine.

    Returns:
        The predictor.

    Raises:
        ProfileError: If the profile is too short, of a device whose host says little, or without its run file.
        ConvMeshError: If the run or its plan can't be read, or the cluster lacks links.
    """
    run, figures = _run_of(folder), analysis.trace.figures
    if len(analysis.steady.step_S) < MIN_STEPS:
        raise ProfileError("the profile is too short to advise", got=f"{len(analysis.steady.step_S)} steady steps",
                           expected=f"at least {MIN_STEPS}")  # fmt: skip
    if figures.get("host_times"):
        raise ProfileError("times on the host say little of this device", fix="Profile with --detail")
    datasets = _datasets(run)
    graph = cached_graph(
        run,
        batch=2,
        image_shape_HWC=datasets.image_shape_HWC if datasets is not None else None,
        num_classes=len(datasets.class_names) if datasets is not None else None,
    )
    mesh = resolve_mesh(run, num_ranks=len(analysis.ranks))
    plan_path = RunFolder(folder.parent).plan
    if plan_path.exists():
        plan = dataclasses.replace(load_plan(plan_path), mesh=mesh)
    else:
        plan = plan_by_rule(graph, mesh) if mesh.size(CHANNEL) > 1 else Plan(mesh=mesh)
    return Foresight(
        Setting(run=run, plan=plan),
        observed=observe(analysis),
        graph=graph,
        cluster=cluster or load_cluster(machine_preset(run)),
        is_preset=cluster is None,
        datasets=datasets,
        machine=Machine(
            cores=figures.get("cores", 0.0),
            num_ranks=figures.get("local_ranks", float(mesh.num_ranks)),
            cpu_seconds=figures.get("cpu_seconds", 0.0),
            reading_cpu_seconds=figures.get("reading_cpu_seconds", 0.0),
            hand_over_seconds=figures.get(HAND_OVER, 0.0),
        ),
    )


def advise_on(foresight: Foresight) -> Advising:
    """Advises on a run.

    Args:
        foresight: The run, its profile, and what other settings would give.

    Returns:
        The advice.
    """
    now = foresight.observed.step_seconds
    tried = options(foresight)
    found: list[tuple[Proposal, Advice]] = []
    for kind in tried:
        best = best_of(foresight, tried[kind])
        if best is not None and best[1] <= (1 - MIN_GAIN) * now:
            found.append((best[0], _advice(foresight, *best)))
    other = replanned(foresight)
    if other is not None:
        _, without = _together(foresight, [[proposal] for proposal, _ in found])
        seconds = seconds_with(foresight, other, foresight.setting)
        floor = MIN_GAIN_OF_MESH if other.is_known else MIN_GAIN_OF_UNKNOWN
        if seconds is not None and seconds <= (1 - floor) * without:
            found.append((other, _advice(foresight, other, seconds)))
            tried[other.kind] = [other]
    found.sort(key=lambda pair: pair[1].predicted_seconds)
    chosen, seconds = _together(foresight, [tried[proposal.kind] for proposal, _ in found])
    return _advising(foresight, [advice for _, advice in found], chosen, seconds)


def _advising(foresight: Foresight, found: Sequence[Advice], chosen: Sequence[Proposal], seconds: float) -> Advising:
    setting = _applied(foresight.setting, chosen)
    needs_plan = bool(chosen) and (setting.run.strategy.plan is not None or any(entry.plan for entry in chosen))
    advised = Advised(
        seconds=foresight.observed.step_seconds,
        pieces=tuple(found),
        together=tuple(proposal.kind for proposal in chosen),
        changes={name: value for proposal in chosen for name, value in proposal.changes.items()},
        plan=_plan_text(foresight, setting) if needs_plan else "",
        predicted_seconds=seconds,
        basis=_basis(foresight),
    )
    return Advising(advised=advised, setting=setting if chosen else None)


def _together(foresight: Foresight, tried: Sequence[Sequence[Proposal]]) -> tuple[list[Proposal], float]:
    """Of each kind what is best beside the others, where it is exact and still adds to them, and what all give."""
    chosen: dict[str, Proposal] = {}
    seconds = foresight.observed.step_seconds
    exact = [found for found in tried if all(entry.is_exact and entry.is_known for entry in found)]
    # A plan decides anew how an update is run, so it comes before what changes that.
    kinds = sorted(exact, key=lambda found: found[0].plan is None)
    # Twice: how many workers are enough depends on what else is applied.
    for found in (*kinds, *kinds):
        others = [entry for entry in chosen.values() if entry.kind != found[0].kind]
        try:
            setting = _applied(foresight.setting, others)
            before = foresight.seconds(setting)
        except ConvMeshError:
            continue  # The others don't go together without this one.
        best = best_of(foresight, found, setting)
        if best is not None and best[1] <= before - _ADDS * foresight.observed.step_seconds:
            chosen[best[0].kind], seconds = best
        else:
            chosen.pop(found[0].kind, None)
            seconds = before
    return list(chosen.values()), seconds


def _applied(setting: Setting, chosen: Sequence[Proposal]) -> Setting:
    for proposal in sorted(chosen, key=lambda entry: entry.plan is None):
        setting = proposal.applied(setting)
    return setting


def _advice(foresight: Foresight, proposal: Proposal, seconds: float) -> Advice:
    return Advice(
        kind=proposal.kind,
        seen=proposal.seen,
        changes=proposal.changes,
        seconds=foresight.observed.step_seconds,
        predicted_seconds=seconds,
        is_exact=proposal.is_exact,
        notes=proposal.notes,
        plan=_plan_text(foresight, proposal.applied(foresight.setting)) if proposal.plan is not None else "",
    )


def _plan_text(foresight: Foresight, setting: Setting) -> str:
    return dump_plan(dataclasses.replace(setting.settled, network=network_facts(foresight.graph), foretold=None))


def _basis(foresight: Foresight) -> dict[str, str]:
    cluster, candidate = foresight.cluster, foresight.setting.candidate(foresight.graph)
    found = {"devices": cluster.name}
    for axis in foresight.setting.mesh.sizes:
        group = foresight.model.group(candidate.resolved, axis)
        if group.num_ranks > 1:
            way = way_of(candidate, cluster, axis=axis, kind="all-reduce")
            found[axis] = foresight.model.collectives.origin("all-reduce", group, way=way)
    return found


def _run_of(folder: Path) -> RunConfig:
    for path in (folder / RUN_NAME, RunFolder(folder.parent).config):
        if path.exists():
            return load_config(path)
    raise ProfileError(
        "there is no run file beside the profile",
        got=str(folder),
        expected="a profile that convmesh profile or train.profile has made, in its run folder",
    )


def _datasets(run: RunConfig) -> DataSets | None:
    try:
        return open_data(run.data)
    except ConvMeshError:
        return None  # Elsewhere than where it ran, perhaps; sampling can't be judged then.

"""Proposals: for each kind of advice, the one change that would shorten the steps of a profiled run most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convmesh.config.execution import with_execution
from convmesh.config.load import with_settings
from convmesh.config.rules import check_config
from convmesh.engines.reading_ahead import readers_of
from convmesh.errors import ConvMeshError, raise_all
from convmesh.plan import CHANNEL, Plan
from convmesh.plan.plan import DATA
from convmesh.planner.candidates import Wishes, accumulations
from convmesh.planner.prediction import MIB, Training
from convmesh.planner.pricing import Pricer
from convmesh.planner.search import search
from convmesh.profiling.advice import Kind, Note
from convmesh.profiling.observed import Transfers
from convmesh.training.foresight import Foresight, Setting
from convmesh.units import format_bytes

BUCKETS = (25 * MIB, 4 * MIB, MIB, 100 * MIB)
"""Sizes that are tried, the usual one first."""

WORKERS = (1, 2, 4, 8)
"""Numbers of workers per rank that are tried."""

PLAN_FILE = "plan.yaml"
"""What a plan file is called in a change before it is written."""

_AS_GOOD = 0.02
"""A simpler value is taken where a better one saves less than this share of the step."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One change.

    Args:
        kind: What it is about.
        changes: Setting of the run file, as ``a.b``, to its new value.
        seen: What was measured, by name of the blank in the wording.
        is_exact: Whether an update computes the same as before, but for the order of sums.
        notes: What else the change does.
        plan: Mesh and splits, where they change.
    """

    kind: Kind
    changes: Mapping[str, Any]
    seen: Mapping[str, float | str] = field(default_factory=dict)
    is_exact: bool = True
    notes: tuple[Note, ...] = ()
    plan: Plan | None = None

    @property
    def is_known(self) -> bool:
        """Whether it rests on constants that were measured."""
        return "unmeasured" not in self.notes

    def applied(self, setting: Setting) -> Setting:
        """Settings with this change.

        Raises:
            ConvMeshError: If it does not go with them.
        """
        plan = self.plan or setting.plan
        run = with_settings(setting.run, {name: value for name, value in self.changes.items() if name != _PLAN})
        if self.plan is not None:
            run = with_execution(run, self.plan.execution)
        raise_all(check_config(run, mesh=plan.mesh))
        return Setting(run=run, plan=plan)


_PLAN = "strategy.plan"


def options(foresight: Foresight) -> dict[Kind, list[Proposal]]:
    """What could be changed on the mesh of the run, whether it is worth it or not.

    Args:
        foresight: The run and its profile.

    Returns:
        Kind to the values that are tried, the usual ones first.
    """
    finders: tuple[Callable[[Foresight], Iterable[Proposal]], ...] = (
        _buckets, _accumulation, _recomputation, _optimizer_sharding, _half_gradients, _workers, _sampling,
    )  # fmt: skip
    found: dict[Kind, list[Proposal]] = {}
    for find in finders:
        for proposal in find(foresight):
            found.setdefault(proposal.kind, []).append(proposal)
    return found


def best_of(
    foresight: Foresight, found: Iterable[Proposal], setting: Setting | None = None
) -> tuple[Proposal, float] | None:
    """The change that makes a step shortest; an earlier one where that saves hardly less.

    Args:
        foresight: The run and its profile.
        found: The changes.
        setting: What they are made to; default the run as it was.

    Returns:
        The change and the seconds of a step with it; None if none goes with the settings or into memory.
    """
    timed = [(proposal, seconds_with(foresight, proposal, setting or foresight.setting)) for proposal in found]
    known = [(proposal, seconds) for proposal, seconds in timed if seconds is not None]
    if not known:
        return None
    limit = min(seconds for _, seconds in known) + _AS_GOOD * foresight.observed.step_seconds
    return next((proposal, seconds) for proposal, seconds in known if seconds <= limit)


def seconds_with(foresight: Foresight, proposal: Proposal, setting: Setting) -> float | None:
    """Seconds of a step with a change; None where it does not go with the settings or into memory."""
    try:
        changed = proposal.applied(setting)
        return foresight.seconds(changed) if foresight.fits(changed) else None
    except ConvMeshError:
        return None


def replanned(foresight: Foresight) -> Proposal | None:
    """Another mesh for the same ranks, or other splits on the same one, if the planner chooses so.

    Args:
        foresight: The run and its profile.

    Returns:
        The planner's choice; None if it is what was run, or can't be judged.
    """
    setting, model = foresight.setting, foresight.model
    run, mesh = setting.run, setting.mesh
    if mesh.num_ranks == 1 or setting.plan.names(DATA):
        return None
    pricer = Pricer(foresight.graph, Training.of(run), model, bucket_bytes=run.strategy.bucket_bytes)
    limit = max(model.cluster.device.memory_bytes, foresight.observed.peak_memory_bytes)
    try:
        found = search(pricer, num_ranks=mesh.num_ranks, memory_bytes=limit, wishes=Wishes(uses_all=True)).chosen
    except ConvMeshError:
        return None  # The cluster lacks links that other meshes need.
    if found is None or found.prediction is None:
        return None
    plan = found.prediction.candidate.resolved.plan
    same_mesh = _sizes(plan) == _sizes(setting.plan)
    if same_mesh and (mesh.size(CHANNEL) == 1 or plan.entries == setting.plan.entries):
        return None
    used = {transfers.axis for transfers in foresight.observed.transfers}
    is_known = set(_sizes(plan)) <= used or not foresight.is_preset
    return Proposal(
        kind="placement" if same_mesh else "mesh",
        changes={"strategy.mesh": _sizes(plan), _PLAN: PLAN_FILE},
        seen={"mesh": _named(setting.plan), "wanted": _named(plan), **_communication(foresight)},
        notes=("batch_norm",) if is_known else ("batch_norm", "unmeasured"),
        plan=plan,
    )


def _buckets(foresight: Foresight) -> Iterator[Proposal]:
    gradients = _of(foresight, DATA, "gradients")
    if foresight.setting.mesh.size(DATA) == 1 or gradients is None:
        return
    now = foresight.setting.run.strategy.bucket_bytes
    for size in BUCKETS:
        if size != now:
            yield Proposal(
                kind="buckets",
                changes={"strategy.bucket_bytes": f"{size // MIB}MiB"},
                seen={
                    "number": gradients.num_per_step,
                    "bytes": format_bytes(int(np.median(gradients.bytes_C))),
                    "seconds": float(gradients.seconds_C.mean()),
                },
            )


def _accumulation(foresight: Foresight) -> Iterator[Proposal]:
    setting = foresight.setting
    now, num_samples = setting.run.strategy.accumulation, setting.run.train.global_batch // setting.mesh.size(DATA)
    norms = any(node.kind == "batch_norm" for node in foresight.graph)
    for accumulation in accumulations(num_samples):
        if accumulation != now:
            yield Proposal(
                kind="accumulation",
                changes={"strategy.accumulation": accumulation},
                seen={"number": now, "samples": num_samples // now, "wanted": num_samples // accumulation},
                notes=("batch_norm",) if norms else (),
            )


def _recomputation(foresight: Foresight) -> Iterator[Proposal]:
    resolved = foresight.setting.candidate(foresight.graph).resolved
    if resolved.recomputed:
        again = foresight.predict(foresight.setting).seconds.recomputation
        yield Proposal(
            kind="recomputation",
            changes={"strategy.recompute": "none"},
            seen={"number": len(resolved.recomputed), "seconds": again},
        )


def _optimizer_sharding(foresight: Foresight) -> Iterator[Proposal]:
    if foresight.setting.mesh.size(DATA) > 1:
        now = foresight.setting.run.strategy.optimizer_sharding
        yield Proposal(
            kind="optimizer_sharding",
            changes={"strategy.optimizer_sharding": not now},
            seen={"seconds": foresight.observed.optimizer_seconds, "wanted": "on" if not now else "off"},
        )


def _half_gradients(foresight: Foresight) -> Iterator[Proposal]:
    gradients, run = _of(foresight, DATA, "gradients"), foresight.setting.run
    if gradients is not None and run.precision.gradient_reduction == "float32":
        num_bytes = gradients.num_per_step * float(gradients.bytes_C.mean())
        # Gradients that are not scaled beforehand would vanish in float16; MindSpore's collectives know no bfloat16.
        half = "bfloat16" if run.engine == "torch" and run.precision.compute != "float16" else "float16"
        yield Proposal(
            kind="half_gradients",
            changes={"precision.gradient_reduction": half},
            seen={"bytes": format_bytes(int(num_bytes)), "seconds": gradients.seconds_per_step},
            is_exact=False,
            notes=("rounding",),
        )


def _workers(foresight: Foresight) -> Iterator[Proposal]:
    observed, now = foresight.observed, readers_of(foresight.setting.run)
    for number in WORKERS:
        if number > now:
            yield Proposal(
                kind="workers",
                changes={"data.num_workers": number},
                seen={
                    "seconds": observed.reading_seconds,
                    "share": observed.reading_seconds / observed.step_seconds,
                    "number": now,
                },
            )


def _sampling(foresight: Foresight) -> Iterator[Proposal]:
    run, costs_RS = foresight.setting.run, foresight.costs_RS
    if costs_RS is None or foresight.setting.mesh.size(DATA) == 1 or run.data.sampler == "balanced":
        return
    slowest = costs_RS.max(axis=0) / np.maximum(costs_RS.mean(axis=0), 1e-12) - 1
    stratified = run.data.sampler == "stratified"
    yield Proposal(
        kind="sampling",
        changes={"data.sampler": "balanced"},
        seen={"share": float(slowest.mean()), "sampler": run.data.sampler},
        is_exact=not stratified,
        notes=("class_shares",) if stratified else (),
    )


def _of(foresight: Foresight, axis: str, purpose: str) -> Transfers | None:
    for transfers in foresight.observed.transfers:
        if (transfers.axis, transfers.purpose) == (axis, purpose):
            return transfers
    return None


def _communication(foresight: Foresight) -> dict[str, float]:
    observed = foresight.observed
    seconds = observed.communication_seconds
    return {"seconds": seconds, "share": seconds / observed.step_seconds}


def _sizes(plan: Plan) -> dict[str, int]:
    return {axis: size for axis, size in plan.mesh.sizes.items() if size > 1}


def _named(plan: Plan) -> str:
    return ",".join(f"{axis}={size}" for axis, size in _sizes(plan).items()) or "data=1"

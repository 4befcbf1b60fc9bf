"""Foretells a run from a cluster file after the fact, so that any run can be held against the cost model."""

from __future__ import annotations

import dataclasses

from convmesh.config import load_config
from convmesh.config.execution import execution_of
from convmesh.errors import RunFolderError
from convmesh.mesh import Mesh
from convmesh.plan import Foretold, Plan, resolve
from convmesh.plan.load import load_plan
from convmesh.planner.cluster import Cluster
from convmesh.planner.predict import predict
from convmesh.planner.prediction import Candidate
from convmesh.report.facts import num_ranks
from convmesh.report.run_folder import RunData, as_number, section
from convmesh.training.auto_plan import seconds_by_kind
from convmesh.training.run_graph import cached_graph

PLAN_NAME = "plan.yaml"
_TRACED_SAMPLES = 2
"""Samples of the trace; batch norm needs more than one value per channel."""


def foretell(run: RunData, cluster: Cluster) -> Plan:
    """What the planner would have foretold of a run on a cluster; reads its network, computes nothing of it.

    Args:
        run: The run.
        cluster: The devices, as `convmesh calibrate` measures them.

    Returns:
        The plan of the run, with the prediction.

    Raises:
        ConvMeshError: If the config can't be read, the network or its data is not there, or the cluster lacks links.
    """
    config = load_config(run.run_dir / "config.yaml")
    path = run.run_dir / PLAN_NAME
    plan = load_plan(path) if path.is_file() else Plan(mesh=_mesh(run))
    plan = dataclasses.replace(plan, execution=plan.execution.over(execution_of(config)))
    graph = cached_graph(config, batch=_TRACED_SAMPLES)
    prediction = predict(Candidate.of(resolve(graph, plan), config), cluster)
    reasons = () if plan.foretold is None else plan.foretold.reasons
    foretold = Foretold(
        cluster=cluster.name,
        global_batch=prediction.candidate.training.global_batch,
        seconds=prediction.seconds.total,
        seconds_by_kind=seconds_by_kind(prediction.seconds),
        memory_bytes=prediction.memory.total,
        memory_by_kind=prediction.memory.parts,
        memory_limit_bytes=cluster.device.memory_bytes,
        reasons=reasons,
    )
    return dataclasses.replace(plan, foretold=foretold)


def _mesh(run: RunData) -> Mesh:
    sizes = section(run.summary, "mesh") or section(run.start, "mesh") or {"data": num_ranks(run)}
    counts = {str(axis): as_number(size) for axis, size in sizes.items()}
    if not counts or not all(size >= 1 for size in counts.values()):
        raise RunFolderError("the run does not say on which mesh it ran", got=sizes)
    return Mesh({axis: int(size) for axis, size in counts.items()})

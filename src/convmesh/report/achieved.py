"""Collectives as a profile measured them, against what a cluster file says that they take.

A cluster file gives ``alpha + bytes * beta`` for each kind of collective. What a profile tells of one is the mean of
its bytes and of its seconds from the last arrival on, so waiting for late ranks does not count against the link.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from convmesh.mesh import Mesh
from convmesh.planner.cluster import Cluster, Way
from convmesh.planner.links import CollectiveSeconds, GroupShape, group_shape
from convmesh.profiling.analysis import Analysis
from convmesh.profiling.tables import CollectiveRow

_KINDS = {
    "allreduce": "all-reduce",
    "reducescatter": "reduce-scatter",
    "allgather": "all-gather",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
}


@dataclass(frozen=True, kw_only=True)
class Achieved:
    """A collective against the cluster file.

    Args:
        name: What it is called.
        axis: Mesh axis; empty if not known.
        bytes_per_second: Input bytes over the seconds of moving them, as measured.
        cluster_bytes_per_second: The same by the cluster file.
        share: The former of the latter; below 1 where the link did less than the cluster file says.
        source: Where the figures of the cluster file come from.
    """

    name: str
    axis: str
    bytes_per_second: float
    cluster_bytes_per_second: float
    share: float
    source: str


def collective_kind(name: str) -> str | None:
    """The kind of a collective by its name, whoever gave it: ``ncclDevKernel_AllReduce_Sum_f32`` is an all-reduce.

    Args:
        name: As a profile has it.

    Returns:
        As `convmesh.plan.collectives` names it, or None.
    """
    letters = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for text, kind in _KINDS.items() if text in letters), None)


def against_cluster(analysis: Analysis, cluster: Cluster) -> Mapping[CollectiveRow, Achieved]:
    """What each collective reached of what a cluster file promises.

    Args:
        analysis: The profile.
        cluster: The cluster on which it was made.

    Returns:
        The rows of the profile whose kind and bytes are known, each with what it reached.

    Raises:
        ConfigError: If the cluster says nothing of the links that a collective needs.
    """
    model = CollectiveSeconds(cluster)
    found = {}
    for row in analysis.collectives:
        kind = collective_kind(row.name)
        if kind is None or not row.bytes_per_second:
            continue
        group, way = _group(analysis, row, cluster), _way(analysis, row.axis, cluster)
        promised = row.num_bytes / model.seconds(kind, row.num_bytes, group, way=way)
        found[row] = Achieved(
            name=row.name,
            axis=row.axis,
            bytes_per_second=row.bytes_per_second,
            cluster_bytes_per_second=promised,
            share=row.bytes_per_second / promised,
            source=model.origin(kind, group, way=way),
        )
    return found


def achieved_json(achieved: Mapping[CollectiveRow, Achieved]) -> list[dict[str, object]]:
    """The same as plain values."""
    return [asdict(entry) for entry in achieved.values()]


def _group(analysis: Analysis, row: CollectiveRow, cluster: Cluster) -> GroupShape:
    mesh = analysis.trace.mesh
    if mesh.get(row.axis) == row.num_ranks:
        return group_shape(Mesh(mesh), row.axis, devices_per_node=cluster.devices_per_node)
    # An imported trace may not know its mesh: ranks of a group are taken to be neighbours.
    return GroupShape(num_ranks=row.num_ranks, num_nodes=math.ceil(row.num_ranks / cluster.devices_per_node))


def _way(analysis: Analysis, axis: str, cluster: Cluster) -> Way | None:
    """On the CPU, MindSpore's ranks add up in shared memory where they differ on the data axis alone."""
    if axis != "data":
        return None  # As activations do.
    axes = [axis for axis, size in analysis.trace.mesh.items() if size > 1]
    shares = analysis.trace.engine == "mindspore" and cluster.device.kind == "cpu" and axes == ["data"]
    return "shared_memory" if shares else "collective"

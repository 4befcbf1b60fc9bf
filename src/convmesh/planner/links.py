"""Seconds of collectives: which ranks a group has, over which links, and what a cluster says of these.

A collective of B bytes, counted as `convmesh.plan.collectives` counts them, takes ``alpha + B * seconds_per_byte``.
What was measured for a group of one size is carried to another by what each rank sends on a ring of k ranks, in units
of B, and by the number of steps:

| kind | sent per byte | steps inside a node | steps between nodes |
|---|---|---|---|
| all-reduce of B | 2 (k-1)/k | 2 (k-1) | 2 log2 k |
| reduce-scatter, all-to-all of B | (k-1)/k | k-1 | log2 k |
| all-gather of a part B | k-1 | k-1 | log2 k |
| broadcast of B | 1 | log2 k | log2 k |

(Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, for the ring and
the logarithmic algorithms; NCCL and HCCL use rings inside a node and trees or recursive halving between nodes.)
Between two measured sizes, both are interpolated. A group of m nodes with p ranks on each works inside its nodes and
between them at once: the slower one counts, and the alphas of both. Groups that communicate at the same time share the
network adapters of a node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from convmesh.errors import ConfigError
from convmesh.mesh import Mesh
from convmesh.planner.cluster import Cluster, CollectiveKind, Link, Way

_STAND_INS: dict[str, tuple[CollectiveKind, ...]] = {
    "all-reduce": ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all"),
    "reduce-scatter": ("reduce-scatter", "all-reduce", "all-gather", "all-to-all", "broadcast"),
    "all-gather": ("all-gather", "all-reduce", "reduce-scatter", "broadcast", "all-to-all"),
    "all-to-all": ("all-to-all", "reduce-scatter", "all-reduce", "all-gather", "broadcast"),
    "broadcast": ("broadcast", "all-gather", "all-reduce", "reduce-scatter", "all-to-all"),
}


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """Where the ranks of one group are.

    Args:
        num_ranks: Its size.
        num_nodes: Nodes over which it is spread.
        groups_per_node: Such groups that have ranks on one node.
    """

    num_ranks: int
    num_nodes: int = 1
    groups_per_node: int = 1

    @property
    def ranks_per_node(self) -> int:
        """Its ranks on each node."""
        return math.ceil(self.num_ranks / self.num_nodes)


@lru_cache(maxsize=1024)
def _shape(sizes: tuple[tuple[str, int], ...], axis: str, devices_per_node: int) -> GroupShape:
    names = [name for name, _ in sizes]
    if axis not in names:
        return GroupShape(num_ranks=1)
    grid = np.arange(math.prod(size for _, size in sizes)).reshape([size for _, size in sizes])
    node_of = np.moveaxis(grid, names.index(axis), -1).reshape(-1, grid.shape[names.index(axis)]) // devices_per_node
    return GroupShape(
        num_ranks=node_of.shape[1],
        num_nodes=int(1 + (np.diff(node_of, axis=1) > 0).sum(axis=1).max()),
        groups_per_node=int((node_of == 0).any(axis=1).sum()),
    )


def group_shape(mesh: Mesh, axis: str, *, devices_per_node: int) -> GroupShape:
    """Where the groups of an axis are, ranks filling one node after the other.

    Args:
        mesh: The ranks.
        axis: One of its axes.
        devices_per_node: Ranks of one node.

    Returns:
        The shape of the group that is spread most.
    """
    return _shape(tuple(mesh.sizes.items()), axis, devices_per_node)


def activations_way(cluster: Cluster, kind: str) -> Way:
    """How activations travel: PyTorch's ranks on one machine's CPU sum them in memory that they share.

    Its gathers and scatters go the same way, but no other does, so that a cluster file has one figure for them.

    Args:
        cluster: The devices.
        kind: As `convmesh.plan.collectives` names it.

    Returns:
        The way.
    """
    ways = {link.way for link in cluster.links.inside if link.kind == kind}
    return "shared_memory" if cluster.engine == "torch" and "shared_memory" in ways else "collective"


class CollectiveSeconds:
    """What collectives take on a cluster.

    Args:
        cluster: The cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[str, GroupShape, Way | None], tuple[float, float]] = {}

    def seconds(self, kind: str, num_bytes: float, group: GroupShape, *, way: Way | None = None) -> float:
        """Seconds of one collective.

        Args:
            kind: As `convmesh.plan.collectives` names it.
            num_bytes: Of its input on one rank.
            group: The ranks that take part.
            way: How it travels, by default as activations do; where a cluster does not know shared memory, through
                collectives.

        Returns:
            The seconds; 0 in a group of one.

        Raises:
            ConfigError: If the cluster says nothing of the links that the group needs.
        """
        key = kind, group, way
        if key not in self._known:
            self._known[key] = self._alpha_beta(kind, group, way or activations_way(self._cluster, kind))
        alpha, beta = self._known[key]
        return alpha + beta * num_bytes

    def _alpha_beta(self, kind: str, group: GroupShape, way: Way) -> tuple[float, float]:
        """Seconds that do not depend on the size, and seconds per byte."""
        if group.num_ranks == 1:
            return 0.0, 0.0
        inside, local = (0.0, 0.0), group.ranks_per_node
        if local > 1:
            inside = _alpha_beta(self._inside(way), kind, local, group.groups_per_node, grows_linearly=True)
        if group.num_nodes == 1:
            return inside
        between = _alpha_beta(self._between(), kind, group.num_nodes, 1, grows_linearly=False)
        adapters = min(local * group.groups_per_node, self._cluster.links.adapters_per_node)
        crossing = (local if kind == "all-gather" else 1) * group.groups_per_node / adapters
        return inside[0] + between[0], max(inside[1], between[1] * crossing)

    def origin(self, kind: str, group: GroupShape, *, way: Way | None = None) -> str:
        """Where the seconds of a collective come from, in words."""
        if group.num_ranks == 1:
            return "nothing to communicate"
        way = way or activations_way(self._cluster, kind)
        links = [*(self._inside(way) if group.ranks_per_node > 1 else ())]
        links += self._between() if group.num_nodes > 1 else ()
        near = _of_kind(links, kind)
        return "; ".join(dict.fromkeys(self._cluster.source_of(link.source) for link in near))

    def _inside(self, way: Way) -> Sequence[Link]:
        links = self._cluster.links.inside
        found = [link for link in links if link.way == way] or [link for link in links if link.way == "collective"]
        if not found:
            raise _unknown(self._cluster, "inside a node")
        return found

    def _between(self) -> Sequence[Link]:
        if not self._cluster.links.between:
            raise _unknown(self._cluster, "between nodes")
        return self._cluster.links.between


def _unknown(cluster: Cluster, where: str) -> ConfigError:
    return ConfigError(
        f"the cluster '{cluster.name}' says nothing of the links {where}",
        got=f"{cluster.devices_per_node} devices per node",
        fix="Use fewer ranks, or a cluster file or preset that has them",
    )


def _of_kind(links: Sequence[Link], kind: str) -> list[Link]:
    """The links of a kind; of the kind that is nearest to it, where there are none."""
    return next((found for name in _STAND_INS[kind] if (found := [link for link in links if link.kind == name])), [])


def _alpha_beta(
    links: Sequence[Link], kind: str, num_ranks: int, num_groups: int, *, grows_linearly: bool
) -> tuple[float, float]:
    near = _of_kind(links, kind)
    # What was measured with as many groups at once, or with the number nearest to it.
    distance = min(abs(math.log(link.num_groups / num_groups)) for link in near)
    near = [link for link in near if abs(math.log(link.num_groups / num_groups)) <= distance]
    sizes = [link.num_ranks for link in near]
    steps = [link.alpha_seconds / _steps(link.kind, link.num_ranks, grows_linearly) for link in near]
    rates = [link.seconds_per_byte / _sent(link.kind, link.num_ranks) for link in near]
    alpha = _between_sizes(num_ranks, sizes, steps) * _steps(kind, num_ranks, grows_linearly)
    return alpha, _between_sizes(num_ranks, sizes, rates) * _sent(kind, num_ranks)


def _between_sizes(wanted: int, sizes: Sequence[int], values: Sequence[float]) -> float:
    order = np.argsort(sizes, kind="stable")
    return float(np.interp(wanted, np.asarray(sizes, float)[order], np.asarray(values, float)[order]))


def _sent(kind: str, num_ranks: int) -> float:
    return {
        "all-reduce": 2 * (num_ranks - 1) / num_ranks,
        "reduce-scatter": (num_ranks - 1) / num_ranks,
        "all-to-all": (num_ranks - 1) / num_ranks,
        "all-gather": num_ranks - 1.0,
        "broadcast": 1.0,
    }[kind]


def _steps(kind: str, num_ranks: int, grows_linearly: bool) -> float:
    once = num_ranks - 1.0 if grows_linearly and kind != "broadcast" else math.log2(num_ranks)
    return 2 * once if kind == "all-reduce" else once

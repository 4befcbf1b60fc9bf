"""A cluster as a run found it: the constants that its profile measured in place of those of the file.

| constant | from the profile |
|---|---|
| seconds of operators, overheads | scaled by what computing and idling took over what was predicted |
| seconds of an update's parameters | scaled by what the optimizer took |
| alpha and beta of a collective | fitted to the collectives, where sizes differ enough; else scaled by them |

The rest stays as the file has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import get_args

from convmesh.planner.cluster import Cluster, CollectiveKind, Curve, Link, Links, Way
from convmesh.planner.fitting import fit_alpha_beta
from convmesh.planner.links import CollectiveSeconds, GroupShape
from convmesh.planner.messages import way_of
from convmesh.planner.prediction import Prediction
from convmesh.profiling.observed import Observed, Transfers

SOURCE = "profile"
"""Key of the figures that a profile has given."""

_UPDATES = ("sgd", "adamw")
_KINDS = get_args(CollectiveKind)  # An engine's own profiler has other names, that tell less.
_PURPOSES = ("gradients", "activations")
_LEAST_SIZES = 3
_LEAST_RATIO = 4
_LIMITS = (0.02, 50.0)


def refit(cluster: Cluster, observed: Observed, prediction: Prediction, groups: Mapping[str, GroupShape]) -> Cluster:
    """Puts what a run measured in the place of a cluster's constants.

    Args:
        cluster: What is known of the devices beforehand.
        observed: What the run measured.
        prediction: What the cluster predicts of that very run.
        groups: Axis to where its groups are.

    Returns:
        The cluster, by which the run is predicted as it was measured, but for what no constant stands for.
    """
    seconds = prediction.seconds
    working = seconds.forward + seconds.backward + seconds.recomputation + seconds.overhead
    compute = _ratio(observed.computing_seconds, working)
    update = _ratio(observed.optimizer_seconds, seconds.optimizer)
    links = cluster.links
    for transfers in observed.transfers:
        if transfers.axis in groups and transfers.kind in _KINDS and transfers.purpose in _PURPOSES:
            way = way_of(prediction.candidate, cluster, axis=transfers.axis, kind=transfers.kind)
            links = _with_transfers(cluster, links, transfers, groups[transfers.axis], way)
    return dataclasses.replace(
        cluster,
        sources={**cluster.sources, SOURCE: "this run's profile"},
        compute=tuple(_scaled(curve, update if curve.operator in _UPDATES else compute) for curve in cluster.compute),
        measured=tuple(
            dataclasses.replace(
                entry,
                forward_seconds=compute * entry.forward_seconds,
                backward_seconds=compute * entry.backward_seconds,
            )
            for entry in cluster.measured
        ),
        links=links,
        update_seconds=compute * cluster.update_seconds,
        micro_batch_seconds=compute * cluster.micro_batch_seconds,
        data_seconds_per_sample=None,
    )


def _ratio(measured: float, predicted: float) -> float:
    """How many times as long something took; 1 where either says nothing."""
    if measured <= 0 or predicted <= 0:
        return 1.0
    return min(max(measured / predicted, _LIMITS[0]), _LIMITS[1])


def _scaled(curve: Curve, ratio: float) -> Curve:
    points = tuple(dataclasses.replace(point, seconds=ratio * point.seconds) for point in curve.points)
    return dataclasses.replace(curve, points=points)


def _with_transfers(cluster: Cluster, links: Links, transfers: Transfers, group: GroupShape, way: Way) -> Links:
    """The links with what these collectives took; the other sizes of groups are scaled alike."""
    known = CollectiveSeconds(cluster)
    sizes = transfers.by_size()
    usual = sum(known.seconds(transfers.kind, size, group, way=way) for size, _ in sizes)
    ratio = _ratio(sum(seconds for _, seconds in sizes), usual)
    inside = _times(links.inside, transfers.kind, way, ratio)
    between = links.between if links.between is None else _times(links.between, transfers.kind, way, ratio)
    if group.num_nodes == 1 and _tells_both(sizes):
        line = fit_alpha_beta([size for size, _ in sizes], [max(seconds, 1e-9) for _, seconds in sizes])
        fitted = Link(
            kind=transfers.kind,  # type: ignore[arg-type]
            num_ranks=group.num_ranks,
            num_groups=group.groups_per_node,
            way=way,
            alpha_seconds=line.alpha_seconds,
            seconds_per_byte=line.seconds_per_byte,
            source=SOURCE,
        )
        inside = (*(link for link in inside if not _same(link, fitted)), fitted)
    return dataclasses.replace(links, inside=inside, between=between)


def _tells_both(sizes: Sequence[tuple[int, float]]) -> bool:
    """Whether sizes differ enough to tell alpha from beta."""
    return len(sizes) >= _LEAST_SIZES and sizes[-1][0] >= _LEAST_RATIO * max(sizes[0][0], 1)


def _times(links: Sequence[Link], kind: str, way: Way, ratio: float) -> tuple[Link, ...]:
    ways = {link.way for link in links if link.kind == kind}
    own = way if way in ways else "collective"
    return tuple(
        dataclasses.replace(
            link,
            alpha_seconds=ratio * link.alpha_seconds,
            seconds_per_byte=ratio * link.seconds_per_byte,
            source=SOURCE,
        )
        if (link.kind, link.way) == (kind, own)
        else link
        for link in links
    )


def _same(one: Link, other: Link) -> bool:
    return (one.kind, one.num_ranks, one.num_groups, one.way) == (
        other.kind,
        other.num_ranks,
        other.num_groups,
        other.way,
    )

"""Predicting what one plan costs, without running anything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from convmesh.graph import Activations, repeated
from convmesh.graph.resize import with_samples
from convmesh.plan import CHANNEL, ResolvedPlan
from convmesh.plan.collectives import SAMPLES_TOLD
from convmesh.plan.placement import Shard
from convmesh.planner.cluster import Cluster
from convmesh.planner.memory import memory_use
from convmesh.planner.messages import LocalParameters, local_parameters, update_messages, updated_bytes, way_of
from convmesh.planner.precision import with_precision
from convmesh.planner.prediction import Candidate, MemoryUse, OperatorCost, Prediction, Seconds
from convmesh.planner.recomputing import engine_activations
from convmesh.planner.seconds import CostModel, gradient_passes, reduction_seconds

OperatorCosts = Callable[[ResolvedPlan, int], tuple[OperatorCost, ...]]
"""From a plan and the position of a rank to what each operator costs it, as `CostModel.operators` tells."""


def predict(
    candidate: Candidate, cluster: Cluster | CostModel, *, operators: OperatorCosts | None = None
) -> Prediction:
    """What a plan costs per update, in seconds and in memory.

    Args:
        candidate: The plan; its graph may have any number of samples.
        cluster: The devices; a cost model of them saves time where many plans are judged.
        operators: What operators cost, where it is known already; default asks the cost model.

    Returns:
        The prediction: seconds of the slowest rank, memory of the one that needs most.

    Raises:
        ConfigError: If the cluster says nothing of links that the plan needs.
        ModelError: If the network can't be told for the plan's micro-batch.
    """
    model = cluster if isinstance(cluster, CostModel) else CostModel(cluster)
    local = at_micro_batch(candidate, model.cluster)
    samples = SAMPLES_TOLD[candidate.training.engine]
    ask = operators or (lambda resolved, position: model.operators(resolved, position=position, samples=samples))
    ranks = [
        _Rank.of(seen, model, position, ask(seen.resolved, position))
        for seen in _seen(local)
        for position in positions(seen.resolved)
    ]
    slowest = max(ranks, key=lambda rank: rank.seconds.total)
    return Prediction(
        candidate=candidate,
        seconds=slowest.seconds,
        memory=max((rank.memory for rank in ranks), key=lambda use: use.total),
        operators=slowest.operators,
        origins=_origins(local, model, slowest),
    )


def at_micro_batch(candidate: Candidate, cluster: Cluster) -> Candidate:
    """The candidate with the graph of one of its micro-batches, in the types in which it computes.

    Args:
        candidate: The plan.
        cluster: Says which kind of device it is.

    Returns:
        An equal plan.

    Raises:
        ModelError: If the network can't be told for another number of samples.
    """
    graph = with_samples(candidate.resolved.graph, candidate.micro_batch)
    graph = with_precision(graph, candidate.training, device_kind=cluster.device.kind)
    if graph is candidate.resolved.graph:
        return candidate
    region = candidate.resolved.region
    region = region and dataclasses.replace(region, graph=graph)
    return dataclasses.replace(candidate, resolved=dataclasses.replace(candidate.resolved, graph=graph, region=region))


def positions(resolved: ResolvedPlan) -> tuple[int, ...]:
    """The ranks of the channel axis that differ in what they do: the first alone, if all hold equally much."""
    return (0,) if _is_alike(resolved) else tuple(range(resolved.num_ranks))


def _is_alike(resolved: ResolvedPlan) -> bool:
    placements = [entry.output for entry in resolved.operators.values()]
    sizes = [{len(own) for own in place.lists} for place in placements if isinstance(place, Shard)]
    return resolved.is_even and all(len(found) == 1 for found in sizes)


def _seen(candidate: Candidate) -> Iterator[Candidate]:
    """The plan as each rank of the data axis has it, where parts of what is split along it are unequal."""
    resolved = candidate.resolved
    if resolved.region is None or _is_alike(resolved.region):
        yield candidate
        return
    for position in range(resolved.region.num_ranks):
        yield dataclasses.replace(candidate, resolved=dataclasses.replace(resolved, data_position=position))


@dataclass(frozen=True)
class _Rank:
    """What one rank of the channel axis is predicted to do."""

    seconds: Seconds
    memory: MemoryUse
    operators: tuple[OperatorCost, ...]

    @classmethod
    def of(cls, candidate: Candidate, model: CostModel, position: int, costs: tuple[OperatorCost, ...]) -> _Rank:
        resolved = candidate.resolved
        activations = engine_activations(resolved, candidate.training, model.cluster, position=position)
        own = local_parameters(candidate, position=position)
        operators = _operators(resolved, costs, activations)
        signatures = {cost.node: cost.signature for cost in operators}
        memory = memory_use(candidate, model.cluster, own=own, signatures=signatures, activations=activations)
        return cls(_seconds(candidate, model, own, operators), memory, operators)


def _operators(
    resolved: ResolvedPlan, costs: tuple[OperatorCost, ...], activations: Activations
) -> tuple[OperatorCost, ...]:
    again = frozenset[str]().union(*(repeated(resolved.graph, block).run for block in resolved.recomputed))
    found = []
    for cost in costs:
        recomputed, kept_bytes = cost.node in again, activations.kept[cost.node]
        same = cost.recomputed == recomputed and cost.kept_bytes == kept_bytes
        found.append(cost if same else dataclasses.replace(cost, recomputed=recomputed, kept_bytes=kept_bytes))
    return tuple(found)


def _seconds(
    candidate: Candidate, model: CostModel, own: LocalParameters, operators: tuple[OperatorCost, ...]
) -> Seconds:
    resolved, times = candidate.resolved, candidate.accumulation
    cluster, messages = model.cluster, update_messages(candidate, model.cluster, own)
    made_by: dict[str, str] = {}
    for node in resolved.graph:
        made_by |= {entry.name: node.name for entry in node.parameters if entry.name not in made_by}
    again = {entry.node: entry.forward_seconds if entry.recomputed else 0.0 for entry in operators}
    backward = {entry.node: entry.backward_seconds + again[entry.node] for entry in operators}
    reduction = reduction_seconds(model, candidate, messages, backward=backward, made_by=made_by)
    activations = times * sum(entry.communication_seconds for entry in operators)
    exchanges = times * sum(entry.exchange_seconds for entry in operators)
    norm = sum(model.message_seconds(resolved, message) for message in messages if message.axis == CHANNEL)
    shards = candidate.num_shards if candidate.optimizer_sharding else 1
    found = Seconds(
        forward=times * sum(entry.forward_seconds for entry in operators),
        backward=times * sum(entry.backward_seconds for entry in operators)
        + model.moving(gradient_passes(candidate, own)),
        recomputation=times * sum(again.values()),
        exposed=_by_axis(candidate, data=reduction.exposed + exchanges, channel=activations + norm),
        optimizer=model.optimizer_seconds(
            candidate.training, updated_bytes=updated_bytes(own, shards), gradient_bytes=own.trainable_bytes
        ),
        overhead=cluster.update_seconds + times * cluster.micro_batch_seconds,
        hidden=_by_axis(candidate, data=reduction.hidden, channel=0.0),
    )
    return dataclasses.replace(found, data=_waiting(candidate, cluster, found.total))


def _by_axis(candidate: Candidate, *, data: float, channel: float) -> dict[str, float]:
    mesh = candidate.resolved.plan.mesh
    return {axis: value for axis, value in (("data", data), (CHANNEL, channel)) if mesh.size(axis) > 1}


def _waiting(candidate: Candidate, cluster: Cluster, seconds: float) -> float:
    num_samples = candidate.micro_batch * candidate.accumulation
    needed = num_samples * (cluster.data_seconds_per_sample or 0.0)
    return max(0.0, needed - seconds) if candidate.training.prefetches else needed


def _origins(candidate: Candidate, model: CostModel, rank: _Rank) -> Mapping[str, str]:
    cluster, resolved = model.cluster, candidate.resolved
    num_measured = sum(entry.origin == "measured" for entry in rank.operators)
    num_computing = sum(entry.origin != "nothing" for entry in rank.operators)
    found = {
        "operators": f"{num_measured} of {num_computing} measured at exactly their shapes, the others on curves",
        "device": cluster.source_of(cluster.device.source),
        "overlap": f"{cluster.overlap:g} of what could be hidden: {cluster.source_of('')}",
    }
    for axis in ("data", CHANNEL):
        group = model.group(resolved, axis)
        if group.num_ranks > 1:
            way = way_of(candidate, cluster, axis=axis, kind="all-reduce")
            found[f"{axis} axis"] = model.collectives.origin("all-reduce", group, way=way)
    if math.isfinite(cluster.data_seconds_per_sample or math.inf):
        found["data"] = cluster.source_of("")
    return found

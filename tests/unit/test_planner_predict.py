"""Predictions: seconds and memory of whole plans, and how they answer to each thing that decides them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import candidate_of, cluster_of, plain_network, residual_network

from convmesh.config.load import parse_config
from convmesh.errors import ConfigError
from convmesh.graph import blocks, total_cost
from convmesh.graph.resize import with_samples
from convmesh.plan import Execution
from convmesh.planner.cluster import Cluster
from convmesh.planner.memory import lasting_bytes
from convmesh.planner.messages import local_parameters
from convmesh.planner.predict import at_micro_batch, predict
from convmesh.planner.prediction import Candidate, MemoryUse, Prediction, Seconds, Training
from convmesh.planner.seconds import CostModel

GRAPH = residual_network()
MESHES: tuple[dict[str, int], ...] = ({"data": 1}, {"data": 4}, {"channel": 4}, {"data": 2, "channel": 2})
CLUSTER = cluster_of()


def recomputing(candidate: Candidate) -> Candidate:
    """The same plan with all blocks recomputed."""
    resolved = dataclasses.replace(candidate.resolved, recomputed=blocks(candidate.resolved.graph))
    assert resolved.recomputed
    return dataclasses.replace(candidate, resolved=resolved)


def faster(cluster: Cluster, *, links: float = 1.0, compute: float = 1.0) -> Cluster:
    """A cluster whose links and devices are so many times as fast."""
    inside = tuple(
        dataclasses.replace(entry, seconds_per_byte=entry.seconds_per_byte / links) for entry in cluster.links.inside
    )
    curves = tuple(
        dataclasses.replace(
            curve,
            points=tuple(dataclasses.replace(point, seconds=point.seconds / compute) for point in curve.points),
        )
        for curve in cluster.compute
    )
    return dataclasses.replace(cluster, compute=curves, links=dataclasses.replace(cluster.links, inside=inside))


CANDIDATES = st.builds(
    lambda axes, accumulation, sharding, again, engine: (recomputing if again else lambda found: found)(
        candidate_of(
            GRAPH,
            axes=axes,
            accumulation=accumulation,
            optimizer_sharding=sharding and axes.get("data", 1) > 1,
            bucket_bytes=5000,
            training=Training(engine=engine, global_batch=32),
        )
    ),
    st.sampled_from(MESHES),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["torch", "mindspore"]),
)


@settings(max_examples=40, deadline=None)
@given(CANDIDATES, st.floats(1.01, 50))
def test_faster_links_and_devices_never_cost_time(candidate: Candidate, factor: float) -> None:
    now = predict(candidate, CLUSTER)
    for cluster in (faster(CLUSTER, links=factor), faster(CLUSTER, compute=factor)):
        later = predict(candidate, cluster)
        assert later.seconds.total <= now.seconds.total * (1 + 1e-9)
        assert later.memory == now.memory


@settings(max_examples=30, deadline=None)
@given(CANDIDATES, st.integers(1, 40))
def test_more_samples_never_take_less(candidate: Candidate, more: int) -> None:
    training = dataclasses.replace(candidate.training, global_batch=candidate.training.global_batch + more)
    less, larger = predict(candidate, CLUSTER), predict(dataclasses.replace(candidate, training=training), CLUSTER)
    assert less.seconds.total <= larger.seconds.total * (1 + 1e-9)
    assert less.memory.total <= larger.memory.total


@settings(max_examples=30, deadline=None)
@given(CANDIDATES)
def test_kinds_add_up_and_none_is_below_zero(candidate: Candidate) -> None:
    found = predict(candidate, CLUSTER)
    parts = found.memory.parts
    assert set(parts) == {field.name for field in dataclasses.fields(MemoryUse)} - {"moment"}
    assert sum(parts.values()) == found.memory.total
    assert min(parts.values()) >= 0
    assert found.memory.moment
    seconds = found.seconds
    single = [getattr(seconds, f.name) for f in dataclasses.fields(Seconds) if f.name not in ("exposed", "hidden")]
    assert sum(single) + sum(seconds.exposed.values()) == pytest.approx(seconds.total)
    assert min([*single, *seconds.exposed.values(), *seconds.hidden.values()]) >= 0
    assert set(seconds.exposed) == {axis for axis, size in candidate.resolved.plan.mesh.sizes.items() if size > 1}
    assert found.samples_per_second == pytest.approx(32 / seconds.total)
    assert 0 <= found.communication_share < 1


@settings(max_examples=20, deadline=None)
@given(CANDIDATES, st.sampled_from(["cpu", "cuda", "ascend"]))
def test_recomputing_costs_seconds_and_saves_activations(candidate: Candidate, kind: Any) -> None:
    """Not so with MindSpore on the CPU, which keeps all, and may hold more while a block runs again."""
    cluster = dataclasses.replace(CLUSTER, device=dataclasses.replace(CLUSTER.device, kind=kind))
    keeping = dataclasses.replace(candidate, resolved=dataclasses.replace(candidate.resolved, recomputed=()))
    without, having = predict(keeping, cluster), predict(recomputing(keeping), cluster)
    if candidate.training.engine == "mindspore" and kind == "cpu":
        assert having.memory.activations >= without.memory.activations
        assert having.memory.total >= without.memory.total
    else:
        assert having.memory.activations < without.memory.activations
        assert having.memory.total < without.memory.total
    assert without.seconds.recomputation == 0 < having.seconds.recomputation <= having.seconds.forward
    assert having.seconds.total > without.seconds.total


@pytest.mark.parametrize("engine", ["torch", "mindspore"])
def test_a_sharded_optimizer_holds_its_part(engine: Any) -> None:
    for optimizer, num_slots in (("sgd", 1), ("adamw", 2)):
        training = Training(engine=engine, global_batch=32, optimizer=optimizer, num_slots=num_slots)  # type: ignore[arg-type]
        whole = predict(candidate_of(GRAPH, axes={"data": 4}, training=training), CLUSTER)
        part = predict(candidate_of(GRAPH, axes={"data": 4}, training=training, optimizer_sharding=True), CLUSTER)
        assert whole.memory.optimizer == num_slots * 4 * GRAPH.num_parameters
        assert part.memory.optimizer == pytest.approx(whole.memory.optimizer / 4, abs=16)
        assert part.seconds.optimizer < whole.seconds.optimizer
        assert part.seconds.communication > whole.seconds.communication


def test_seconds_of_one_rank_are_those_of_its_work() -> None:
    """1 TFLOP/s and 100 GB/s: every operator of this network takes what its bytes or its FLOPs take."""
    graph = plain_network(samples=8, size=32)
    found = predict(candidate_of(graph, axes={"data": 1}, global_batch=8), CLUSTER)
    for cost in found.operators:
        if cost.signature is None:
            continue
        flops, num_bytes = cost.signature.cost.flops_forward, cost.signature.num_bytes("forward")
        weighted = cost.signature.kind in ("convolution", "dense")
        assert cost.forward_seconds == pytest.approx(max(flops / 1e12 if weighted else 0, num_bytes / 1e11))
    assert found.seconds.forward == pytest.approx(sum(cost.forward_seconds for cost in found.operators))
    assert found.seconds.backward == pytest.approx(sum(cost.backward_seconds for cost in found.operators))
    # SGD with momentum passes over five tensors, the norm over one.
    assert found.seconds.optimizer == pytest.approx(6 * 4 * graph.num_parameters / 1e11)
    twice = predict(candidate_of(graph, axes={"data": 1}, global_batch=16, accumulation=2), CLUSTER)
    assert twice.seconds.forward == pytest.approx(2 * found.seconds.forward)
    assert total_cost(with_samples(graph, 16)).flops_forward == 2 * total_cost(graph).flops_forward


def test_memory_of_one_rank_is_what_a_walk_by_hand_finds() -> None:
    graph = plain_network(samples=8, width=16, depth=2, size=32)
    candidate = candidate_of(graph, axes={"data": 1}, global_batch=8)
    found = predict(candidate, cluster_of(device={"name": "d", "memory_bytes": "1GiB", "fixed_bytes": 1000}))
    parameters, tensor = 4 * graph.num_parameters, 4 * 8 * 16 * 32 * 32
    buffers = 4 * sum(entry.num_elements for entry in graph.parameters) - parameters
    assert found.memory.fixed == 1000
    assert found.memory.parameters == parameters + 2 * buffers
    assert found.memory.optimizer == parameters
    # The most is held when the last ReLU makes its gradient from the pool's: both, all activations but what the dense
    # layer kept, and that layer's gradients. Each unit keeps its norm's input with two statistics per channel, and its
    # ReLU's output; the first convolution keeps the image.
    assert found.memory.moment == "backward of unit1.relu"
    assert found.memory.passing == 2 * tensor
    assert found.memory.activations == 4 * 8 * 3 * 32 * 32 + 3 * (2 * tensor + 2 * 16 * 4)
    assert found.memory.gradients == 4 * (16 * 10 + 10)


def test_gradients_are_held_as_each_engine_holds_them() -> None:
    whole = 4 * GRAPH.num_parameters

    def gradients(engine: Any, **rest: Any) -> int:
        training = Training(engine=engine, global_batch=32)
        candidate = candidate_of(GRAPH, training=training, **rest)
        return predict(candidate, CLUSTER).memory.gradients

    one = {"data": 1}
    two = {"data": 2}
    assert gradients("torch", axes=one) < whole
    assert gradients("torch", axes=one, accumulation=2) == whole
    assert gradients("torch", axes=two) == whole
    assert gradients("torch", axes=two, accumulation=2) == 2 * whole
    # Own gradients and half of the other's lie in shared memory; on one rank the optimizer holds the last update's.
    assert gradients("mindspore", axes=two) - gradients("mindspore", axes=one) == whole // 2


@pytest.mark.parametrize(
    ("axes", "accumulation", "kind", "copies"),
    [
        ({"data": 1}, 1, "cpu", 1),  # What the optimizer's graph was given in the update before.
        ({"data": 1}, 2, "cpu", 2),  # And sums over micro-batches.
        ({"data": 2}, 1, "cpu", 1.5),  # In shared memory: own ones and half of the other's.
        ({"data": 2, "channel": 2}, 1, "cpu", 2),  # What the graph of the collective was given, too.
        ({"data": 1}, 1, "ascend", 0),
        ({"data": 1}, 2, "ascend", 1),
    ],
)
def test_mindspore_holds_gradients_from_one_update_to_the_next(
    axes: dict[str, int], accumulation: int, kind: Any, copies: float
) -> None:
    cluster = dataclasses.replace(CLUSTER, device=dataclasses.replace(CLUSTER.device, kind=kind))
    training = Training(engine="mindspore", global_batch=32)
    candidate = candidate_of(GRAPH, training=training, axes=axes, accumulation=accumulation)
    own = local_parameters(candidate)
    rest = own.trainable_bytes + own.frozen_bytes + 2 * own.buffer_bytes + own.trainable_bytes  # One slot of momentum.
    assert lasting_bytes(candidate, cluster, own) - rest == copies * own.trainable_bytes


@pytest.mark.parametrize("engine", ["torch", "mindspore"])
def test_half_types_take_less_memory_and_gradients_travel_lighter(engine: Any) -> None:
    def of(compute: Any, reduction: Any) -> Prediction:
        training = Training(engine=engine, global_batch=64, compute_dtype=compute, reduction_dtype=reduction)
        return predict(
            candidate_of(residual_network(size=64), axes={"data": 2, "channel": 2}, training=training), CLUSTER
        )

    full, half, light = of("float32", "float32"), of("float16", "float32"), of("float16", "float16")
    assert half.seconds.exposed["channel"] < full.seconds.exposed["channel"]
    assert light.seconds.exposed["data"] < half.seconds.exposed["data"]
    assert half.memory.parameters > full.memory.parameters  # Half copies of the weights besides.
    if engine == "torch":
        assert half.memory.activations < 0.6 * full.memory.activations


def test_the_largest_rank_counts_and_the_slowest() -> None:
    graph = residual_network(width=18)
    uneven = predict(candidate_of(graph, axes={"channel": 4}), CLUSTER)
    even = predict(candidate_of(residual_network(width=16), axes={"channel": 4}), CLUSTER)
    fewer = predict(candidate_of(residual_network(width=20), axes={"channel": 4}), CLUSTER)
    assert even.memory.total < uneven.memory.total <= fewer.memory.total
    assert even.seconds.forward < uneven.seconds.forward <= fewer.seconds.forward


def test_a_micro_batch_is_that_of_the_rank_with_most() -> None:
    candidate = candidate_of(GRAPH, axes={"data": 3}, global_batch=32, accumulation=2)
    assert candidate.micro_batch == 6
    assert at_micro_batch(candidate, CLUSTER).resolved.graph.inputs[0].shape[0] == 6


@pytest.mark.parametrize("prefetches", [False, True])
def test_data_is_added_or_a_floor(prefetches: bool) -> None:
    training = Training(global_batch=32, prefetches=prefetches)
    candidate = candidate_of(GRAPH, axes={"data": 4}, training=training)
    computing = predict(candidate, CLUSTER).seconds.total
    quick = predict(candidate, cluster_of(data_seconds_per_sample=computing / 16)).seconds
    slow = predict(candidate, cluster_of(data_seconds_per_sample=1.0)).seconds
    assert quick.total == pytest.approx(computing if prefetches else 1.5 * computing)
    assert slow.total == pytest.approx(8.0 if prefetches else 8.0 + computing)
    assert slow.data > 0


def test_a_candidate_is_what_plan_and_run_file_say() -> None:
    run = parse_config(
        {
            "engine": "torch",
            "model": {"name": "resnet18"},
            "data": {"source": "digits", "num_workers": 2},
            "strategy": {"accumulation": 2, "bucket_bytes": "1MiB"},
            "precision": {"compute": "bfloat16"},
            "optimizer": {"name": "adamw"},
            "train": {"global_batch": 48},
        }
    )
    resolved = candidate_of(GRAPH).resolved
    found = Candidate.of(resolved, run)
    assert (found.accumulation, found.bucket_bytes, found.optimizer_sharding) == (2, 2**20, False)
    assert found.training == Training(
        engine="torch", global_batch=48, compute_dtype="bfloat16", optimizer="adamw", num_slots=2, prefetches=True
    )
    plan = dataclasses.replace(resolved.plan, execution=Execution(accumulation=4, optimizer_sharding=True))
    said = Candidate.of(dataclasses.replace(resolved, plan=plan), run)
    assert (said.accumulation, said.bucket_bytes, said.optimizer_sharding) == (4, 2**20, True)


def test_predictions_say_where_figures_come_from_and_repeat() -> None:
    candidate = candidate_of(GRAPH, axes={"data": 2, "channel": 2})
    found = predict(candidate, CostModel(CLUSTER))
    assert found == predict(candidate, CLUSTER)
    assert found.origins["operators"].startswith("0 of ")
    assert all("made up for tests" in found.origins[key] for key in ("device", "overlap", "data axis", "channel axis"))


def test_links_that_a_cluster_lacks_are_told() -> None:
    alone = dataclasses.replace(CLUSTER, links=dataclasses.replace(CLUSTER.links, between=None))
    with pytest.raises(ConfigError, match="links between nodes"):
        predict(candidate_of(GRAPH, axes={"data": 16}), alone)

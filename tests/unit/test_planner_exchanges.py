"""Predictions of plans in which ranks of the data axis exchange samples for channels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from planning import Network, cluster_of

from convmesh.graph import Edge, Graph
from convmesh.mesh import Mesh
from convmesh.plan import Choice, Entry, Execution, Plan, resolve
from convmesh.plan.collectives import (
    NORM_BYTES,
    SAMPLES_TOLD,
    channel_collectives,
    data_collectives,
    update_collectives,
)
from convmesh.plan.resolved import ResolvedPlan
from convmesh.planner.messages import local_parameters
from convmesh.planner.predict import at_micro_batch, predict
from convmesh.planner.prediction import Candidate, Prediction, Training
from convmesh.planner.seconds import CostModel

CLUSTER = cluster_of(overlap=0.0)
MODEL = CostModel(CLUSTER)
HEADS: tuple[dict[str, Any], ...] = (
    {"fc": "in_channels"},
    {"fc": "out_channels"},
    {"fc": Choice(split="out_channels", keep_input=True)},
    {"block.conv": "out_channels", "fc": "in_channels"},
    {"block.conv": Choice(split="in_channels", output="samples")},
)
ALPHA, BETA = 1e-5, 1e-10


def network(*, samples: int = 2, classes: int = 64, width: int = 16) -> Graph:
    build = Network(samples=samples, size=8)
    made = build.unit("stem", "input", width)
    made = build.convolution("block.conv", made, width)
    return build.head(build.add("elementwise", "block.relu", made, function="relu"), classes=classes)


def candidate(entries: dict[str, Any], mesh: dict[str, int], graph: Graph | None = None, **rest: Any) -> Candidate:
    found = [
        Entry(pattern=name, axes={"data": choice if isinstance(choice, Choice) else Choice(split=choice)})
        for name, choice in entries.items()
    ]
    found += [
        Entry(pattern=name, axes={"channel": Choice(split=split)}) for name, split in rest.pop("channel", {}).items()
    ]
    execution = Execution(recompute=("*",)) if rest.pop("recomputed", False) else Execution()
    plan = Plan(mesh=Mesh(mesh), entries=tuple(found), execution=execution)
    training = Training(engine=rest.pop("engine", "torch"), global_batch=32)
    return Candidate(resolved=resolve(graph or network(), plan), training=training, **rest)


def local(found: Candidate) -> ResolvedPlan:
    return at_micro_batch(found, CLUSTER).resolved


def linear(entries: Any) -> float:
    """What these collectives take at the alpha and beta of two ranks."""
    factors = {"all-reduce": 1, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "broadcast": 1}
    assert {entry.kind for entry in entries} <= set(factors)
    return float(sum(entry.number * ALPHA + entry.num_bytes * BETA for entry in entries))


@pytest.mark.parametrize("entries", HEADS, ids=str)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("engine", ["torch", "mindspore"])
def test_the_data_axis_waits_for_exchanges_and_for_the_sums_of_what_is_whole(
    entries: dict[str, Any], accumulation: int, engine: str
) -> None:
    found = candidate(entries, {"data": 2}, accumulation=accumulation, engine=engine)
    region = local(found).region
    assert region is not None
    told = channel_collectives(region, position=0, num_micro_batches=accumulation, samples=SAMPLES_TOLD[engine])
    split = set(region.parameters)
    own = local_parameters(found)
    assert {name for name, _ in own.reduced}.isdisjoint(split)
    assert {name for name, _ in own.trainable} >= {name for name in split if not name.endswith(("mean", "var"))}
    without = dataclasses.replace(found, resolved=dataclasses.replace(found.resolved, region=None))
    seconds, plain = predict(found, MODEL).seconds, predict(without, MODEL).seconds
    exchanged = accumulation * sum(cost.exchange_seconds for cost in predict(found, MODEL).operators)
    assert exchanged == pytest.approx(linear(told))
    if engine == "torch":
        sums = data_collectives(
            [size for _, size in own.reduced], own.buffer_bytes, num_ranks=2, bucket_bytes=25 * 2**20
        )
        norm = ALPHA + NORM_BYTES * BETA
        assert seconds.exposed["data"] == pytest.approx(linear(told) + linear(sums) + norm)
    assert seconds.exposed["data"] > plain.exposed["data"] - 8 * sum(size for _, size in own.trainable) * BETA
    assert seconds.total == pytest.approx(sum(seconds_parts(seconds)))


def seconds_parts(seconds: Any) -> list[float]:
    single = [
        seconds.forward,
        seconds.backward,
        seconds.recomputation,
        seconds.optimizer,
        seconds.overhead,
        seconds.data,
    ]
    return [*single, *seconds.exposed.values()]


def test_messages_of_an_update_are_those_that_ranks_are_counted_by() -> None:
    found = candidate({"fc": "in_channels"}, {"data": 2})
    region = local(found).region
    assert region is not None
    activations = linear(channel_collectives(region, position=0))
    assert linear(update_collectives(region, position=0)) == pytest.approx(activations + ALPHA + NORM_BYTES * BETA)


def shapes(found: Candidate, name: str) -> tuple[Any, Any, list[Any]]:
    (cost,) = [cost for cost in predict(found, MODEL).operators if cost.node == name]
    assert cost.signature is not None
    weights = [entry.shape for entry in cost.signature.parameters]
    return cost.signature.input_shapes[0], cost.signature.output_shapes[0], weights


def test_operators_are_priced_at_own_channels_of_all_samples() -> None:
    """Sixteen samples of each of two ranks."""
    assert shapes(candidate({"fc": "in_channels"}, {"data": 2}), "fc") == ((32, 8), (32, 64), [(64, 8), (64,)])
    assert shapes(candidate({"fc": "out_channels"}, {"data": 2}), "fc") == ((32, 16), (32, 32), [(32, 16), (32,)])
    both = candidate({"block.conv": "out_channels"}, {"data": 2})
    assert shapes(both, "block.conv")[:2] == ((32, 16, 8, 8), (32, 8, 8, 8))
    assert shapes(both, "block.relu")[1] == (32, 8, 8, 8)
    assert shapes(both, "fc")[0] == (16, 16)
    assert shapes(both, "stem.conv")[1] == (16, 16, 8, 8)


def test_a_split_head_holds_its_part_of_parameters_gradients_and_optimizer() -> None:
    graph = network(classes=8192)
    whole, split = (predict(candidate(entries, {"data": 4}, graph), MODEL) for entries in ({}, {"fc": "out_channels"}))
    head = 4 * 8192 * 17
    assert whole.memory.parameters - split.memory.parameters == head * 3 // 4
    assert whole.memory.optimizer - split.memory.optimizer == head * 3 // 4
    assert whole.memory.gradients - split.memory.gradients == head * 3 // 4
    assert whole.memory.total > split.memory.total
    # As much to compute, since each rank sees the samples of all, though fewer weights to read; less to sum.
    flops = [
        sum(cost.signature.cost.flops_forward for cost in found.operators if cost.signature) for found in (whole, split)
    ]
    assert flops[0] == flops[1]
    assert split.seconds.forward < whole.seconds.forward
    assert split.seconds.optimizer < whole.seconds.optimizer


def test_a_sharded_optimizer_shares_only_what_all_ranks_have() -> None:
    graph = network(classes=8192)
    split, sharded = (
        predict(candidate({"fc": "out_channels"}, {"data": 4}, graph, optimizer_sharding=sharding), MODEL)
        for sharding in (False, True)
    )
    rest = 4 * (graph.num_parameters - 8192 * 17)
    assert split.memory.optimizer - sharded.memory.optimizer == pytest.approx(rest * 3 / 4, abs=16)


def kept(found: Prediction) -> dict[str, int]:
    return {cost.node: cost.kept_bytes for cost in found.operators}


def test_what_is_kept_is_what_a_rank_takes() -> None:
    samples, image = 16, 16 * 64 * 4
    plain = kept(predict(candidate({}, {"data": 2}), MODEL))
    gathered = kept(predict(candidate({"block.conv": "out_channels"}, {"data": 2}), MODEL))
    holding = Choice(split="out_channels", keep_input=True)
    whole = kept(predict(candidate({"block.conv": holding}, {"data": 2}), MODEL))
    # The ReLU before keeps its output, own samples, which a convolution that gathers again needs no more than that.
    assert plain["block.conv"] == gathered["block.conv"] == 0
    assert whole["block.conv"] == 2 * samples * image
    taken = kept(predict(candidate({"block.conv": Choice(split="in_channels", output="samples")}, {"data": 2}), MODEL))
    assert taken["block.conv"] == 2 * samples * image // 2


def test_uneven_parts_are_judged_by_the_rank_that_has_most() -> None:
    graph = network(classes=10)
    found = predict(candidate({"fc": "out_channels"}, {"data": 4}, graph), MODEL)
    by_rank = [
        sum(size for _, size in local_parameters(seen).trainable)
        for place in range(4)
        for base in [candidate({"fc": "out_channels"}, {"data": 4}, graph)]
        for seen in [dataclasses.replace(base, resolved=dataclasses.replace(base.resolved, data_position=place))]
    ]
    assert by_rank[0] == by_rank[1] > by_rank[2] == by_rank[3]
    buffers = 2 * 4 * 2 * 16
    assert found.memory.parameters == by_rank[0] + buffers


def test_the_rank_that_has_most_need_not_be_the_first() -> None:
    parts = ((0, 1), (2, 3), (4, 5, 6), (7, 8, 9))
    entries = {"fc": Choice(split="out_channels", partition=parts)}
    of_most = candidate({"fc": "out_channels"}, {"data": 4}, network(classes=10))
    found = candidate(entries, {"data": 4}, network(classes=10))
    assert predict(found, MODEL).memory.parameters == predict(of_most, MODEL).memory.parameters


def test_both_axes_may_split_layers_of_one_network() -> None:
    mesh, channel = {"data": 2, "channel": 2}, {"stem.conv": "out_channels", "block.conv": "in_channels"}
    found = candidate({"fc": "in_channels"}, mesh, channel=channel)
    one, other = predict(found, MODEL), predict(candidate({}, mesh, channel=channel), MODEL)
    assert one.seconds.exposed["channel"] > 0
    assert one.memory.parameters < other.memory.parameters
    assert shapes(found, "stem.conv")[1] == (16, 8, 8, 8)
    assert shapes(found, "fc")[0] == (32, 8)
    again = candidate({"fc": "in_channels"}, mesh, channel=channel, recomputed=True)
    assert predict(again, MODEL).seconds.recomputation >= 0


def test_what_is_split_is_seen_on_both_axes() -> None:
    resolved = local(candidate({"block.conv": "out_channels"}, {"data": 2}))
    assert resolved.rank_shape(Edge("block.conv"), 0) == (32, 8, 8, 8)
    assert resolved.local_shape(Edge("block.conv"), 0) == (16, 16, 8, 8)
    assert resolved.rank_shape(Edge("stem.relu"), 0) == (16, 16, 8, 8)

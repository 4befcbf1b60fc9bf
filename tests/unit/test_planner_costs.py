"""Curves, links and messages: what the cost model is made of."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import candidate_of, cluster_of, plain_network, residual_network, resolved_by_rule

from convmesh.engines.mindspore import partition
from convmesh.errors import ConfigError
from convmesh.graph.graph import BUFFERS
from convmesh.mesh import Mesh
from convmesh.plan.buckets import fill_buckets, pack_buckets
from convmesh.plan.collectives import channel_collectives, data_collectives, operator_collectives, update_collectives
from convmesh.planner.cluster import Cluster, Curve, Link, Measured, Point
from convmesh.planner.curves import Curves, Interpolation
from convmesh.planner.links import CollectiveSeconds, GroupShape, group_shape
from convmesh.planner.messages import Message, local_parameters, update_messages
from convmesh.planner.prediction import Training
from convmesh.planner.seconds import CostModel, reduction_seconds
from convmesh.planner.signature import signatures

POINTS = st.lists(
    st.tuples(st.floats(1, 1e12), st.floats(1e-7, 1e2)), min_size=1, max_size=6, unique_by=lambda point: point[0]
)
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")


@given(POINTS, st.floats(0, 1e13), st.floats(0, 1e13))
def test_a_larger_size_never_takes_less(points: list[tuple[float, float]], one: float, other: float) -> None:
    curve = Interpolation(points)
    less, more = sorted((one, other))
    assert 0 <= curve.seconds(less) <= curve.seconds(more) * (1 + 1e-9)


@given(POINTS, st.floats(0.01, 100), st.floats(1, 1e13))
def test_a_device_twice_as_fast_takes_half(points: list[tuple[float, float]], factor: float, size: float) -> None:
    slower = Interpolation((own, seconds * factor) for own, seconds in points)
    assert slower.seconds(size) == pytest.approx(Interpolation(points).seconds(size) * factor)


def test_curves_pass_through_their_points_and_keep_power_laws() -> None:
    curve = Interpolation([(1e6, 1e-3), (1e8, 1e-1), (1e9, 2.0)])
    assert curve.seconds(1e8) == pytest.approx(0.1)
    assert curve.seconds(1e7) == pytest.approx(1e-2)
    assert curve.seconds(1e10) == pytest.approx(20)
    assert curve.seconds(1e4) == pytest.approx(1e-5)
    # Where the smallest two points take equally long, a still smaller one does so too.
    assert Interpolation([(10, 1e-3), (100, 1e-3)]).seconds(1) == pytest.approx(1e-3)
    assert curve.seconds(0) == 0


def test_classes_without_a_curve_take_that_of_the_nearest() -> None:
    half = Curve(operator="pointwise", dtype="float16", points=(Point(flops=1e9, seconds=1e-4),))
    cluster = cluster_of()
    curves = Curves(dataclasses.replace(cluster, compute=(*cluster.compute, half)))
    for operator, dtype, expected in (
        ("depthwise", "float32", ("convolution", "float32")),
        ("dense", "float16", ("pointwise", "float16")),
        ("convolution", "float16", ("convolution", "float32")),
        ("norm", "float32", ("copy", "float32")),
    ):
        found = curves.find(operator, dtype, "backward")  # type: ignore[arg-type]
        assert found is not None
        assert (found.operator, found.dtype) == expected
    assert curves.find("sgd", "float32", "forward") is None
    # 1 GFLOP takes 1 ms, 1 GB takes 10 ms: the slower of both counts.
    assert curves.seconds("convolution", "float32", "forward", flops=1e9, num_bytes=1e6) == pytest.approx(1e-3)
    assert curves.seconds("convolution", "float32", "forward", flops=1e9, num_bytes=1e9) == pytest.approx(1e-2)


def test_what_was_measured_wins_over_curves() -> None:
    resolved = resolved_by_rule(plain_network(), data=1)
    conv = next(signature for signature in signatures(resolved) if signature.kind == "convolution")
    cluster = cluster_of()
    exact = Measured(signature=conv.text, forward_seconds=7.0, backward_seconds=9.0)
    model = CostModel(dataclasses.replace(cluster, measured=(exact,)))
    assert (model.work(conv).forward_seconds, model.work(conv).backward_seconds) == (7.0, 9.0)
    assert model.work(conv).origin == "measured"
    assert "measured at exactly" in model.explain(conv)
    assert "made up for tests" in CostModel(cluster).explain(conv)
    half = dataclasses.replace(conv, dtype="float16")
    assert model.work(half).origin == "curve"


@given(
    st.dictionaries(st.sampled_from(["data", "channel", "model"]), st.integers(1, 4), min_size=1),
    st.integers(1, 8),
)
def test_groups_are_where_their_ranks_are(sizes: dict[str, int], devices_per_node: int) -> None:
    mesh = Mesh(sizes)
    for axis in sizes:
        groups = mesh.groups(axis)
        shape = group_shape(mesh, axis, devices_per_node=devices_per_node)
        nodes = [{rank // devices_per_node for rank in group} for group in groups]
        assert shape.num_ranks == mesh.size(axis)
        assert shape.num_nodes == max(map(len, nodes))
        assert shape.groups_per_node == sum(0 in found for found in nodes)


@given(st.sampled_from(KINDS), st.integers(2, 64), st.integers(1, 8), st.floats(0, 1e9), st.floats(1, 100))
def test_faster_links_never_take_longer(
    kind: str, num_ranks: int, num_nodes: int, num_bytes: float, factor: float
) -> None:
    group = GroupShape(num_ranks=max(num_ranks, num_nodes), num_nodes=num_nodes)
    cluster = cluster_of(nodes=8)

    def faster(links: tuple[Link, ...]) -> tuple[Link, ...]:
        return tuple(dataclasses.replace(entry, seconds_per_byte=entry.seconds_per_byte / factor) for entry in links)

    links = cluster.links
    quick = dataclasses.replace(links, inside=faster(links.inside), between=faster(links.between or ()))
    slow, fast = (CollectiveSeconds(entry) for entry in (cluster, dataclasses.replace(cluster, links=quick)))
    assert fast.seconds(kind, num_bytes, group) <= slow.seconds(kind, num_bytes, group)
    assert slow.seconds(kind, num_bytes, group) <= slow.seconds(kind, num_bytes + 1e6, group)


def test_collectives_of_other_sizes_follow_the_ring() -> None:
    model = CollectiveSeconds(cluster_of(nodes=4))
    beta = 1e-10  # Of an all-reduce of two ranks, which sends each byte once.
    for num_ranks in (2, 4, 8):
        expected = 1e-5 * (num_ranks - 1) + 1e9 * beta * 2 * (num_ranks - 1) / num_ranks
        assert model.seconds("all-reduce", 1e9, GroupShape(num_ranks=num_ranks)) == pytest.approx(expected)
    assert model.seconds("all-reduce", 1e9, GroupShape(num_ranks=1)) == 0
    # Four nodes, one adapter each: eight groups at once take eight times as long as one.
    one, eight = (GroupShape(num_ranks=4, num_nodes=4, groups_per_node=groups) for groups in (1, 8))
    alpha = 1e-5 * math.log2(4)
    small = model.seconds("all-reduce", 1e9, one) - alpha
    assert model.seconds("all-reduce", 1e9, eight) - alpha == pytest.approx(8 * small)
    links = dataclasses.replace(cluster_of().links, between=None)
    lonely = CollectiveSeconds(dataclasses.replace(cluster_of(), links=links))
    with pytest.raises(ConfigError, match="links between nodes"):
        lonely.seconds("all-reduce", 1, one)


def test_measured_sizes_and_ways_are_taken_as_they_are() -> None:
    def link(num_ranks: int, alpha: float, **rest: object) -> dict[str, object]:
        return {"kind": "all-reduce", "num_ranks": num_ranks, "alpha_seconds": alpha, "seconds_per_byte": 0, **rest}

    inside = [link(2, 1.0), link(4, 9.0), link(2, 5.0, num_groups=2), link(2, 0.25, way="shared_memory")]
    model = CollectiveSeconds(cluster_of(links={"inside": inside}))
    assert model.seconds("all-reduce", 0, GroupShape(num_ranks=2)) == 1.0
    assert model.seconds("all-reduce", 0, GroupShape(num_ranks=4)) == 9.0
    assert model.seconds("all-reduce", 0, GroupShape(num_ranks=2, groups_per_node=2)) == 5.0
    assert model.seconds("all-reduce", 0, GroupShape(num_ranks=2), way="shared_memory") == 0.25
    assert 1.0 < model.seconds("all-reduce", 0, GroupShape(num_ranks=3)) < 9.0


def test_activations_of_pytorch_are_summed_in_shared_memory_and_gathered_as_they_were_measured() -> None:
    def link(kind: str, alpha: float, way: str) -> dict[str, object]:
        return {"kind": kind, "num_ranks": 2, "alpha_seconds": alpha, "seconds_per_byte": 0, "way": way}

    inside = [link("all-reduce", 1.0, "collective"), link("all-reduce", 0.25, "shared_memory")]
    links = {"inside": [*inside, link("all-gather", 0.5, "collective")]}
    pair = GroupShape(num_ranks=2)
    for engine, summed in (("torch", 0.25), ("mindspore", 1.0)):
        model = CostModel(cluster_of(links=links, engine=engine))
        assert model.collectives.seconds("all-reduce", 0, pair) == summed
        assert model.collectives.seconds("all-gather", 0, pair) == 0.5
        assert model.collectives.seconds("all-reduce", 0, pair, way="collective") == 1.0
    # Gradients stay with the process group; the norm that ranks agree on is told where activations are summed.
    candidate = candidate_of(plain_network(), axes={"data": 2, "channel": 2})
    cluster = cluster_of(links=links, engine="torch")
    messages = update_messages(candidate, cluster, local_parameters(candidate))
    ways = {(message.purpose, message.way) for message in messages}
    assert ways >= {("gradients", "collective"), ("norm", "shared_memory")}


SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(SIZES, st.integers(1, 120))
def test_buckets_hold_neighbours_and_are_closed_by_their_rules(sizes: list[int], bucket_bytes: int) -> None:
    for rule in (fill_buckets, pack_buckets):
        buckets = rule(sizes, bucket_bytes)
        assert buckets[0] == 0
        assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise(buckets))
        members = [[s for s, b in zip(sizes, buckets, strict=True) if b == n] for n in range(buckets[-1] + 1)]
        if rule is fill_buckets:
            assert all(sum(group) >= bucket_bytes > sum(group[:-1]) for group in members[:-1])
        else:
            assert all(sum(group) <= bucket_bytes or len(group) == 1 for group in members)
            pairs = itertools.pairwise(members)
            assert all(sum(later) + earlier[-1] > bucket_bytes for earlier, later in pairs)


def totals(messages: list[Message]) -> dict[str, tuple[int, int]]:
    kinds = sorted({message.kind for message in messages})
    found = {kind: [message.num_bytes for message in messages if message.kind == kind] for kind in kinds}
    return {kind: (len(sizes), sum(sizes)) for kind, sizes in found.items()}


@pytest.mark.parametrize("engine", ["torch", "mindspore"])
@pytest.mark.parametrize("sharding", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 3, "channel": 2}])
def test_messages_are_those_of_the_closed_forms(engine: str, sharding: bool, kind: str, axes: dict[str, int]) -> None:
    device = {"name": "d", "memory_bytes": "1GiB", "kind": kind}
    cluster = cluster_of(device=device, devices_per_node=8)
    training = Training(engine=engine, global_batch=12)  # type: ignore[arg-type]
    candidate = candidate_of(
        residual_network(), training=training, axes=axes, optimizer_sharding=sharding, bucket_bytes=4000
    )
    own = local_parameters(candidate)
    found = update_messages(candidate, cluster, own)
    sizes = [size for _, size in own.trainable]
    if engine == "torch":
        part = -(-sum(sizes) // 4 // axes["data"]) * 4 if sharding else 0
        expected = data_collectives(
            sizes,
            own.buffer_bytes,
            num_ranks=axes["data"],
            bucket_bytes=4000,
            shared_bytes=part,
            broadcasts=kind == "cpu",
        )
    else:
        expected = partition.data_collectives(
            sizes,
            own.buffer_bytes,
            num_ranks=axes["data"],
            bucket_bytes=4000,
            shares=sharding,
            in_shared_memory=kind == "cpu" and "channel" not in axes,
        )
    data = totals([message for message in found if message.axis == "data"])
    assert data == {entry.kind: (entry.number, entry.num_bytes) for entry in expected}
    carried = [name for message in found if message.carries for name in message.carries]
    assert sorted(carried) == sorted(name for name, _ in own.trainable)
    if "channel" in axes:
        norm_bytes = 16 if engine == "torch" else partition.NORM_BYTES
        whole = update_collectives(candidate.resolved, position=0, norm_bytes=norm_bytes, deterministic=kind == "cpu")
        activations = channel_collectives(candidate.resolved, position=0)
        rest = {entry.kind: entry.number for entry in whole}
        for entry in activations:
            rest[entry.kind] -= entry.number
        channel = totals([message for message in found if message.axis == "channel"])
        assert {kind: number for kind, (number, _) in channel.items()} == {k: n for k, n in rest.items() if n}


def test_operators_communicate_what_the_closed_form_says() -> None:
    resolved = resolved_by_rule(residual_network(width=18), channel=4)
    for position in range(4):
        per_operator = operator_collectives(resolved, position=position)
        found: dict[str, list[int]] = {}
        for entries in per_operator.values():
            for kind, num_bytes in entries:
                found.setdefault(kind, []).append(num_bytes)
        expected = channel_collectives(resolved, position=position)
        assert {entry.kind: (entry.number, entry.num_bytes) for entry in expected} == {
            kind: (len(sizes), sum(sizes)) for kind, sizes in found.items()
        }


def test_a_rank_holds_its_own_parameters() -> None:
    graph = residual_network(width=18)
    for position in range(4):
        candidate = candidate_of(graph, axes={"channel": 4})
        own = local_parameters(candidate, position=position)
        shards = candidate.resolved.parameters
        trained = [entry for entry in graph.parameters if entry.role not in BUFFERS]
        assert [name for name, _ in own.trainable] == [entry.name for entry in trained]
        for (_, size), entry in zip(own.trainable, trained, strict=True):
            share = len(shards[entry.name].lists[position]) if entry.name in shards else None
            whole = 4 * entry.num_elements
            assert size == (whole if share is None else whole * share // entry.shape[shards[entry.name].dim])


def overlapped(cluster: Cluster, engine: str = "torch") -> tuple[float, float]:
    """Exposed and hidden seconds of two buckets of 1 s each, ready at 2 s and 4 s of a backward of 5 s."""
    training = Training(engine=engine, global_batch=8)  # type: ignore[arg-type]
    candidate = candidate_of(plain_network(), training=training)
    second = int(1e10)
    messages = [
        Message(axis="data", kind="all-reduce", num_bytes=second, purpose="gradients", carries=("late",)),
        Message(axis="data", kind="all-reduce", num_bytes=second, purpose="gradients", carries=("early",)),
    ]
    backward = {"first": 1.0, "a": 2.0, "b": 2.0}
    found = reduction_seconds(
        CostModel(cluster), candidate, messages, backward=backward, made_by={"late": "b", "early": "a"}
    )
    return found.exposed, found.hidden


def test_gradients_hide_behind_the_backward_as_far_as_they_can() -> None:
    # Both fit before the end; the cluster says which share of that really costs nothing.
    for overlap in (0.0, 0.5, 1.0):
        exposed, hidden = overlapped(cluster_of(overlap=overlap))
        assert hidden == pytest.approx(2 * overlap, rel=1e-4)
        assert exposed + hidden == pytest.approx(2, rel=1e-4)
    assert overlapped(cluster_of(overlap=1.0), engine="mindspore")[1] == 0

"""Plans: what follows from them, how they are read and written, and what is told when they are wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.graph_builder import Builder

from convmesh.errors import ConfigError, ConvMeshError, MistakeList
from convmesh.graph import Edge, Graph, Node, Parameter
from convmesh.mesh import Mesh
from convmesh.plan import CHANNEL, Choice, Entry, Foretold, NetworkFacts, Plan, resolve
from convmesh.plan.by_rule import plan_by_rule
from convmesh.plan.collectives import channel_collectives, count_buckets, data_collectives, update_collectives
from convmesh.plan.load import dump_plan, load_plan
from convmesh.plan.network import fingerprint, network_facts, plan_mismatches
from convmesh.plan.placement import ParameterShard, Replicate, Shard

TWO = Mesh({"data": 1, CHANNEL: 2})


def small(samples: int = 2) -> Graph:
    build = Builder(samples=samples)
    x = build.relu("relu1", build.convolution("conv1", "input", 8))
    x = build.relu("relu2", build.convolution("conv2", x, 6))
    return build.graph(build.dense_head(x))


def plan_of(entries: dict[str, Any], mesh: Mesh = TWO, **rest: Any) -> Plan:
    made = {name: choice if isinstance(choice, Choice) else Choice(split=choice) for name, choice in entries.items()}
    return Plan(
        mesh=mesh, entries=tuple(Entry(pattern=name, axes={CHANNEL: choice}) for name, choice in made.items()), **rest
    )


def errors_of(graph: Graph, plan: Plan) -> list[str]:
    with pytest.raises(ConvMeshError) as caught:
        resolve(graph, plan)
    found = caught.value.errors if isinstance(caught.value, MistakeList) else (caught.value,)
    return [str(error) for error in found]


def test_an_operator_that_is_not_named_stays_whole_and_others_follow() -> None:
    found = resolve(small(), plan_of({"conv1": "out_channels"}))
    halves = Shard(((0, 1, 2, 3), (4, 5, 6, 7)))
    assert found.placement(Edge("conv1")) == found.placement(Edge("relu1")) == halves
    assert found.operators["conv2"].before.kind == "gather"
    assert found.placement(Edge("conv2")) == found.placement(Edge("fc")) == Replicate()
    assert found.parameters == {name: ParameterShard(0, halves.lists) for name in ("conv1.weight", "conv1.bias")}
    assert found.local_shape(Edge("relu1"), 1) == (2, 4, 8, 8)


def test_each_split_of_a_convolution_makes_its_changes() -> None:
    def borders(choice: Any) -> tuple[str, str, str]:
        entry = resolve(small(), plan_of({"conv1": "out_channels", "conv2": choice})).operators["conv2"]
        return entry.before.kind, entry.after.kind, str(entry.output)

    assert borders("out_channels") == ("gather_sum", "none", "sharded 3+3")
    assert borders("in_channels") == ("none", "reduce_scatter", "sharded 3+3")
    assert borders(Choice(split="in_channels", output="whole")) == ("none", "all_reduce", "whole")
    assert borders("whole") == ("gather", "none", "whole")
    uneven = Choice(split="in_channels", partition=(1, 5))
    assert borders(uneven) == ("none", "reduce_scatter", "sharded 1+5")


def test_later_entries_win_and_patterns_mean_what_can_be_split_so() -> None:
    found = resolve(small(), plan_of({"conv*": "out_channels", "*": "in_channels", "conv1": "whole"}))
    splits = {name: entry.split for name, entry in found.operators.items()}
    assert (splits["conv1"], splits["conv2"], splits["fc"]) == ("whole", "in_channels", "in_channels")
    assert splits["relu2"] == "channels"
    assert found.operators["fc"].after.kind == "all_reduce"  # The network's output is made whole.


def test_inputs_that_disagree_are_brought_together_at_a_module_before_them() -> None:
    build = Builder()
    first = build.convolution("conv1", "input", 8)
    second = build.relu("act", build.convolution("conv2", "input", 8))
    found = resolve(
        build.graph(build.dense_head(build.sum("add", (first, second)))), plan_of({"conv1": "out_channels"})
    )
    assert found.operators["act"].after.kind == "slice"
    assert found.operators["add"].split == "channels"
    # Where nothing stands between, the whole layer cuts its own output.
    build = Builder()
    first, second = build.convolution("conv1", "input", 8), build.convolution("conv2", "input", 8)
    found = resolve(
        build.graph(build.dense_head(build.sum("add", (first, second)))), plan_of({"conv1": "out_channels"})
    )
    assert found.operators["conv2"].after.kind == "slice"


def test_a_concatenation_of_parts_is_a_partition_of_its_own() -> None:
    build = Builder()
    first, second = build.convolution("conv1", "input", 4), build.convolution("conv2", "input", 6)
    joined = build.add("cat", "concat", (first, second), (2, 10, 8, 8), module="", attributes={"dim": 1})
    build.convolution("conv3", joined, 4)
    found = resolve(build.graph("conv3"), plan_of({"conv?": "out_channels", "conv3": "in_channels"}))
    assert found.placement(Edge("cat")) == Shard(((0, 1, 4, 5, 6), (2, 3, 7, 8, 9)))
    assert found.parameters["conv3.weight"] == ParameterShard(1, ((0, 1, 4, 5, 6), (2, 3, 7, 8, 9)))


def test_grouped_convolutions_are_split_by_whole_groups() -> None:
    build = Builder()
    first = build.convolution("conv1", "input", 12)
    build.convolution("grouped", first, 6, groups=3)
    graph = build.graph(build.dense_head("grouped"))
    torn = resolve(graph, plan_of({"conv1": "out_channels", "grouped": "groups"}))
    assert torn.operators["grouped"].before.kind == "permute"
    assert torn.placement(Edge("grouped")) == Shard(((0, 1, 2, 3), (4, 5)))
    fitting = Choice(split="out_channels", partition=(8, 4))
    assert resolve(graph, plan_of({"conv1": fitting, "grouped": "groups"})).operators["grouped"].before.kind == "none"
    (error,) = errors_of(graph, plan_of({"grouped": "groups"}, Mesh({CHANNEL: 4})))
    assert "grouped has too few channels to be split by 'groups' (got 3 for 4 ranks, expected at least 4)" in error
    assert "use 3 ranks" in error


def test_all_mistakes_are_told_at_once_each_with_a_way_out() -> None:
    errors = errors_of(
        small(),
        plan_of(
            {
                "conv1": "in_channels",
                "convv2": "whole",
                "conv2": "groups",
                "relu1": "out_channels",
                "flat*": "in_channels",
                "fc": Choice(split="out_channels", partition=((0, 1, 1), (2, 3))),
                "relu2": Choice(split="channels", partition=(2, 2, 2)),
            },
            Mesh({"data": 2, CHANNEL: 4}),
        ),
    )
    assert len(errors) == 7
    assert any("'convv2'" in text and "Did you mean conv2" in text for text in errors)
    assert any("no operator of 'flat*' can be split by 'in_channels'" in text for text in errors)
    assert any("conv1 has too few channels" in text and "got 3 for 4 ranks" in text for text in errors)
    assert any("'conv1: {channel: out_channels}'" in text for text in errors)
    assert any("conv2 can't be split by 'groups': it has one group" in text for text in errors)
    assert any("relu1 can't be split by 'out_channels': it has no weight" in text for text in errors)
    assert any("the partition of fc is not for this mesh (got 2 parts, expected 4)" in text for text in errors)
    assert any("the partition of relu2" in text for text in errors)


def test_wrong_partitions_are_told() -> None:
    def told(partition: Any) -> str:
        (error,) = errors_of(small(), plan_of({"conv2": Choice(split="out_channels", partition=partition)}))
        return error

    assert "does not hold every channel once (got 5 numbers" in told((2, 3))
    assert "does not hold every channel once (got 6 numbers, 5 of them different" in told(((0, 1, 2), (2, 3, 4)))
    assert "leaves a rank without channels" in told((6, 0))
    assert "leaves a rank without channels" in told(((0, 1, 2, 3, 4, 5), ()))


def test_another_axis_is_refused() -> None:
    plan = Plan(mesh=TWO, entries=(Entry(pattern="conv1", axes={"height": Choice(split="whole")}),))
    (error,) = errors_of(small(), plan)
    assert "along the axis 'height'" in error


def test_a_parameter_with_channels_is_split_with_them_and_one_without_is_summed() -> None:
    build = Builder()
    x = build.convolution("conv1", "input", 8)
    for name, shape in (("gamma", (8, 1, 1)), ("scale", ())):
        parameter = Parameter(name, shape, role="value")
        build.nodes.append(Node(name=name, kind="parameter", output_shapes=(shape,), parameters=(parameter,)))
    x = build.add("times", "multiply", (x, "gamma"), (2, 8, 8, 8), module="")
    x = build.add("scaled", "multiply", (x, "scale"), (2, 8, 8, 8), module="")
    found = resolve(build.graph(build.dense_head(x)), plan_of({"conv1": "out_channels", "fc": "in_channels"}))
    assert found.parameters["gamma"] == ParameterShard(0, ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert found.operators["scaled"].summed == ("scale",)
    told = {entry.kind: entry.num_bytes for entry in channel_collectives(found, position=0)}
    assert told["all-reduce"] == 4 + 2 * 10 * 4  # The scale's gradient, and the scores.


def test_the_rule_takes_what_moves_fewer_bytes() -> None:
    build = Builder()
    x = build.convolution("stem", "input", 16)
    x = build.convolution("narrow", x, 4)  # 2 x 4 channels out, against 3 x 16 in.
    x = build.convolution("wide", x, 32)  # 3 x 4 in, against 2 x 32 out.
    graph = build.graph(build.dense_head(x))
    plan = plan_by_rule(graph, TWO, min_multiply_adds=0)
    splits = {entry.pattern: entry.axes[CHANNEL] for entry in plan.entries}
    assert splits == {
        "stem": Choice(split="out_channels"),
        "narrow": Choice(split="in_channels"),
        "wide": Choice(split="out_channels"),
        "fc": Choice(split="in_channels", output="whole"),
    }
    found = resolve(graph, plan)
    assert found.operators["stem"].before.kind == "copy"
    assert [entry.number for entry in channel_collectives(found, position=0)] == [3, 1, 2]


def test_small_layers_and_few_channels_stay_whole() -> None:
    plan = plan_by_rule(small(), TWO)
    assert {choice.split for entry in plan.entries for choice in entry.axes.values()} == {"whole"}
    many = plan_by_rule(small(), Mesh({CHANNEL: 8}), min_multiply_adds=0)
    assert {entry.pattern: entry.axes[CHANNEL].split for entry in many.entries}["conv2"] == "whole"
    resolve(small(), many)


def test_the_closed_form_counts_what_each_change_sends() -> None:
    found = resolve(
        small(),
        plan_of(
            {
                "conv1": "out_channels",
                "conv2": Choice(split="out_channels", partition=(4, 2)),
                "fc": Choice(split="in_channels", output="whole"),
            }
        ),
    )
    pixels, samples = 64 * 4, 2
    told = {entry.kind: (entry.number, entry.num_bytes) for entry in update_collectives(found, position=1)}
    assert told == {
        "all-gather": (2, 2 * samples * 4 * pixels),
        "reduce-scatter": (1, samples * 8 * pixels),
        "all-reduce": (2, samples * 10 * 4 + 16),
    }
    twice = channel_collectives(found, position=1, num_micro_batches=2, element_bytes=2)
    assert twice[0] == dataclasses.replace(twice[0], number=4, num_bytes=2 * samples * 4 * pixels)
    kept = resolve(small(), plan_of({"conv1": "out_channels", "conv2": Choice(split="out_channels", keep_input=True)}))
    assert [entry.number for entry in channel_collectives(kept, position=0) if entry.kind == "all-gather"] == [2]


def test_replicas_that_may_differ_in_bits_are_made_equal() -> None:
    uneven = {"conv1": Choice(split="out_channels", partition=(5, 3)), "conv2": "in_channels"}
    two, four = Mesh({"data": 2, CHANNEL: 2}), Mesh({"data": 4, CHANNEL: 2})
    assert not resolve(small(), plan_of(uneven, two)).replicas_may_differ(deterministic=True)
    found = resolve(small(), plan_of(uneven, four))
    assert found.replicas_may_differ(deterministic=True)
    assert not resolve(small(), plan_of({"conv1": "out_channels"}, four)).replicas_may_differ(deterministic=True)
    (broadcast,) = [entry for entry in update_collectives(found, position=0) if entry.kind == "broadcast"]
    assert broadcast.num_bytes == 4 * found.num_whole_trainable == 4 * (10 * 6 + 10)


def test_the_data_axis_sends_gradients_buffers_and_parameters() -> None:
    assert data_collectives([100], 0, num_ranks=1, bucket_bytes=10) == ()
    all_reduce, broadcast = data_collectives(
        [60, 60, 60], 8, num_ranks=4, bucket_bytes=100, shared_bytes=48, broadcasts=True
    )
    assert (all_reduce.number, all_reduce.num_bytes) == (2 + 1 + 1, 180 + 12 + 8)
    assert (broadcast.number, broadcast.num_bytes) == (4, 192)
    assert count_buckets([60, 60, 60], 100) == 2


def test_a_plan_is_written_and_read_back(tmp_path: Path) -> None:
    plan = plan_of(
        {
            "conv1": "out_channels",
            "layer4.*": Choice(split="in_channels", partition=((0, 2), (1, 3)), output="whole"),
            "conv2": Choice(split="out_channels", partition=(3, 2), keep_input=True),
        },
        Mesh({"data": 2, CHANNEL: 2}),
        opaque="gather",
        network=NetworkFacts(fingerprint="00ff", input_shape=(3, 8, 8), operators={"conv1": "convolution"}),
    )
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(plan))
    assert load_plan(path) == plan
    assert "  layer4.*: {channel: {split: in_channels, partition: [[0, 2], [1, 3]], output: whole}}" in path.read_text()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("schema_version: 2\nmesh: {channel: 2}", "another version of ConvMesh (got schema_version 2, expected 1)"),
        ("schema_version: 1\nmesh: {channel: 2}\nlayers: {}", "the setting 'layers' of the plan"),
        ("schema_version: 1\nmesh: {channel: 2}\noperators: {a: {channel: out}}", "'out_channels', 'in_channels'"),
        (
            "schema_version: 1\nmesh: {channel: 2}\noperators: {a: {channel: {split: whole, partition: even}}}",
            "a number of channels per rank",
        ),
        ("schema_version: 1\nmesh: {channel: 2}\noperators: {a: {channel: {split: whole, keep: 1}}}", "is unknown"),
        ("schema_version: 1\nmesh: {channel: 2}\nmesh: {data: 2}", "stands twice"),
        ("- 1", "holds no settings"),
    ],
)
def test_a_wrong_plan_file_is_told(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_plan(path)
    assert told in str(caught.value)


def test_a_plan_for_another_network_or_mesh_says_what_differs() -> None:
    graph = small()
    plan = dataclasses.replace(plan_by_rule(graph, TWO), mesh=TWO)
    assert plan_mismatches(plan, small(samples=7), mesh=TWO) == []
    assert plan_mismatches(plan, graph, mesh=Mesh({"data": 4, CHANNEL: 2})) == []
    (error,) = plan_mismatches(plan, graph, mesh=Mesh({"data": 1, CHANNEL: 4}))
    assert "(got channel=4, expected channel=2)" in str(error)
    build = Builder()
    x = build.convolution("conv1", "input", 12)
    x = build.relu("relu2", build.convolution("conv9", x, 6))
    (error,) = plan_mismatches(plan, build.graph(build.dense_head(x)), mesh=TWO)
    for text in ("it lacks conv2", "it has conv9 besides", "conv1 is convolution 3 -> 12, 3x3, not convolution 3 -> 8"):
        assert text in str(error)
    build = Builder()
    x = build.convolution("conv1", "input", 8)
    x = build.relu("relu2", build.convolution("conv2", x, 6))
    (error,) = plan_mismatches(plan, build.graph(build.dense_head(x)), mesh=TWO)
    assert "the same layers with weights, but other operators between them" in str(error)


def test_a_plan_carries_what_was_foretold_of_it(tmp_path: Path) -> None:
    foretold = Foretold(
        cluster="two cores",
        global_batch=64,
        seconds=0.25,
        seconds_by_kind={"forward": 0.1, "backward": 0.15},
        memory_bytes=1000,
        memory_by_kind={"fixed": 400, "activations": 600},
        memory_limit_bytes=2000,
        reasons=("the fastest that fits", "data=2: 1.5 times the time"),
    )
    path = tmp_path / "plan.yaml"
    plan = plan_of({"conv1": "out_channels"}, foretold=foretold)
    path.write_text(dump_plan(plan))
    assert load_plan(path) == plan


def test_the_fingerprint_depends_on_what_is_computed_alone() -> None:
    assert fingerprint(small()) == fingerprint(small(samples=5))
    wider = Builder(channels=4)
    wider.convolution("conv1", "input", 8)
    narrow = Builder(channels=3)
    narrow.convolution("conv1", "input", 8)
    assert fingerprint(wider.graph("conv1")) != fingerprint(narrow.graph("conv1"))
    assert network_facts(small()).operators["conv1"] == "convolution 3 -> 8, 3x3"

"""Blocks of networks, what is kept and done again when they are recomputed, and how plans name them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_plan import TWO, Builder, plan_of, small

from convmesh.config import RunConfig, parse_config
from convmesh.config.execution import execution_of, with_execution
from convmesh.errors import ConfigError, MistakeList
from convmesh.graph import Edge, Graph, block, blocks, choose_blocks, kept_with, node_cost, recomputation_cost, repeated
from convmesh.mesh import Mesh
from convmesh.plan import CHANNEL, Choice, Entry, Execution, Plan, resolve
from convmesh.plan.activations import rank_activations
from convmesh.plan.load import dump_plan, load_plan

SAMPLES = 2
PLANE = SAMPLES * 8 * 8 * 4
"""Bytes of one channel of a tensor."""


def residual(build: Builder, name: str, source: str, *, last: bool = True) -> str:
    """Two convolutions with a shortcut."""
    width = build.shape(source)[1]
    x = build.convolution(f"{name}.conv1", source, width, module=f"{name}.conv1")
    x = build.relu(f"{name}.relu", x, module=f"{name}.relu")
    x = build.convolution(f"{name}.conv2", x, width, module=f"{name}.conv2")
    x = build.add(f"{name}.add", "add", (x, source), build.shape(x), module=name)
    return build.relu(f"{name}.relu@2", x, module=f"{name}.relu") if last else x


def residuals(*, last: bool = True) -> Graph:
    build = Builder(samples=SAMPLES)
    x = build.relu("relu", build.convolution("stem", "input", 4))
    x = residual(build, "layer1.0", x, last=last)
    x = residual(build, "layer1.1", x, last=last)
    return build.graph(build.dense_head(x))


def stages() -> Graph:
    build = Builder(samples=SAMPLES)
    x = "input"
    for number, kind in enumerate(("conv", "relu", "conv", "relu", "pool", "conv", "relu", "pool")):
        name = f"features.{number}"
        if kind == "conv":
            x = build.convolution(name, x, 4)
        elif kind == "relu":
            x = build.relu(name, x)
        else:
            n, c, h, w = build.shape(x)
            pool = {"kernel": (2, 2), "stride": (2, 2), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}
            x = build.add(name, "max_pool", x, (n, c, h // 2, w // 2), attributes={**pool, "ceil_mode": False})
    return build.graph(build.dense_head(x))


def test_residual_blocks_are_found_and_the_containers_around_them_can_be_named() -> None:
    graph = residuals()
    first, second = blocks(graph)
    assert (first.name, second.name) == ("layer1.0", "layer1.1")
    assert (first.input, first.output) == (Edge("relu"), Edge("layer1.0.relu@2"))
    assert first.nodes == tuple(f"layer1.0.{name}" for name in ("conv1", "relu", "conv2", "add", "relu@2"))
    stage = block(graph, "layer1")
    assert stage is not None
    assert stage.nodes == first.nodes + second.nodes
    assert block(graph, "layer1.0.conv1") is None  # A single operator.
    assert block(graph, "nowhere") is None


def test_children_called_in_a_row_are_joined_up_to_a_pooling() -> None:
    graph = stages()
    assert [(entry.name, entry.modules) for entry in blocks(graph)] == [
        ("features.0-4", ("features.0", "features.4")),
        ("features.5-7", ("features.5", "features.7")),
    ]
    assert all(entry.is_run for entry in blocks(graph))
    whole = block(graph, "features.0-7")
    assert whole is not None
    assert (whole.name, whole.is_run) == ("features", False)
    some = block(graph, "features.1-3")
    assert some is not None
    assert some.nodes == ("features.1", "features.2", "features.3")


def test_a_module_of_several_tensors_or_with_shared_parameters_is_no_block() -> None:
    build = Builder(samples=SAMPLES)
    x = build.convolution("stem", "input", 4)
    y = build.relu("relu", x)
    one = build.convolution("merge.conv", x, 4, module="merge.conv")
    two = build.relu("merge.relu", y, module="merge.relu")
    x = build.add("merge.add", "add", (one, two), build.shape(one), module="merge")
    for name in ("twice.conv", "twice.conv@2"):
        x = build.convolution(name, x, 4, module="twice.conv")
        parameters = [dataclasses.replace(entry, name="twice.conv.weight") for entry in build.nodes[-1].parameters[:1]]
        build.nodes[-1] = dataclasses.replace(build.nodes[-1], parameters=tuple(parameters))
        x = build.relu(name.replace("conv", "relu"), x, module="twice")
    graph = build.graph(build.dense_head(x))
    assert blocks(graph) == ()
    assert block(graph, "merge") is None
    assert block(graph, "twice") is None


def test_a_recomputed_block_keeps_its_input_alone() -> None:
    graph = residuals()
    before, after = kept_with(graph, ()), kept_with(graph, blocks(graph))
    features = 4 * SAMPLES * 4  # Of the dense layer.
    # Without: the image, what enters the four convolutions, and the last result.
    assert before.kept_bytes == (3 + 5 * 4) * PLANE + features
    # With: the image, and what enters the blocks, the first of which the ReLU keeps already.
    assert after.kept_bytes == (3 + 2 * 4) * PLANE + features
    assert after.kept["layer1.0.conv1"] == 0
    assert after.kept["layer1.1.conv1"] == 4 * PLANE
    for entry in blocks(graph):
        assert sum(after.again[name] for name in entry.nodes) == 2 * 4 * PLANE
    assert sum(after.again.values()) == 16 * PLANE
    assert sum(before.again.values()) == 0


@pytest.mark.parametrize("last", [True, False])
def test_what_only_the_output_needs_is_not_run_again(last: bool) -> None:
    graph = residuals(last=last)
    entry = block(graph, "layer1.0")
    assert entry is not None
    found = repeated(graph, entry)
    names = {name.removeprefix("layer1.0.") for name in found.run}
    assert names == ({"conv1", "relu", "conv2", "add", "relu@2"} if last else {"conv1", "relu"})
    assert "layer1.0.conv2" in found.taking
    cost = recomputation_cost(graph, (entry,))
    assert cost.flops_forward == sum(node_cost(graph, graph.node(name)).flops_forward for name in found.run)
    assert cost.flops_backward == 0


@given(st.sets(st.sampled_from(["layer1.0", "layer1.1"])))
def test_more_blocks_keep_less_and_compute_more(names: set[str]) -> None:
    graph = residuals()
    chosen = choose_blocks(graph, sorted(names))
    kept = kept_with(graph, chosen)
    whole = kept_with(graph, ())
    for more in blocks(graph):
        larger = choose_blocks(graph, sorted(names | {more.name}))
        assert kept_with(graph, larger).kept_bytes <= kept.kept_bytes
        assert recomputation_cost(graph, larger).flops_forward >= recomputation_cost(graph, chosen).flops_forward
    # What is kept and what is there again are together never less than without recomputation.
    assert kept.kept_bytes + sum(kept.again.values()) >= whole.kept_bytes


def test_names_and_patterns_are_told_when_they_mean_nothing() -> None:
    graph = residuals()
    assert [entry.name for entry in choose_blocks(graph, ["*"])] == ["layer1.0", "layer1.1"]
    assert [entry.name for entry in choose_blocks(graph, ["*.1", "layer1.0"])] == ["layer1.0", "layer1.1"]
    assert choose_blocks(small(), ["*"]) == ()
    with pytest.raises(MistakeList) as caught:
        choose_blocks(graph, ["layer1.2", "stem", "other.*", "layer1", "layer1.0"])
    told = [str(error) for error in caught.value.errors]
    assert len(told) == 4
    assert "'layer1.2' is no block" in told[0]
    assert "layer1.0" in told[0]
    assert "single operator" in told[1]
    assert "'layer1' and 'layer1.0' to recompute share operators" in told[3]


def test_a_rank_keeps_its_part() -> None:
    graph = residuals()
    names = ["layer1.0.conv1", "layer1.0.conv2", "layer1.1.conv1", "layer1.1.conv2", "stem"]
    split = dataclasses.replace(plan_of(dict.fromkeys(names, "out_channels")), execution=Execution(recompute=("*",)))
    whole, part = kept_with(graph, blocks(graph)), rank_activations(resolve(graph, split), position=1)
    assert part.kept["stem"] == whole.kept["stem"]  # The image is whole.
    assert 2 * part.kept["relu"] == whole.kept["relu"]
    assert {name: 2 * part.again[name] for name in part.again} == dict(whole.again)


def test_a_change_at_a_border_makes_memory_of_its_own() -> None:
    graph, conv1 = small(), Choice(split="out_channels", partition=(6, 2))
    plans: dict[str, dict[str, Choice]] = {
        "again": {"conv1": conv1, "conv2": Choice(split="out_channels")},
        "kept": {"conv1": conv1, "conv2": Choice(split="out_channels", keep_input=True)},
        "sliced": {"conv2": Choice(split="in_channels")},
    }
    kept = {name: rank_activations(resolve(graph, plan_of(plan))).kept["conv2"] for name, plan in plans.items()}
    # ReLU has kept its result already: a gathered one has all 8 channels, a slice of the whole half of them.
    assert kept == {"again": 0, "kept": 8 * PLANE, "sliced": 4 * PLANE}


def test_one_rank_keeps_what_the_network_keeps() -> None:
    graph = residuals()
    plan = Plan(mesh=Mesh({"data": 2}), execution=Execution(recompute=("layer1.1",)))
    resolved = resolve(graph, plan)
    assert [entry.name for entry in resolved.recomputed] == ["layer1.1"]
    assert rank_activations(resolved) == kept_with(graph, resolved.recomputed)
    entries = (Entry(pattern="*", axes={CHANNEL: Choice(split="out_channels")}),)
    assert rank_activations(resolve(graph, dataclasses.replace(plan, entries=entries))) == rank_activations(resolved)
    with pytest.raises(ConfigError, match="is no block"):
        resolve(graph, dataclasses.replace(plan, execution=Execution(recompute=("layer2",))))


@pytest.mark.parametrize(
    "execution",
    [
        Execution(),
        Execution(accumulation=4, optimizer_sharding=True, bucket_bytes=1000, recompute=("layer1.*", "layer2.0")),
        Execution(optimizer_sharding=False, recompute=()),
        Execution(recompute=("*",)),
    ],
)
def test_a_plan_is_read_back_with_its_execution(tmp_path: Path, execution: Execution) -> None:
    path = tmp_path / "plan.yaml"
    plan = Plan(mesh=TWO, execution=execution)
    path.write_text(dump_plan(plan))
    assert load_plan(path) == plan


def test_wrong_settings_of_a_plans_execution_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "schema_version: 1\nmesh: {data: 1}\n"
        "accumulation: 0\noptimizer_sharding: 3\nbucket_bytes: many\nrecompute: all\n"
    )
    with pytest.raises(MistakeList) as caught:
        load_plan(path)
    told = "\n".join(str(error) for error in caught.value.errors)
    assert len(caught.value.errors) == 4, told
    assert "expected none, blocks, or a list of names and patterns of blocks" in told


def run_with(**strategy: object) -> RunConfig:
    return parse_config({"model": {"name": "cnn-small"}, "data": {"source": "digits"}, "strategy": strategy})


def test_a_plan_goes_before_the_run_file() -> None:
    run = run_with(accumulation=2, recompute="blocks", optimizer_sharding=True)
    assert with_execution(run, Execution()) == run
    settled = with_execution(run, Execution(accumulation=4, optimizer_sharding=False, recompute=("layer1",)))
    assert settled.strategy.accumulation == 4
    assert settled.strategy.optimizer_sharding is False
    assert settled.strategy.bucket_bytes == run.strategy.bucket_bytes
    assert settled.strategy.recompute == ("layer1",)
    assert execution_of(settled).recompute == ("layer1",)
    assert execution_of(run).recompute == ("*",)
    assert execution_of(run_with()).recompute == ()

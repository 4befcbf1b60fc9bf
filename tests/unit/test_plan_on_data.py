"""Plans by which the data axis splits channels: what follows from them, what is refused, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.test_plan import Builder, errors_of, plan_of, small

from convmesh.config import RunConfig
from convmesh.config.schema import DataConfig, ModelConfig, StrategyConfig, TrainConfig
from convmesh.data.batching import Batching
from convmesh.data.samplers import make_sampler
from convmesh.engines.contract import Batch
from convmesh.engines.filling import filled
from convmesh.graph import Block, Edge, Graph, Parameter
from convmesh.mesh import Mesh
from convmesh.plan import Choice, Entry, Plan, resolve
from convmesh.plan.collectives import SamplesTold, channel_collectives, together, update_collectives
from convmesh.plan.entries import exchanged_in
from convmesh.plan.load import dump_plan, load_plan
from convmesh.plan.placement import Samples, Shard
from convmesh.plan.resolved import ResolvedPlan

TWO, FOUR = Mesh({"data": 2}), Mesh({"data": 2, "channel": 2})
HALVES = Shard(((0, 1, 2), (3, 4, 5)))


def on_data(entries: dict[str, Any], mesh: Mesh = TWO, **channel: str) -> Plan:
    made = plan_of(entries, mesh)
    moved = [Entry(pattern=entry.pattern, axes={"data": entry.axes["channel"]}) for entry in made.entries]
    return Plan(mesh=mesh, entries=(*moved, *plan_of(channel, mesh).entries))


def region_of(graph: Graph, plan: Plan) -> ResolvedPlan:
    found = resolve(graph, plan).region
    assert found is not None
    return found


def borders(entries: dict[str, Any], name: str) -> tuple[str, str, str]:
    entry = region_of(small(), on_data(entries)).operators[name]
    return entry.before.kind, entry.after.kind, str(entry.output)


def test_what_is_not_named_has_own_samples_and_each_split_makes_its_changes() -> None:
    assert borders({"conv2": "out_channels"}, "conv2") == ("gather_samples", "none", "sharded 3+3")
    assert borders({"conv2": "in_channels"}, "conv2") == ("to_channels", "reduce_scatter", "sharded 3+3")
    assert borders({"conv1": "out_channels", "conv2": "out_channels"}, "conv2")[0] == "gather_sum"
    assert borders({"conv2": Choice(split="in_channels", output="samples")}, "conv2")[1:] == (
        "scatter_samples", "own samples",
    )  # fmt: skip
    assert borders({"conv2": "out_channels"}, "fc") == ("to_samples", "none", "own samples")
    assert borders({"fc": "in_channels"}, "fc") == ("to_channels", "scatter_samples", "own samples")
    assert borders({"fc": "out_channels"}, "fc") == ("gather_samples", "to_samples", "own samples")
    found = region_of(small(), on_data({"conv2": "out_channels"}))
    assert found.placement(Edge("conv1")) == Samples()
    assert found.placement(Edge("pool")) == HALVES
    assert found.local_shape(Edge("relu2"), 1) == (4, 3, 8, 8)
    assert sorted(found.parameters) == ["conv2.bias", "conv2.weight"]


def test_batch_norm_takes_own_samples() -> None:
    build = Builder()
    x = build.convolution("conv1", "input", 6)
    names = ("weight", "bias", "running_mean", "running_var")
    parameters = tuple(Parameter(f"bn1.{name}", (6,), role=name) for name in names)
    x = build.add(
        "bn1", "batch_norm", x, build.shape(x), attributes={"eps": 1e-5, "statistics": "batch"}, parameters=parameters
    )
    found = region_of(build.graph(build.dense_head(x)), on_data({"conv1": "out_channels", "fc": "in_channels"}))
    assert found.operators["bn1"].before.kind == "to_samples"
    assert not found.operators["bn1"].shards


def test_a_whole_slope_is_summed_with_all_gradients_of_the_data_axis() -> None:
    build = Builder()
    x = build.convolution("conv1", "input", 6)
    slope = (Parameter("act.weight", (1,), role="value"),)
    x = build.add("act", "elementwise", x, build.shape(x), attributes={"function": "prelu"}, parameters=slope)
    found = region_of(build.graph(build.dense_head(x)), on_data({"conv1": "out_channels"}))
    assert found.operators["act"].split == "channels"
    assert found.operators["act"].summed == ()


def test_what_an_axis_does_not_split_is_refused() -> None:
    (whole,) = errors_of(small(), on_data({"conv1": "whole"}))
    assert "Write 'split: samples'" in whole
    (output,) = errors_of(small(), on_data({"fc": Choice(split="in_channels", output="whole")}))
    assert "Write 'output: samples'" in output
    (samples,) = errors_of(small(), plan_of({"conv1": "samples"}, FOUR))
    assert "Use the axis data" in samples
    (few,) = errors_of(small(), on_data({"conv1": "in_channels"}, Mesh({"data": 4})))
    assert "conv1: {data: samples}" in few


def test_two_axes_split_different_layers_and_not_the_same() -> None:
    found = resolve(small(), on_data({"fc": "in_channels"}, FOUR, conv1="out_channels", conv2="in_channels"))
    assert [resolved.axis for resolved in found.split_axes] == ["channel", "data"]
    assert found.operators["conv2"].after.kind == "reduce_scatter"
    assert found.operators["pool"].after.kind == "none"
    assert found.operators["fc"].before.kind == "gather"
    assert found.region is not None
    assert found.region.operators["fc"].before.kind == "to_channels"
    (twice,) = errors_of(small(), on_data({"conv2": "out_channels"}, FOUR, conv2="in_channels"))
    assert "conv2 would be split by channels along the axes channel and data at once" in twice


def test_one_rank_on_an_axis_splits_nothing() -> None:
    assert resolve(small(), on_data({"fc": "in_channels"}, Mesh({"data": 1}))).split_axes == ()


def test_the_closed_form_counts_own_and_all_samples() -> None:
    samples, pixels = 2, 64 * 4
    plan = on_data({"conv2": "out_channels", "fc": "in_channels"})
    told = {
        entry.kind: (entry.number, entry.num_bytes)
        for entry in channel_collectives(region_of(small(), plan), position=0)
    }
    # Of conv2's input: told counts, gathered twice, the gradient scattered; the scores of all samples are scattered.
    assert told == {
        "all-gather": (1 + 2 + 1, 8 + 2 * samples * 8 * pixels + samples * 10 * 4),
        "reduce-scatter": (1 + 1, 2 * samples * 8 * pixels + 2 * samples * 10 * 4),
    }
    back = on_data({"conv2": Choice(split="in_channels", output="samples"), "fc": "out_channels"})
    told = {
        entry.kind: (entry.number, entry.num_bytes)
        for entry in channel_collectives(region_of(small(), back), position=1)
    }
    assert told["all-to-all"] == (4, 2 * samples * 8 * pixels + 2 * samples * 10 * 4)
    update = {entry.kind: entry for entry in update_collectives(region_of(small(), plan), position=0)}
    assert (update["all-reduce"].number, update["all-reduce"].num_bytes) == (1, 16)
    silent = channel_collectives(region_of(small(), plan), position=0, samples=SamplesTold(count_bytes=0))
    assert silent[0].number == 3
    assert together(silent, silent)[0].num_bytes == 2 * silent[0].num_bytes


def test_plans_that_name_the_data_axis_are_written_and_read_back(tmp_path: Path) -> None:
    plan = on_data({"fc": Choice(split="in_channels", output="samples")}, FOUR, conv1="out_channels")
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(plan))
    assert load_plan(path) == plan
    assert "  fc: {data: {split: in_channels, output: samples}}" in path.read_text()


@pytest.mark.parametrize("sampler", ["sequential", "random", "stratified"])
@pytest.mark.parametrize("num_samples", [16, 17, 18, 21, 25, 30])
def test_all_shards_run_equally_many_micro_batches(sampler: Any, num_samples: int) -> None:
    run = RunConfig(
        model=ModelConfig(name="cnn-small"),
        data=DataConfig(source="digits"),
        train=TrainConfig(global_batch=16),
        strategy=StrategyConfig(accumulation=2),
    )
    batching = Batching(global_batch=16, num_shards=2, accumulation=2)
    ids = make_sampler(sampler, np.arange(num_samples) % 3, batching=batching)
    for update in range(ids.num_updates):
        of_shard = []
        for shard in range(2):
            parts = ids.micro_batches(0, update, shard) or (np.zeros(1),)
            batches = [Batch(np.zeros((len(p), 2, 2, 3)), p, np.ones(len(p), np.float32)) for p in parts]
            made = filled(batches, run=run, num_shards=2, global_count=ids.global_count(update))
            assert [batch.weights_N.sum() for batch in made[len(parts) :]] == [0] * (len(made) - len(parts))
            of_shard.append(len(made))
        assert len(set(of_shard)) == 1


def test_blocks_that_exchange_samples_are_not_recomputed() -> None:
    operators = region_of(small(), on_data({"conv2": "out_channels", "fc": "in_channels"})).operators
    ends = {"input": Edge("input"), "output": Edge("relu1")}
    early = Block(name="early", modules=("conv1", "relu1"), nodes=("conv1", "relu1"), **ends)
    late = Block(name="late", modules=("relu2", "pool"), nodes=("relu2", "pool"), **ends)
    (error,) = exchanged_in([early, late], operators)
    assert "the block late can't be recomputed: relu2 exchanges samples along the axis 'data'" in str(error)

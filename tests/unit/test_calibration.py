"""What calibrating measures and what it makes of it, without ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from convmesh.cli.main import app
from convmesh.config import RunConfig
from convmesh.config.schema import DataConfig, ModelConfig, TrainConfig
from convmesh.engines.calibrating import CollectiveTimes, FixedMemory, Measurement, OperatorTimes, Overhead, Ranks
from convmesh.errors import ConfigError
from convmesh.graph import Edge, Graph, Node, Parameter, kinds
from convmesh.mesh import Mesh
from convmesh.planner.cluster_file import dump_cluster, parse_cluster
from convmesh.planner.fitting import fit_alpha_beta, fit_spare, spread_of, typical
from convmesh.planner.measuring import (
    MOST_BYTES,
    MOST_OPERATORS,
    chunks_of,
    curve_signatures,
    meshes_of,
    network_signatures,
    update_shapes,
)
from convmesh.planner.seconds import CostModel
from convmesh.training.calibrate_worker import Task, load_measurement, save_measurement
from convmesh.training.calibration import Subject, cluster_of, signatures_of, task_of

RUN = RunConfig(
    engine="torch",
    model=ModelConfig(name="cnn-small"),
    data=DataConfig(source="digits"),
    train=TrainConfig(global_batch=8),
)


def small_graph() -> Graph:
    """A convolution and a classifier."""
    convolution = kinds.convolution(in_channels=3, out_channels=8, kernel=(3, 3), padding=((1, 1), (1, 1)))
    pool = {"function": "mean", "output_size": (1, 1)}
    dense = {"in_features": 8, "out_features": 10, "bias": False}
    return Graph(
        (
            Node(name="x", kind="input", output_shapes=((8, 3, 6, 6),)),
            Node(
                name="conv", kind="convolution", attributes=convolution, inputs=(Edge("x"),),
                output_shapes=((8, 8, 6, 6),), parameters=(Parameter("conv.weight", (8, 3, 3, 3), "weight"),),
                module="conv",
            ),
            Node(name="pool", kind="adaptive_pool", attributes=pool, inputs=(Edge("conv"),),
                 output_shapes=((8, 8, 1, 1),), module="pool"),
            Node(name="flatten", kind="flatten", attributes={"start_dim": 1, "end_dim": 3}, inputs=(Edge("pool"),),
                 output_shapes=((8, 8),), module="flatten"),
            Node(
                name="fc", kind="dense", attributes=dense, inputs=(Edge("flatten"),), output_shapes=((8, 10),),
                parameters=(Parameter("fc.weight", (10, 8), "weight"),), module="fc",
            ),
        ),
        outputs=(Edge("fc"),),
    )  # fmt: skip


@settings(deadline=None)
@given(
    alpha=st.floats(1e-6, 1e-2),
    beta=st.floats(1e-12, 1e-6),
    sizes=st.lists(st.sampled_from([2**power for power in range(4, 28, 3)]), min_size=2, max_size=6, unique=True),
)
def test_a_straight_line_is_found_again(alpha: float, beta: float, sizes: list[int]) -> None:
    line = fit_alpha_beta(sizes, [alpha + size * beta for size in sizes])
    for size in sizes:
        assert line.seconds(size) == pytest.approx(alpha + size * beta, rel=1e-3)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2**26), st.floats(1e-6, 10.0)), min_size=1, max_size=6))
def test_neither_alpha_nor_beta_is_below_zero(points: list[tuple[int, float]]) -> None:
    line = fit_alpha_beta([size for size, _ in points], [seconds for _, seconds in points])
    assert line.alpha_seconds >= 0
    assert line.seconds_per_byte >= 0


def test_what_is_held_beside_tensors_is_found_again() -> None:
    activations, parameters = [10 * 2**20, 20 * 2**20, 200 * 2**20], [0, 90 * 2**20, 2**20]
    held = [2**20 + 1.5 * own + 1.25 * other for own, other in zip(activations, parameters, strict=True)]
    spare = fit_spare(held, activations, parameters)
    assert spare.activation_share == pytest.approx(0.5)
    assert spare.parameter_share == pytest.approx(0.25)
    assert spare.fixed_bytes == pytest.approx(2**20, rel=1e-3)
    assert fit_spare([], [], []).fixed_bytes == 0


def test_what_stands_for_samples() -> None:
    samples = [1.0, 1.0, 1.0, 5.0]
    assert typical(samples, shares_cores=False) == 1.0
    assert typical(samples, shares_cores=True) == 2.0
    assert typical([], shares_cores=True) == 0.0
    assert spread_of([2.0, 2.0]) == 0.0
    assert spread_of([1.0, 2.0, 3.0]) == pytest.approx(0.5)


def test_meshes_hold_all_ranks() -> None:
    assert [mesh.sizes for mesh in meshes_of(4)] == [
        {"data": 4, "channel": 1},
        {"data": 2, "channel": 2},
        {"data": 1, "channel": 4},
    ]


def test_a_network_is_measured_at_the_shapes_of_all_meshes() -> None:
    found = network_signatures(small_graph(), num_ranks=2, global_batch=8, accumulations=(1,))
    texts = [signature.text for signature in found]
    assert len(texts) == len(set(texts))
    convolutions = {(entry.input_shapes[0], entry.output_shapes[0]) for entry in found if entry.kind == "convolution"}
    assert convolutions == {
        ((4, 3, 6, 6), (4, 8, 6, 6)),  # Samples split.
        ((8, 3, 6, 6), (8, 8, 6, 6)),  # Whole on both ranks.
        ((8, 3, 6, 6), (8, 4, 6, 6)),  # Output channels split.
        ((8, 2, 6, 6), (8, 8, 6, 6)),  # Input channels split.
    }
    assert not any(entry.kind == "flatten" for entry in found)


def test_chunks_hold_everything_once_and_not_too_much() -> None:
    found = curve_signatures() * 3
    chunks = chunks_of(found)
    assert [place for chunk in chunks for place in chunk] == list(range(len(found)))
    assert all(len(chunk) <= MOST_OPERATORS for chunk in chunks)
    assert MOST_BYTES > 0


def test_every_class_has_a_curve() -> None:
    classes = {signature.operator_class for signature in curve_signatures()}
    assert classes == {
        "convolution", "pointwise", "grouped", "depthwise", "convolution_transposed", "dense", "norm", "pooling",
        "elementwise", "copy",
    }  # fmt: skip


def test_updates_are_measured_whole_and_in_parts() -> None:
    sizes = [sum(int(np.prod(shape)) for shape in shapes) for shapes in update_shapes(small_graph())]
    assert sizes == [8 * 3 * 9 + 10 * 8, 4 * 3 * 9 + 5 * 8, 2 * 3 * 9 + 2 * 8]
    assert len(update_shapes(None)) == 3


def made_up(place_count: int, *, slow: float = 1.0) -> Measurement:
    """A rank that found every operator to take as long."""
    ranks = Ranks(axis="channel", mesh=Mesh({"data": 1, "channel": 2}))
    times = tuple(CollectiveTimes(size, (slow * (1e-3 + size * 1e-9),) * 3) for size in (2**10, 2**20))
    return Measurement(
        memory=FixedMemory(fixed_bytes=300 * 2**20, bytes_per_operator=2**10),
        overhead=Overhead(update_seconds=1e-3, micro_batch_seconds=2e-3),
        operators={
            place: None if place == 0 else OperatorTimes((1e-3, 2e-3, 9e-3), (3e-3,)) for place in range(place_count)
        },
        updates={2**20: (1e-2,), 2**22: (5e-2,)},
        collectives=[("all-reduce", "collective", ranks, times)],
        overlap=0.25,
        data_seconds=None,
    )


def test_a_cluster_says_what_was_measured() -> None:
    subject = Subject(run=RUN, num_ranks=2, device="cpu", graph=small_graph())
    found = signatures_of(subject)
    ranks = [made_up(len(found)), made_up(len(found), slow=2.0)]
    cluster = cluster_of(subject, found, ranks)
    assert parse_cluster(_content(dump_cluster(cluster)), where="here") == cluster
    (link,) = cluster.links.inside
    assert (link.kind, link.num_ranks, link.num_groups) == ("all-reduce", 2, 1)
    assert link.alpha_seconds == pytest.approx(2e-3)  # The slower rank counts.
    assert link.seconds_per_byte == pytest.approx(2e-9)
    assert cluster.overlap == 0.25
    assert cluster.data_seconds_per_sample is None
    assert {curve.operator for curve in cluster.compute} >= {"convolution", "norm", "sgd"}
    own = next(signature for signature in found if signature.input_shapes[0] == (4, 3, 6, 6))
    work = CostModel(cluster).work(own)
    assert (work.forward_seconds, work.backward_seconds, work.origin) == (2e-3, 3e-3, "measured")
    assert "--ranks 2" in cluster.source_of("")


def _content(text: str) -> dict[str, object]:
    content: dict[str, object] = yaml.safe_load(text)
    return content


def test_measurements_and_tasks_survive_their_files(tmp_path: Path) -> None:
    seen = made_up(3)
    save_measurement(seen, tmp_path, rank=1)
    assert load_measurement(tmp_path, rank=1) == seen
    subject = Subject(run=RUN, num_ranks=2, device="cpu", graph=small_graph(), seconds=5.0)
    task = task_of(subject, signatures_of(subject))
    task.write(tmp_path)
    read = Task.read(tmp_path)
    assert list(read.graphs) == list(task.graphs)
    assert [list(chunk) for chunk in read.chunks] == task.chunks
    assert (read.seconds, read.num_rounds) == (5.0, task.num_rounds)
    first = Graph.from_json(read.graphs[0])
    assert first.node("operator").kind == signatures_of(subject)[0].kind


def test_a_file_that_can_not_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "cluster.yaml"):
        result = CliRunner().invoke(app, ["calibrate", "--output", str(path)])

        assert isinstance(result.exception, ConfigError)
        assert "can't be written" in str(result.exception)

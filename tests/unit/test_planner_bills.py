"""Bills: what ways cost at any number of samples follows from two, and bytes are a floor of what is predicted."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from planning import cluster_of, residual_network
from tests.graph_builder import GRAPHS, Builder
from tests.unit.test_planner_search import combinations, pricer_of

from convmesh.graph import Graph
from convmesh.mesh import Mesh
from convmesh.planner import tables as tables_module
from convmesh.planner.candidates import Outline
from convmesh.planner.cluster import Measured
from convmesh.planner.curves import Interpolation
from convmesh.planner.predict import predict
from convmesh.planner.prediction import Training
from convmesh.planner.pricing import Pricer
from convmesh.planner.seconds import CostModel

NETWORKS = {**GRAPHS, "norms": residual_network}
FLOPS, BYTES = ((1e4, 2e-5), (1e6, 3e-5), (1e9, 1e-3)), ((1e3, 1e-6), (1e5, 5e-6), (1e8, 1e-3))
BENT = [
    {"operator": "convolution", "points": [{"flops": size, "seconds": seconds} for size, seconds in FLOPS]},
    {"operator": "copy", "points": [{"num_bytes": size, "seconds": seconds} for size, seconds in BYTES]},
]


def outline_of(num_ranks: int, accumulation: int = 1) -> Outline:
    return Outline(mesh=Mesh({"data": 1, "channel": num_ranks}), accumulation=accumulation)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("recomputing", [False, True])
def test_two_numbers_of_samples_tell_all(
    name: str, dtype: Any, recomputing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, mesh = NETWORKS[name](samples=2), Mesh({"data": 1, "channel": 2})

    def costs(num_samples: int) -> Any:
        model = CostModel(cluster_of(compute=BENT))
        pricer = Pricer(graph, Training(global_batch=64, compute_dtype=dtype), model, bucket_bytes=2**20)
        return pricer.tables(mesh).costs(model, mesh, num_samples, recomputing=recomputing)

    for num_samples in (1, 7, 64):
        followed = costs(num_samples)
        with monkeypatch.context() as patch:
            patch.setattr(tables_module, "TOLD_SAMPLES", (num_samples,))
            told = costs(num_samples)
        assert not recomputing or name in ("residual", "mobile") or followed.seconds.max() > 0
        np.testing.assert_allclose(followed.seconds, told.seconds, rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(followed.kept_bytes, told.kept_bytes, rtol=1e-12)


def test_many_sizes_are_read_as_single_ones_are() -> None:
    curve = Interpolation([(1e3, 1e-5), (1e5, 2e-5), (1e6, 1e-3), (1e8, 2e-3)])
    sizes = np.concatenate([[0.0], np.geomspace(1.0, 1e11, 200), [1e3, 1e5, 1e8]])
    np.testing.assert_allclose(curve.many(sizes), [curve.seconds(size) for size in sizes], rtol=1e-12)


def test_what_was_measured_is_taken_at_its_very_shapes() -> None:
    graph = residual_network(samples=2)
    plain = pricer_of(graph, global_batch=16)
    operators = predict(_whole(plain, outline_of(1, 2)), plain.model).operators
    (conv,) = [cost for cost in operators if cost.node == "block0.first.conv"]
    assert conv.signature is not None
    entry = Measured(signature=conv.signature.text, forward_seconds=3.0, backward_seconds=4.0)
    cluster = dataclasses.replace(plain.model.cluster, measured=(entry,))
    measured = Pricer(graph, plain.training, CostModel(cluster), bucket_bytes=plain.bucket_bytes)
    # All convolutions of the blocks have the same shapes; two micro-batches of eight samples, or one of sixteen.
    assert measured.price(outline_of(1, 2)).floor_seconds > 2 * 6 * 7.0
    assert measured.price(outline_of(1, 1)).floor_seconds < 1.0


def _whole(pricer: Pricer, outline: Outline) -> Any:
    ways = pricer.tables(outline.mesh).ways
    return pricer.candidate(outline, {name: own[0] for name, own in ways.items()}, ())


def small() -> Graph:
    build = Builder(channels=4, samples=8, size=16)
    x = build.relu("relu1", build.batch_norm("bn1", build.convolution("conv1", "input", 8)))
    return build.graph(build.dense_head(build.relu("relu2", build.convolution("conv2", x, 8)), classes=6))


@pytest.mark.parametrize("engine", ["torch", "mindspore"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bytes_of_ways_are_a_floor_of_what_every_plan_needs(engine: Any, accumulation: int) -> None:
    """So that what is ruled out by its floor would not have fitted."""
    pricer = pricer_of(small(), engine=engine)
    outline = outline_of(2, accumulation)
    priced = pricer.price(outline)
    plans = list(combinations(priced.tables.ways))
    assert len(plans) > 100
    for ways in plans:
        places = list(priced.tables.places(ways).values())
        floor = float(priced.num_bytes[places].sum()) + priced.fixed_bytes
        needed = predict(pricer.candidate(outline, ways, ()), pricer.model).memory.total
        assert floor <= needed + 1


@pytest.mark.parametrize("name", ["dense_net", "norms"])
def test_what_recomputing_all_blocks_keeps_is_a_floor_too(name: str) -> None:
    pricer = pricer_of(NETWORKS[name](samples=2), global_batch=16)
    assert pricer.blocks
    outline = dataclasses.replace(outline_of(2), recompute="blocks")
    priced = pricer.price(outline)
    _, num_bytes = pricer.recomputing(outline)
    lightest = priced.tables.problem.solve(num_bytes)
    assert lightest is not None
    every = tuple(block.name for block in pricer.blocks)
    ways = priced.tables.chosen(lightest.options)
    needed = predict(pricer.candidate(outline, ways, every), pricer.model).memory.total
    assert lightest.cost + priced.fixed_bytes <= needed + 1


def test_known_costs_give_the_same_prediction() -> None:
    pricer = pricer_of(residual_network(samples=2), global_batch=16)
    outline = outline_of(2)
    ways = pricer.tables(outline.mesh).ways
    for choose in (0, -1):
        chosen = {name: own[0] for name, own in ways.items()}
        free = pricer.price(outline).free
        assert free is not None
        chosen = pricer.tables(outline.mesh).chosen(free.options) if choose else chosen
        for recompute in ((), tuple(block.name for block in pricer.blocks), (pricer.blocks[-1].name,)):
            candidate = pricer.candidate(outline, chosen, recompute)
            known = pricer.operator_costs(outline, chosen)
            for _ in range(2):
                assert predict(candidate, pricer.model, operators=known) == predict(candidate, pricer.model)

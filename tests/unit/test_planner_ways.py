"""What the planner takes an operator to do is what `resolve` makes of the plan."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.graph_builder import GRAPHS, Builder

from convmesh.graph import Edge, Graph, Node, Parameter
from convmesh.mesh import Mesh
from convmesh.plan import CHANNEL, Plan, Resolved, resolve
from convmesh.plan.placement import Replicate
from convmesh.planner.assignment import Problem
from convmesh.planner.ways import Way, entries_of, list_ways


def squeeze_excite() -> Graph:
    """A gate of one value per channel, made from a mean over pixels."""
    build = Builder()
    x = build.convolution("conv0", "input", 8)
    gate = build.add(
        "squeeze", "adaptive_pool", x, (2, 8, 1, 1), attributes={"function": "mean", "output_size": (1, 1)}
    )
    gate = build.convolution("expand", build.relu("relu", build.convolution("reduce", gate, 3)), 8)
    x = build.add("scale", "multiply", (x, gate), (2, 8, 8, 8), module="")
    return build.graph(build.dense_head(x))


def along_channels() -> Graph:
    """Gated pieces, softmax and layer norm over channels, and a maximum that is joined to others; some are calls."""
    build = Builder()
    x = build.relu("relu0", build.convolution("conv0", "input", 14))
    pieces = Node(
        name="split", kind="split", attributes={"dim": 1, "sizes": (7, 7)}, inputs=(Edge(x),),
        output_shapes=((2, 7, 8, 8),) * 2, call=0,
    )  # fmt: skip
    build.nodes.append(pieces)
    gated = Node(
        name="gated", kind="multiply", inputs=(Edge("split", 0), Edge("split", 1)), output_shapes=((2, 7, 8, 8),)
    )
    build.nodes.append(gated)
    y = build.convolution("conv1", "gated", 9)
    y = build.add("softmax", "softmax", y, (2, 9, 8, 8), attributes={"dim": 1, "log": False}, module="", call=1)
    top = {"dims": (1,), "keep_dims": True, "ties": "all"}
    top_y = build.add("amax", "amax", y, (2, 1, 8, 8), attributes=top, module="", call=2)
    z = build.convolution("conv2", build.concat("joined", (y, top_y)), 6)
    parameters = tuple(Parameter(f"norm.{role}", (6, 8, 8), role) for role in ("weight", "bias"))
    z = build.add("norm", "layer_norm", z, (2, 6, 8, 8), attributes={"num_dims": 3, "eps": 1e-5}, parameters=parameters)
    return build.graph(build.dense_head(z))


def spread() -> Graph:
    """Gates of one value per pixel that scale and shift all channels: of a layer, by functions, and used together."""
    build = Builder()
    x = build.relu("relu0", build.convolution("conv0", "input", 8))
    one = (2, 1, 8, 8)
    mask = build.add("sigmoid", "elementwise", build.convolution("mask", x, 1), one, attributes={"function": "sigmoid"})
    mean = {"dims": (1,), "keep_dims": True}
    mean_x = build.add("mean", "mean", x, one, attributes=mean, module="", call=0)
    gate = build.add("gate", "multiply", (mask, mean_x), one, module="")
    y = build.add("scale", "multiply", (x, gate), (2, 8, 8, 8), module="")
    y = build.add("shift", "add", (y, mean_x), (2, 8, 8, 8), module="")
    return build.graph(build.dense_head(build.convolution("conv1", y, 6)))


NETWORKS = {**GRAPHS, "squeeze_excite": squeeze_excite, "along": along_channels, "spread": spread}


def chosen_at_random(graph: Graph, seed: int, num_ranks: int) -> dict[str, Way]:
    """Ways that fit together, cheapest at random prices."""
    generator = random.Random(seed)
    ways = list_ways(graph, num_ranks)
    problem = Problem([[way.ports for way in own] for own in ways.values()])
    found = problem.solve([generator.random() for own in ways.values() for _ in own])
    assert found is not None
    return {name: own[number] for (name, own), number in zip(ways.items(), found.options, strict=True)}


def comparable(entry: Resolved) -> dict[str, object]:
    return {**vars(entry), "shards": dict(entry.shards)}


@pytest.mark.parametrize("network", NETWORKS)
@given(seed=st.integers(0, 10**6), num_ranks=st.sampled_from((2, 3, 4)))
@settings(max_examples=25, deadline=None)
def test_resolve_does_what_was_counted(network: str, seed: int, num_ranks: int) -> None:
    graph = NETWORKS[network]()
    chosen = chosen_at_random(graph, seed, num_ranks)
    plan = Plan(mesh=Mesh({"data": 1, CHANNEL: num_ranks}), entries=entries_of(chosen))
    found = resolve(graph, plan)
    for name, way in chosen.items():
        assert comparable(found.operators[name]) == comparable(way.resolved), name


@pytest.mark.parametrize("network", NETWORKS)
def test_everything_can_stay_whole(network: str) -> None:
    graph = NETWORKS[network]()
    for own in list_ways(graph, 2).values():
        assert own[0].resolved.output == Replicate()
        assert own[0].resolved.changes_nothing

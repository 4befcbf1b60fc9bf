"""The graph beside a plan: taken where it is of the very network, else the network is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.graph_builder import residual

from convmesh.graph import Graph
from convmesh.graph.graph import Shape
from convmesh.mesh import Mesh
from convmesh.plan import Plan, resolve
from convmesh.plan.beside import beside, graph_beside
from convmesh.plan.by_rule import plan_by_rule
from convmesh.plan.load import load_plan
from convmesh.training.planning import RunPlan


def shapes_of(graph: Graph) -> dict[str, Shape]:
    return {entry.name: entry.shape for entry in graph.parameters}


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Plan, Graph]:
    graph = residual(samples=4)
    plan = plan_by_rule(graph, Mesh({"channel": 2}))
    RunPlan(plan, resolve(graph, plan)).write(tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml", load_plan(tmp_path / "plan.yaml"), graph


def test_ranks_take_the_graph_that_the_starter_has_read(written: tuple[Path, Plan, Graph]) -> None:
    path, plan, graph = written
    found = graph_beside(path, plan, shapes_of(graph), num_samples=4)
    assert found is not None
    assert found.to_json() == graph.to_json()


def test_other_samples_weights_and_networks_are_read_anew(written: tuple[Path, Plan, Graph]) -> None:
    path, plan, graph = written
    shapes = shapes_of(graph)
    assert graph_beside(path, plan, shapes, num_samples=2) is None
    name = next(iter(shapes))
    assert graph_beside(path, plan, {**shapes, name: (1, *shapes[name][1:])}, num_samples=4) is None
    assert graph_beside(path, plan, {key: shapes[key] for key in shapes if key != name}, num_samples=4) is None
    beside(path).write_text(residual(3, samples=4).to_json())
    assert graph_beside(path, plan, shapes_of(residual(3)), num_samples=4) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 99}'])
def test_a_damaged_graph_is_as_good_as_none(written: tuple[Path, Plan, Graph], content: str) -> None:
    path, plan, graph = written
    beside(path).write_text(content)
    assert graph_beside(path, plan, shapes_of(graph), num_samples=4) is None
    beside(path).unlink()
    assert graph_beside(path, plan, shapes_of(graph), num_samples=4) is None

"""The plan of a run: by rule or from a file, checked against its network before any rank is started."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convmesh.config import RunConfig
from convmesh.config.execution import execution_of, with_execution
from convmesh.data.open import DataSets
from convmesh.engines import is_installed, load_engine
from convmesh.engines.contract import Engine
from convmesh.engines.tracing import trace
from convmesh.errors import ConvMeshError, EngineError, MistakeList, ModelError, raise_all
from convmesh.graph import Graph
from convmesh.mesh import Mesh
from convmesh.plan import CHANNEL, Plan, ResolvedPlan, resolve
from convmesh.plan.beside import beside
from convmesh.plan.by_rule import plan_by_rule
from convmesh.plan.load import dump_plan, load_plan
from convmesh.plan.network import network_facts, plan_mismatches
from convmesh.training.run_folder import write_atomically


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run and what follows from it.

    Args:
        plan: The plan, for exactly this network and mesh.
        resolved: What becomes of each operator.
    """

    plan: Plan
    resolved: ResolvedPlan

    def write(self, path: Path) -> None:
        """Writes the plan for ranks, and beside it its network's graph.

        Raises:
            RunFolderError: If they can't be written.
        """
        write_atomically(beside(path), self.resolved.graph.to_json())
        write_atomically(path, dump_plan(self.plan))


def plan_run(run: RunConfig, *, mesh: Mesh, datasets: DataSets) -> RunPlan:
    """Makes or reads the plan of a run and applies it to its network; starts nothing.

    Args:
        run: The run; ``strategy.plan`` names a plan file, or the plan is made by rule.
        mesh: Its mesh.
        datasets: Its data, for the shape of images and the number of classes.

    Returns:
        The plan.

    Raises:
        ConvMeshError: If the network can't be built or read, or the plan doesn't fit it; several mistakes are listed
            together as a ``MistakeList``.
    """
    network = make_network(load_engine(run.engine), run, datasets)
    graph = _trace(network, run, mesh, datasets)
    mistakes: list[ConvMeshError] = [*_wrong_output(graph, datasets)]
    plan = plan_by_rule(graph, mesh) if mesh.size(CHANNEL) > 1 else Plan(mesh=mesh)
    if run.strategy.plan is not None:
        plan = load_plan(run.strategy.plan)
        mistakes += plan_mismatches(plan, graph, mesh=mesh)
        if mistakes:
            raise_all(mistakes)
    plan = replace(plan, mesh=mesh, network=network_facts(graph), execution=plan.execution.over(execution_of(run)))
    try:
        resolved = resolve(graph, plan)
    except MistakeList as found:
        raise_all([*mistakes, *found.errors])
        raise
    except ConvMeshError as found:
        raise_all([*mistakes, found])
        raise
    refusals = getattr(importlib.import_module(f"convmesh.engines.{run.engine}.parallelize"), "refusals", None)
    raise_all([*mistakes, *(refusals(network, resolved) if refusals is not None else ())])
    return RunPlan(plan, resolved)


def build_network(engine: Engine, run: RunConfig, datasets: DataSets) -> Any:
    """Builds the network of a run and sees that it takes the images and scores the classes of the data.

    Args:
        engine: Started or not.
        run: The run.
        datasets: Its data.

    Returns:
        The network.

    Raises:
        ModelError: If it can't be built, or does not fit the data.
    """
    network = make_network(engine, run, datasets)
    num_classes = len(datasets.class_names)
    width = engine.output_width(network, image_shape_HWC=datasets.network_shape_HWC)
    if width != num_classes:
        raise _wrong_output_error(f"{width} outputs", num_classes)
    return network


def make_network(engine: Engine, run: RunConfig, datasets: DataSets) -> Any:
    """Builds the network of a run, for regrouped channels if the run asks for them.

    Args:
        engine: Started or not.
        run: The run.
        datasets: Its data.

    Returns:
        The network, with the initial weights that it has without regrouping.

    Raises:
        ConvMeshError: If it can't be built, or can't take regrouped images; several mistakes are listed together as a
            ``MistakeList``.
    """
    network = engine.build_network(
        run.model, num_classes=len(datasets.class_names), num_channels=datasets.num_channels, seed=run.train.seed
    )
    if datasets.regrouping is None:
        return network
    return engine.regroup_channels(network, datasets.regrouping, image_shape_HWC=datasets.image_shape_HWC)


def _trace(network: Any, run: RunConfig, mesh: Mesh, datasets: DataSets) -> Graph:
    height, width, num_channels = datasets.network_shape_HWC
    num_samples = max(1, run.train.global_batch // (mesh.size("data") * run.strategy.accumulation))
    return trace(network, (num_samples, num_channels, height, width))


def _wrong_output(graph: Graph, datasets: DataSets) -> list[ConvMeshError]:
    shapes = [graph.shape(edge) for edge in graph.outputs]
    num_classes = len(datasets.class_names)
    if len(shapes) == 1 and len(shapes[0]) == 2 and shapes[0][1] == num_classes:
        return []
    return [_wrong_output_error(" and ".join(f"shape {shape}" for shape in shapes), num_classes)]


def _wrong_output_error(got: str, num_classes: int) -> ModelError:
    return ModelError(
        "the network's output does not fit the classes of the data",
        got=got,
        expected=f"{num_classes} scores per sample",
        fix=f"Give its last layer {num_classes} outputs, for example 'model.args: {{num_classes: {num_classes}}}'",
    )


def as_planned(run: RunConfig) -> RunConfig:
    """The run with what its plan file says about running an update; a file that can't be read is told of later."""
    if run.strategy.plan is None:
        return run
    with contextlib.suppress(ConvMeshError):
        return with_execution(run, load_plan(run.strategy.plan).execution)
    return run


def missing_engine(run: RunConfig) -> list[ConvMeshError]:
    """The error that the engine of a run is not installed, or none."""
    if is_installed(run.engine):
        return []
    other = "torch" if run.engine == "mindspore" else "mindspore"
    hint = f", or use --engine {other}, which is" if is_installed(other) else ""
    return [
        EngineError(
            f"the engine '{run.engine}' is not installed",
            fix=f"Install it with: pip install 'convmesh[{run.engine}]'{hint}",
        )
    ]

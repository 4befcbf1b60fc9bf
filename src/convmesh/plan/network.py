"""What a plan notes of its network, and in what another network, mesh or version differs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from convmesh.errors import ConfigError, ConvMeshError, ModelError
from convmesh.graph import Graph, Node
from convmesh.mesh import Mesh
from convmesh.plan.plan import NetworkFacts, Plan

_MAX_LISTED = 8


def network_facts(graph: Graph) -> NetworkFacts:
    """What a plan notes of a network.

    Args:
        graph: The network, with one input.

    Returns:
        Its fingerprint, the shape of one sample, and its operators with parameters.
    """
    return NetworkFacts(
        fingerprint=fingerprint(graph),
        input_shape=graph.inputs[0].shape[1:],
        operators={node.name: describe(node) for node in graph if node.parameters},
    )


def fingerprint(graph: Graph) -> str:
    """A short hash of what a network computes, equal whatever the number of samples and the data type."""
    entries = [
        [
            node.name,
            node.kind,
            sorted((name, _as_list(value, name)) for name, value in node.attributes.items()),
            [[edge.node, edge.output] for edge in node.inputs],
            [_sample_shape(node, shape) for shape in node.output_shapes],
            [[parameter.name, parameter.shape] for parameter in node.parameters],
        ]
        for node in graph
    ]
    outputs = [[edge.node, edge.output] for edge in graph.outputs]
    return hashlib.sha256(json.dumps([entries, outputs]).encode()).hexdigest()[:16]


def describe(node: Node) -> str:
    """An operator with parameters in a few words: ``convolution 64 -> 128, 3x3, stride 2``."""
    attributes = node.attributes
    if node.kind == "convolution":
        kernel = "x".join(map(str, attributes["kernel"]))
        text = f"{'transposed ' if attributes['transposed'] else ''}convolution "
        text += f"{attributes['in_channels']} -> {attributes['out_channels']}, {kernel}"
        strides = sorted(set(attributes["stride"]) - {1})
        text += f", stride {'x'.join(map(str, strides))}" if strides else ""
        return text + (f", {attributes['groups']} groups" if attributes["groups"] > 1 else "")
    if node.kind == "dense":
        return f"dense {attributes['in_features']} -> {attributes['out_features']}"
    shapes = ", ".join("x".join(map(str, parameter.shape)) or "1" for parameter in node.parameters[:1])
    return f"{node.kind} {shapes}"


def plan_mismatches(plan: Plan, graph: Graph, *, mesh: Mesh) -> list[ConvMeshError]:
    """In what a network and mesh differ from those that a plan was made for.

    Args:
        plan: The plan.
        graph: The network that shall be split.
        mesh: The mesh that it shall run on.

    Returns:
        One error per kind of difference; none if the plan fits or notes no network.
    """
    return [*_mesh_mismatch(plan, mesh), *_network_mismatch(plan, graph)]


def _mesh_mismatch(plan: Plan, mesh: Mesh) -> Iterator[ConvMeshError]:
    differing = [axis for axis in {**plan.mesh.sizes, **mesh.sizes} if plan.mesh.size(axis) != mesh.size(axis)]
    # How many parts the samples are split into changes no operator.
    if set(differing) - {"data"}:
        yield ConfigError(
            "the plan was made for another mesh",
            got=", ".join(f"{axis}={mesh.size(axis)}" for axis in differing),
            expected=", ".join(f"{axis}={plan.mesh.size(axis)}" for axis in differing),
            fix=f"Use --mesh {plan.mesh}, or make a new plan for {mesh}",
        )


def _network_mismatch(plan: Plan, graph: Graph) -> Iterator[ConvMeshError]:
    facts = plan.network
    if facts is None or facts.fingerprint == fingerprint(graph):
        return
    now = network_facts(graph)
    found = []
    if facts.input_shape != now.input_shape:
        found.append(f"its input is {now.input_shape}, not {facts.input_shape}")
    missing = [name for name in facts.operators if name not in now.operators]
    added = [name for name in now.operators if name not in facts.operators]
    if missing:
        found.append(f"it lacks {_listed(missing)}")
    if added:
        found.append(f"it has {_listed(added)} besides")
    changed = [
        f"{name} is {now.operators[name]}, not {told}"
        for name, told in facts.operators.items()
        if name in now.operators and now.operators[name] != told
    ]
    if changed:
        found.append(_listed(changed, "; "))
    yield ModelError(
        "the plan was made for another network",
        got="; ".join(found) or "the same layers with weights, but other operators between them",
        fix="Make a new plan with: convmesh check CONFIG --mesh ... --write-plan FILE",
    )


def _listed(names: list[str], between: str = ", ") -> str:
    shown = between.join(names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"


def _sample_shape(node: Node, shape: tuple[int, ...]) -> list[int]:
    return list(shape) if node.kind in ("parameter", "constant") else list(shape[1:])


def _as_list(value: Any, name: str) -> Any:
    # The shape of a reshape starts with the number of samples.
    return list(value[1:]) if name == "shape" else value


def without_network(plan: Plan) -> Plan:
    """The same plan for any network that has operators of these names."""
    return dataclasses.replace(plan, network=None)

"""Mistakes in what a plan says, found against the graph."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from convmesh.errors import ConfigError, ConvMeshError, ModelError
from convmesh.graph import Edge, Graph, Node, node_splits
from convmesh.plan.plan import CHANNEL, Entry, Plan
from convmesh.plan.resolved import Resolved


def entry_mistakes(graph: Graph, plan: Plan) -> list[ConvMeshError]:
    """Entries that mean no operator, or none that can be split so, and axes on which nothing is split by name.

    Args:
        graph: The network.
        plan: The plan.

    Returns:
        The mistakes, in the order of the plan.
    """
    return [error for entry in plan.entries for error in (*_unmatched(graph, entry), *_other_axes(entry))]


def torn_parameters(graph: Graph, operators: Mapping[str, Resolved]) -> list[ConvMeshError]:
    """Parameters that several operators share, and that they would split differently.

    Args:
        graph: The network.
        operators: What becomes of each operator.

    Returns:
        One error per parameter.
    """
    uses: dict[str, dict[object, str]] = {}
    for node in graph:
        for user in _users(graph, node):
            for parameter in node.parameters:
                use = operators[node.name].shards.get(parameter.name), parameter.name in operators[user.name].summed
                uses.setdefault(parameter.name, {}).setdefault(use, user.name)
    return [
        ModelError(
            f"the parameter {name} is shared by operators that split it differently",
            got=" and ".join(of_use.values()),
            fix="Keep all of them whole",
        )
        for name, of_use in uses.items()
        if len(of_use) > 1
    ]


def _users(graph: Graph, node: Node) -> tuple[Node, ...]:
    return graph.consumers(Edge(node.name)) if node.kind == "parameter" else (node,)


def _unmatched(graph: Graph, entry: Entry) -> Iterator[ConvMeshError]:
    matching = [node for node in graph if entry.matches(node.name)]
    if not matching:
        near = difflib.get_close_matches(entry.pattern, [node.name for node in graph], n=3)
        yield ConfigError(
            f"the plan names '{entry.pattern}', and the network has no such operator",
            fix=f"Did you mean {' or '.join(near)}?" if near else "List the operators with: convmesh graph CONFIG",
        )
        return
    for choice in entry.axes.values() if entry.is_pattern else ():
        if not any(choice.split in node_splits(graph, node).allowed for node in matching):
            yield ConfigError(
                f"no operator of '{entry.pattern}' can be split by '{choice.split}'",
                got=", ".join(node.name for node in matching[:5]),
            )


def _other_axes(entry: Entry) -> Iterator[ConvMeshError]:
    for axis in entry.axes:
        if axis != CHANNEL:
            yield ConfigError(
                f"the plan splits '{entry.pattern}' along the axis '{axis}'",
                expected="channel; samples are split along data without being named",
                fix=f"Remove '{axis}' from '{entry.pattern}'",
            )

"""A network as rows of a table: per operator, or per module down to some depth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from convmesh.graph.costs import Cost
from convmesh.graph.graph import BUFFERS, Graph, Node, Shape
from convmesh.graph.rules import node_cost, saved_activations


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one operator or module is and costs.

    Args:
        name: Name of the operator, or path of the module.
        kind: Kind of the operator; of a module how many operators it holds.
        shape: Shape of the first output, of a module that of its last operator.
        num_parameters: Elements of its parameters; those that an earlier row shares are not counted again.
        cost: What it computes.
        saved_bytes: What it adds to the activations that are kept for the backward.
    """

    name: str
    kind: str
    shape: Shape
    num_parameters: int
    cost: Cost
    saved_bytes: int


@dataclass(frozen=True)
class Listing:
    """A table of a network.

    Args:
        rows: In order of execution.
        total: Their sums; its shape is that of the network's output.
    """

    rows: tuple[Row, ...]
    total: Row


def list_graph(graph: Graph, *, depth: int | None = None) -> Listing:
    """Lists the operators of a network.

    Args:
        graph: The network.
        depth: Sum up operators below this many parts of a module path: at 1, ``layer1.0.conv1`` counts to ``layer1``.
            Default: one row per operator.

    Returns:
        The rows and their total.
    """
    saved = saved_activations(graph)
    counted: set[str] = set()
    rows: list[Row] = []
    for node in graph:
        own = [entry for entry in node.parameters if entry.role not in BUFFERS and entry.name not in counted]
        counted |= {entry.name for entry in own}
        rows.append(
            Row(
                name=node.name,
                kind=_kind(node),
                shape=node.shape,
                num_parameters=sum(entry.num_elements for entry in own),
                cost=node_cost(graph, node),
                saved_bytes=saved[node.name],
            )
        )
    total = _sum("total", rows, shape=graph.shape(graph.outputs[0]) if graph.outputs else ())
    return Listing(rows=tuple(rows if depth is None else _grouped(rows, depth)), total=total)


def _kind(node: Node) -> str:
    return str(node.attributes["function"]) if node.kind == "elementwise" else node.kind


def _grouped(rows: Sequence[Row], depth: int) -> list[Row]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(".".join(row.name.split(".")[:depth]), []).append(row)
    return [
        members[0] if [row.name for row in members] == [name] else _sum(name, members, shape=members[-1].shape)
        for name, members in groups.items()
    ]


def _sum(name: str, rows: Iterable[Row], *, shape: Shape) -> Row:
    members = list(rows)
    return Row(
        name=name,
        kind=f"{len(members)} operators",
        shape=shape,
        num_parameters=sum(row.num_parameters for row in members),
        cost=sum((row.cost for row in members), Cost()),
        saved_bytes=sum(row.saved_bytes for row in members),
    )

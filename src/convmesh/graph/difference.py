"""What differs between two graphs, in words."""

from __future__ import annotations

import dataclasses

from convmesh.graph.graph import Graph, Node


def differences(first: Graph, second: Graph) -> list[str]:
    """Compares two graphs node for node.

    Args:
        first: A graph.
        second: Another.

    Returns:
        One line per difference; none for equal graphs. Nodes that only one graph has come first.
    """
    mine, theirs = ({node.name: node for node in graph} for graph in (first, second))
    found = [f"{name}: only in the first" for name in mine if name not in theirs]
    found += [f"{name}: only in the second" for name in theirs if name not in mine]
    for name, node in mine.items():
        if name in theirs:
            found += [f"{name}: {line}" for line in _node_differences(node, theirs[name])]
    if not found and [node.name for node in first] != [node.name for node in second]:
        found.append("the same operators in another order")
    if first.outputs != second.outputs:
        found.append(f"outputs: {_listed(first.outputs)} and {_listed(second.outputs)}")
    return found


def _node_differences(first: Node, second: Node) -> list[str]:
    found = []
    for entry in dataclasses.fields(Node):
        mine, theirs = getattr(first, entry.name), getattr(second, entry.name)
        if not entry.compare or mine == theirs:
            continue
        if entry.name == "attributes":
            keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
            found += [f"{key} {mine.get(key)} and {theirs.get(key)}" for key in keys]
        else:
            found.append(f"{entry.name.replace('_', ' ')} {_listed(mine)} and {_listed(theirs)}")
    return found


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

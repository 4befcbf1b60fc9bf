"""Mistakes in what a plan says, found against the graph."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping

from convmesh.errors import ConfigError, ConvMeshError, ModelError
from convmesh.graph import Block, Edge, Graph, Node, node_splits
from convmesh.plan.placement import Shard
from convmesh.plan.plan import CHANNEL, CHANNEL_SPLITS, DATA, DATA_SPLITS, Choice, Entry, Plan
from convmesh.plan.resolved import Resolved


def entry_mistakes(graph: Graph, plan: Plan) -> list[ConvMeshError]:
    """Entries that mean no operator, or none that can be split so, and what an axis does not split.

    Args:
        graph: The network.
        plan: The plan.

    Returns:
        The mistakes, in the order of the plan.
    """
    return [error for entry in plan.entries for error in (*_unmatched(graph, entry), *_wrong_axes(entry))]


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


def split_twice(
    graph: Graph, on_channel: Mapping[str, Resolved], on_data: Mapping[str, Resolved]
) -> list[ConvMeshError]:
    """Operators that are split by channels along both axes.

    Args:
        graph: The network.
        on_channel: What becomes of each operator on the channel axis.
        on_data: The same on the data axis.

    Returns:
        One error per operator that the plan has to name; those that follow it are not listed.
    """
    twice = [node for node in graph if _is_split(on_channel[node.name]) and _is_split(on_data[node.name])]
    weighty = [node for node in twice if node.parameters]
    return [
        ConfigError(
            f"{node.name} would be split by channels along the axes channel and data at once",
            got=f"channel: {on_channel[node.name].split}, data: {on_data[node.name].split}",
            expected="one of them",
            fix=f"Set '{node.name}: {{channel: whole}}', or '{node.name}: {{data: samples}}'",
        )
        for node in weighty or twice
    ]


def exchanged_in(recomputed: Iterable[Block], on_data: Mapping[str, Resolved]) -> list[ConvMeshError]:
    """Recomputed blocks in which samples are exchanged for channels.

    Args:
        recomputed: Blocks that the backward computes again.
        on_data: What becomes of each operator on the data axis.

    Returns:
        One error per block.
    """
    found: list[ConvMeshError] = []
    for block in recomputed:
        moving = [name for name in block.nodes if _is_split(on_data[name]) or not on_data[name].changes_nothing]
        if moving:
            found.append(
                ConfigError(
                    f"the block {block.name} can't be recomputed: {moving[0]} exchanges samples along the axis 'data'",
                    fix=f"Leave {block.name} out of 'recompute', or set '{moving[0]}: {{data: samples}}'",
                )
            )
    return found


def _is_split(entry: Resolved) -> bool:
    return entry.split not in ("whole", "samples") or any(isinstance(output, Shard) for output in entry.outputs)


def _wrong_axes(entry: Entry) -> Iterator[ConvMeshError]:
    for axis, choice in entry.axes.items():
        if axis not in (CHANNEL, DATA):
            yield ConfigError(
                f"the plan splits '{entry.pattern}' along the axis '{axis}'",
                expected="channel or data",
                fix=f"Remove '{axis}' from '{entry.pattern}'",
            )
        elif axis == DATA:
            yield from _wrong_on_data(entry, choice)
        elif choice.split not in CHANNEL_SPLITS or choice.output == "samples":
            yield ConfigError(
                f"the plan splits samples of '{entry.pattern}' along the axis 'channel', whose ranks have the same",
                expected=f"one of {', '.join(CHANNEL_SPLITS)}",
                fix="Use the axis data: it splits samples, and channels where the plan says so",
            )


def _wrong_on_data(entry: Entry, choice: Choice) -> Iterator[ConvMeshError]:
    if choice.split not in DATA_SPLITS or choice.output == "whole":
        what = "split" if choice.split not in DATA_SPLITS else "output"
        yield ConfigError(
            f"the plan keeps '{entry.pattern}' whole along the axis 'data', whose ranks have samples of their own",
            got=f"{what}: whole",
            expected=f"{what}: samples",
            fix=f"Write '{what}: samples' for '{entry.pattern}'",
        )

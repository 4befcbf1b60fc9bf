"""What recomputing blocks of a network keeps, and what it computes again.

Not every operator of a block is run again: the last addition of a residual block without an activation after it keeps
nothing, and nobody in the block needs its result. What is run again is what the kept tensors are made of.

| question | answer |
|---|---|
| bytes kept by each operator, and there again in a block's backward | ``kept_with``; per rank of a plan |
| | `convmesh.plan.activations.rank_activations` |
| which operators run again | ``repeated`` |
| what they compute | ``recomputation_cost`` |
| what they communicate | `convmesh.plan.collectives`, of a plan whose ``execution`` names the blocks |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convmesh.graph import saved
from convmesh.graph.blocks import Block
from convmesh.graph.costs import Cost
from convmesh.graph.graph import Graph
from convmesh.graph.rules import KEEPS, node_cost
from convmesh.graph.saved import Activations, Storages


@dataclass(frozen=True)
class Repeated:
    """What happens again when a block is recomputed.

    Args:
        run: Operators that are run again.
        used: Those whose output, as others take it, is needed again.
        taking: Those whose input is needed again, as they take it: they run, or keep it for their own backward.
    """

    run: frozenset[str]
    used: frozenset[str]
    taking: frozenset[str]


def kept_with(graph: Graph, blocks: Sequence[Block], *, storages: Storages | None = None) -> Activations:
    """What each operator keeps if some blocks are recomputed.

    Args:
        graph: The network.
        blocks: Blocks of it that share no operator.
        storages: Where tensors lie; those of the whole network if left out.

    Returns:
        Bytes by operator, kept from forward to backward and again in a block's own backward. At the backward of a block
        a device holds what the operators up to it keep, and what those of the block hold again.
    """
    return saved.activations(
        graph,
        KEEPS,
        recomputed=[frozenset(block.nodes) for block in blocks],
        inputs_of=[block.input for block in blocks],
        storages=storages,
    )


def repeated(graph: Graph, block: Block) -> Repeated:
    """What happens again when a block is recomputed.

    Args:
        graph: The network.
        block: One of its blocks.

    Returns:
        Names of its operators.
    """
    inside = frozenset(block.nodes)
    run: set[str] = set()
    used: set[str] = set()
    keeping: set[str] = set()
    for name in block.nodes:
        node = graph.node(name)
        if name not in graph.needs_gradient:
            continue
        kept = KEEPS[node.kind](graph, node)
        makers = {edge.node for edge in kept.tensors}
        if kept.num_bytes or name in makers:
            run.add(name)
        if makers - {name}:
            keeping.add(name)
        used |= (makers - {name}) & inside
    open_ = list(run | used)
    while open_:
        name = open_.pop()
        run.add(name)
        for edge in graph.node(name).inputs:
            if edge.node in inside and edge.node not in used:
                used.add(edge.node)
                open_.append(edge.node)
    return Repeated(frozenset(run), frozenset(used), frozenset(run | keeping))


def recomputation_cost(graph: Graph, blocks: Sequence[Block]) -> Cost:
    """What recomputing blocks computes besides: the forward of all operators that run again.

    Args:
        graph: The network; of a rank's part, that with the rank's shapes.
        blocks: Its blocks that are recomputed.

    Returns:
        Multiply-adds and FLOPs; the backward stays as it is.
    """
    names = frozenset().union(*(repeated(graph, block).run for block in blocks))
    costs = (node_cost(graph, graph.node(name)) for name in names)
    return sum((Cost(cost.multiply_adds, cost.flops_forward) for cost in costs), Cost())

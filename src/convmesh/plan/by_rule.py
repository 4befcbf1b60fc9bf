"""A plan by rule, without search or measurement.

Each convolution and dense layer takes the cheaper of gathering its input and scattering its output, by the bytes that a
rank receives per update over a ring of k ranks. With ``B_in`` and ``B_out`` the bytes of its whole input and output, in
units of ``(k - 1) / k``:

| split | input sharded | input whole |
|---|---|---|
| ``out_channels`` | 2 B_in + B_in: all-gathers; reduce-scatter of the gradient | 2 B_in: all-reduce of the gradient |
| ``in_channels`` | 2 B_out: reduce-scatter; all-gather backward | 2 B_out + B_in: all-gather of the gradient |
| ``whole`` | B_in: all-gather | 0 |

What concerns the gradient of an input that takes none, like the image, is not counted: the first convolution, split by
``out_channels``, communicates nothing. A layer whose output the network returns has to end whole: ``in_channels`` then
all-reduces forward and communicates nothing backward, ``out_channels`` gathers, B_out more.

Whole stay: layers with too few channels for the ranks, what can't be replaced, and layers whose work per rank is below
``MIN_MULTIPLY_ADDS``, unless a split moves less than making their input whole. Grouped and depthwise convolutions are
split by whole groups, at no cost.

Layers make channels that are split into pieces later with a partition in which every rank has a part of each piece
(`convmesh.plan.pieces`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from convmesh.graph import Edge, Graph, Node, node_cost, node_splits
from convmesh.graph.graph import SOURCES
from convmesh.mesh import Mesh
from convmesh.plan import followers
from convmesh.plan.along import REDUCTIONS, works_along
from convmesh.plan.network import network_facts
from convmesh.plan.pieces import partitions_for_pieces
from convmesh.plan.plan import CHANNEL, Choice, Entry, Plan
from convmesh.plan.resolve import hosts
from convmesh.plan.weighted import WEIGHTED, Weighted

MIN_MULTIPLY_ADDS = 100_000
"""Work per rank and micro-batch below which a layer is not split: about what a core does while one small collective of
Gloo takes place (0.1 ms at 1 to 10 GFLOP/s, against 0.2 to 0.7 ms for 100 kB on two ranks of one machine)."""


def plan_by_rule(graph: Graph, mesh: Mesh, *, min_multiply_adds: int = MIN_MULTIPLY_ADDS) -> Plan:
    """Makes a plan for a network; see the module for the rule.

    Args:
        graph: The network, with the samples of one micro-batch.
        mesh: The ranks.
        min_multiply_adds: Work per rank and micro-batch below which a layer stays whole.

    Returns:
        The plan, with one entry for each convolution and dense layer.
    """
    rule = _Rule(graph, mesh.size(CHANNEL), min_multiply_adds)
    entries = [Entry(pattern=name, axes={CHANNEL: choice}) for name, choice in rule.choices().items()]
    return Plan(mesh=mesh, entries=tuple(entries), network=network_facts(graph))


class _Rule:
    """The rule and what is sharded so far."""

    def __init__(self, graph: Graph, num_ranks: int, min_multiply_adds: int) -> None:
        self._graph = graph
        self._num_ranks = num_ranks
        self._min_multiply_adds = min_multiply_adds
        self._hosts = hosts(graph)
        self._partitions = partitions_for_pieces(graph, num_ranks)
        self._sharded: set[Edge] = set()

    def choices(self) -> dict[str, Choice]:
        """Node name to choice, for all weighted operators."""
        found: dict[str, Choice] = {}
        for node in self._graph:
            if node.kind in WEIGHTED:
                choice = found[node.name] = self._with_partition(node, self._choose(node))
                sharded = choice.split != "whole" and choice.output == "sharded"
            else:
                sharded = self._stays_sharded(node)
            if sharded:
                self._sharded |= {Edge(node.name, output) for output in range(len(node.output_shapes))}
        return found

    def _with_partition(self, node: Node, choice: Choice) -> Choice:
        makes_own = choice.split == "out_channels" or (choice.split == "in_channels" and choice.output == "sharded")
        lists = self._partitions.get(node.name) if makes_own else None
        return choice if lists is None else replace(choice, partition=lists)

    def _stays_sharded(self, node: Node) -> bool:
        if node.kind in SOURCES or (node.kind in REDUCTIONS and works_along(self._graph, node)):
            return False
        if followers.needs_whole(self._graph, node, replaceable=node.name in self._hosts) is not None:
            return False
        return any(edge in self._sharded for edge in node.inputs)

    def _choose(self, node: Node) -> Choice:
        layer, k = Weighted(node=node), self._num_ranks
        allowed = node_splits(self._graph, node).allowed
        weight = node.parameter("weight")
        replaceable = node.name in self._hosts and weight and weight.name.rpartition(".")[0] == node.module
        if not replaceable or (node.kind == "dense" and len(node.shape) != 2):
            return Choice(split="whole")
        if "groups" in allowed:
            return Choice(split="groups" if layer.groups >= k else "whole")
        is_last = Edge(node.name) in self._graph.outputs
        costs: dict[Choice, int] = {}
        if node_cost(self._graph, node).multiply_adds < k * self._min_multiply_adds:
            edge = node.inputs[0]
            costs[Choice(split="whole")] = self._num_bytes(edge) if edge in self._sharded else 0
        if layer.num_out >= k:
            costs[Choice(split="out_channels")] = self._gather_bytes(node, is_last)
        if layer.num_in >= k and (is_last or layer.num_out >= k):
            output = Choice(split="in_channels", output="whole" if is_last else "sharded")
            costs[output] = self._scatter_bytes(node)
        return min(costs, key=costs.__getitem__, default=Choice(split="whole"))

    def _gather_bytes(self, node: Node, is_last: bool) -> int:
        edge = node.inputs[0]
        takes_gradient = edge.node in self._graph.needs_gradient
        times = 2 + takes_gradient if edge in self._sharded else 2 * takes_gradient
        return times * self._num_bytes(edge) + (node.output_bytes if is_last else 0)

    def _scatter_bytes(self, node: Node) -> int:
        edge = node.inputs[0]
        slice_bytes = 0 if edge in self._sharded else self._num_bytes(edge)
        return 2 * node.output_bytes + (slice_bytes if edge.node in self._graph.needs_gradient else 0)

    def _num_bytes(self, edge: Edge) -> int:
        return math.prod(self._graph.shape(edge)) * self._graph.node(edge.node).element_bytes

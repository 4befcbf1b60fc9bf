"""Tables of costs: what each way of each operator costs a rank, in the form that `convmesh.planner.assignment` takes.

The seconds are those of `convmesh.planner.seconds`, operator by operator; ways that differ in names alone are looked up
once. Bytes are a floor: what lasts from update to update, and what forwards keep for backwards, each tensor at the
first operator that may keep it. Judged is every plan by `convmesh.planner.predict` in the end.

Where ranks of the channel axis hold unequal parts, the first one holds most, since partitions are contiguous: it is the
slowest, and all figures are its own.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from convmesh.graph import Block, Edge, Graph, Node, repeated
from convmesh.graph.graph import BUFFERS
from convmesh.graph.recomputation import Repeated
from convmesh.graph.rules import KEEPS
from convmesh.graph.saved import Whole, what_is_kept
from convmesh.mesh import Mesh
from convmesh.plan import CHANNEL, Plan, Resolved, ResolvedPlan
from convmesh.plan.activations import RankStorages
from convmesh.plan.collectives import operator_collectives
from convmesh.plan.placement import Placement
from convmesh.plan.repetition import Repetition, repetition_in
from convmesh.planner.assignment import Problem
from convmesh.planner.bills import Bill, Bills, WayCosts
from convmesh.planner.curves import Floats
from convmesh.planner.links import group_shape
from convmesh.planner.seconds import NOTHING, CostModel, Work, fork_pieces, input_piece
from convmesh.planner.signature import Piece, signature_of
from convmesh.planner.ways import Way, list_ways

TOLD_SAMPLES = (2, 3)
"""Samples of the micro-batches from which those of any number follow; with a single one, spread shapes look alike."""


_NOTHING_AGAIN = Repetition(frozenset(), frozenset(), frozenset())


class Tables:
    """The ways of a network on a channel axis of one size.

    Args:
        graph: The network, at any number of samples.
        num_ranks: Ranks on the channel axis.
        blocks: Its blocks.
        graph_of: The network at so many samples, in the types in which it computes.
    """

    def __init__(
        self, graph: Graph, num_ranks: int, blocks: Sequence[Block], *, graph_of: Callable[[int], Graph]
    ) -> None:
        self._graph = graph
        self._graph_of = graph_of
        self._bills: dict[tuple[tuple[int, ...], bool], Bills] = {}
        self._num_ranks = num_ranks
        self.ways = list_ways(graph, num_ranks)
        self.problem = Problem([[way.ports for way in own] for own in self.ways.values()])
        self._flat = [(graph.node(name), way) for name, own in self.ways.items() for way in own]
        self._block_of = {name: block for block in blocks for name in block.nodes}
        self._again = {block.name: repeated(graph, block) for block in blocks}
        self._firsts = _first_keepers(graph, frozenset())
        self._outside = _first_keepers(graph, frozenset(self._block_of))
        self._entries = _entries(graph, blocks, self._outside)
        self._whole = {name: own[0].resolved for name, own in self.ways.items()}

    def chosen(self, options: Sequence[int]) -> dict[str, Way]:
        """Operator to way, from the numbers that the problem's solution names."""
        return {name: own[number] for (name, own), number in zip(self.ways.items(), options, strict=True)}

    def total(self, values: Floats, options: Sequence[int]) -> float:
        """The sum of a value per way over chosen ways."""
        return float(values[self._starts + np.asarray(options)].sum())

    def places(self, ways: Mapping[str, Way]) -> dict[str, int]:
        """Operator to the place of its way among all ways."""
        numbers = (own.index(ways[name]) for name, own in self.ways.items())
        return {name: int(start) + number for name, start, number in zip(ways, self._starts, numbers, strict=True)}

    def first_place(self, name: str) -> int:
        """The place of an operator's first way among all ways."""
        return int(self._starts[list(self.ways).index(name)])

    @cached_property
    def _starts(self) -> npt.NDArray[np.intp]:
        return np.cumsum([0, *(len(own) for own in self.ways.values())])[:-1]

    @cached_property
    def parameter_bytes(self) -> dict[str, Floats]:
        """Per way the bytes that a rank holds of ``trained`` parameters, of ``frozen`` ones, and of ``buffers``.

        Besides, of the trained ones those that are ``whole`` on every rank.
        """
        owners: dict[str, str] = {}
        for node in self._graph:
            for entry in node.parameters:
                owners.setdefault(entry.name, node.name)
        sums = {kind: np.zeros(len(self._flat)) for kind in ("trained", "frozen", "buffers", "whole")}
        for place, (node, way) in enumerate(self._flat):
            for entry in node.parameters:
                if owners[entry.name] == node.name:
                    shard = way.resolved.shards.get(entry.name)
                    share = 1.0 if shard is None else len(shard.lists[0]) / entry.shape[shard.dim]
                    kind = "trained" if entry.trainable else "frozen"
                    kind = "buffers" if entry.role in BUFFERS else kind
                    num_bytes = entry.num_elements * node.element_bytes
                    sums[kind][place] += share * num_bytes
                    if kind == "trained" and shard is None:
                        sums["whole"][place] += num_bytes
        return sums

    def costs(self, model: CostModel, mesh: Mesh, num_samples: int, *, recomputing: bool = False) -> WayCosts:
        """What the ways cost where nothing is recomputed, or what recomputing all blocks costs besides.

        Args:
            model: The devices.
            mesh: The ranks.
            num_samples: Samples of one micro-batch.
            recomputing: Whether it is the latter; then kept bytes are those that are still kept.

        Returns:
            The costs.

        Raises:
            ConfigError: If the cluster says nothing of links that the mesh needs.
            ModelError: If the network can't be told for another number of samples.
        """
        # What was measured holds for these very shapes; all else follows from two numbers of samples.
        told = (num_samples,) if model.cluster.measured else TOLD_SAMPLES
        key = told, recomputing
        if key not in self._bills:
            plan = Plan(mesh=mesh)
            self._bills[key] = Bills({number: self._listed(model, plan, number, recomputing) for number in told})
        group = group_shape(mesh, CHANNEL, devices_per_node=model.cluster.devices_per_node)
        found = self._bills[key].priced(model, group, num_samples)
        return WayCosts(found.seconds[self._distinct[1]], found.kept_bytes[self._distinct[1]])

    def _listed(self, model: CostModel, plan: Plan, num_samples: int, recomputing: bool) -> list[Bill]:
        graph, found = self._graph_of(num_samples), []
        for name, way in self._distinct[0]:
            node = graph.node(name)
            pricing = _Pricing(self, model, self._resolved(graph, plan, node, way))
            found.append(pricing.recomputing(node) if recomputing else pricing.keeping(node))
        return found

    @cached_property
    def _distinct(self) -> tuple[list[tuple[str, Way]], npt.NDArray[np.intp]]:
        """An operator and a way of each kind that costs alike, and for every way the number of its kind."""
        flags = {name: self._flags(self._graph.node(name)) for name in self.ways}
        known: dict[Hashable, int] = {}
        examples: list[tuple[str, Way]] = []
        numbers = []
        for node, way in self._flat:
            number = known.setdefault((way.alike, *flags[node.name]), len(known))
            if number == len(examples):
                examples.append((node.name, way))
            numbers.append(number)
        return examples, np.asarray(numbers)

    def _resolved(self, graph: Graph, plan: Plan, node: Node, way: Way) -> ResolvedPlan:
        """A plan of which the entries of this operator, and of those that make its inputs, are right."""
        made: dict[str, list[Placement]] = {}
        for edge, place in zip(node.inputs, way.sources, strict=True):
            outputs = made.setdefault(edge.node, [place] * len(graph.node(edge.node).output_shapes))
            outputs[edge.output] = place
        makers = {
            name: Resolved(node=name, split="", output=outputs[0], more_outputs=tuple(outputs[1:]))
            for name, outputs in made.items()
        }
        operators = ChainMap({**makers, node.name: way.resolved}, self._whole)
        return ResolvedPlan(graph=graph, plan=plan, operators=operators)

    def _flags(self, node: Node) -> tuple[Hashable, ...]:
        """What else an operator's costs depend on: its part in a block, and which tensors it is the first to keep."""
        again = self.repeated(node)
        roles = () if again is None else tuple(node.name in names for names in vars(again).values())
        kept = self.kept_here(node), self.kept_here(node, recomputing=True)
        return kept, roles, self.entering(node) is not None

    def block(self, node: Node) -> Block | None:
        """The block that an operator belongs to."""
        return self._block_of.get(node.name)

    def repeated(self, node: Node) -> Repeated | None:
        """What happens again in that block."""
        block = self.block(node)
        return None if block is None else self._again[block.name]

    def kept_here(self, node: Node, *, recomputing: bool = False) -> tuple[bool, ...]:
        """For each input and the first output, whether this operator is the first that may keep it."""
        firsts = self._outside if recomputing else self._firsts
        return tuple(firsts.get(edge) == node.name for edge in (*node.inputs, Edge(node.name)))

    def entering(self, node: Node) -> Edge | None:
        """The input of a block that is counted at this operator when blocks are recomputed."""
        return self._entries.get(node.name)


def _first_keepers(graph: Graph, ignored: frozenset[str]) -> dict[Edge, str]:
    """Tensor to the first operator that keeps it in an undivided network; a view stands for what it views."""
    where = Whole(graph)
    roots: dict[Hashable, str] = {}
    for node in graph:
        if node.name not in ignored:
            for root in what_is_kept(graph, node, KEEPS, where)[0]:
                roots.setdefault(root, node.name)
    edges = [Edge(node.name, output) for node in graph for output in range(len(node.output_shapes))]
    return {edge: roots[where.given(edge)] for edge in edges if where.given(edge) in roots}


def _entries(graph: Graph, blocks: Sequence[Block], outside: Mapping[Edge, str]) -> dict[str, Edge]:
    """The first user of each block's input to that input, unless an operator outside of blocks keeps it anyway."""
    found: dict[Edge, str] = {}
    for block in blocks:
        if block.input not in outside:
            user = next(name for name in block.nodes if block.input in graph.node(name).inputs)
            found.setdefault(block.input, user)
    return {user: edge for edge, user in found.items()}


class _Pricing:
    """The costs of one way."""

    def __init__(self, tables: Tables, model: CostModel, resolved: ResolvedPlan) -> None:
        self._tables = tables
        self._model = model
        self._resolved = resolved
        self._graph = resolved.graph

    def keeping(self, node: Node) -> Bill:
        """What it costs where nothing is recomputed."""
        pieces, seconds = self._work(node)
        return Bill(
            pieces=(*pieces, *fork_pieces(self._resolved, node, 0)),
            messages=self._messages(node, _NOTHING_AGAIN, 1),
            seconds=seconds.forward_seconds + seconds.backward_seconds,
            kept_bytes=self._kept_bytes(node, self._tables.kept_here(node)),
        )

    def recomputing(self, node: Node) -> Bill:
        """What it costs besides, and still keeps, where all blocks are recomputed."""
        block, source = self._tables.block(node), self._tables.entering(node)
        if block is None:
            return Bill(kept_bytes=self._kept_bytes(node, self._tables.kept_here(node, recomputing=True)))
        again, entry = self._tables.repeated(node), self._resolved.operators[node.name]
        pieces, seconds = self._work(node)
        runs = again is not None and node.name in again.run
        messages: tuple[tuple[str, int, int], ...] = ()
        if again is not None and (entry.before.kind != "none" or entry.after.kind != "none" or entry.along):
            repetition = repetition_in(self._resolved, [node.name], again)
            messages = self._messages(node, repetition, 1) + self._messages(node, _NOTHING_AGAIN, -1)
        return Bill(
            pieces=pieces[:1] if runs else (),
            messages=messages,
            seconds=seconds.forward_seconds if runs else 0.0,
            kept_bytes=self._edge_bytes(source) if source is not None else 0.0,
        )

    def _work(self, node: Node) -> tuple[tuple[Piece, ...], Work]:
        """The pieces of its forward and of its backward, or what was measured of them."""
        signature = signature_of(self._resolved, node)
        if signature is None:
            return ((input_piece(self._resolved, node, 0),) if node.kind == "input" else ()), NOTHING
        if self._model.measured(signature):
            return (), self._model.work(signature)
        return signature.pieces, NOTHING

    def _messages(self, node: Node, again: Repetition, times: int) -> tuple[tuple[str, int, int], ...]:
        entry = self._resolved.operators[node.name]
        if entry.before.kind == entry.after.kind == "none" and not entry.summed and not entry.along:
            return ()
        found = operator_collectives(self._resolved, [node], again=again)[node.name]
        return tuple((*message, times) for message in found)

    def _kept_bytes(self, node: Node, counted: tuple[bool, ...]) -> float:
        where = RankStorages(self._resolved, 0)
        roots, num_bytes = what_is_kept(self._graph, node, KEEPS, where)
        *inputs, own = counted
        first = {where.taken(node, edge): (edge, counts) for edge, counts in zip(node.inputs, inputs, strict=True)}
        total = float(num_bytes)
        for root in roots:
            edge, counts = first.get(root, (None, own))
            # What a change at the border makes is this operator's alone.
            if isinstance(root, tuple) and root[0] != "given":
                total += where.num_bytes(root)
            elif counts:
                total += self._edge_bytes(edge if edge is not None else Edge(node.name))
        return total

    def _edge_bytes(self, edge: Edge) -> float:
        node = self._graph.node(edge.node)
        if node.kind == "parameter":
            return 0.0
        return float(math.prod(self._resolved.local_shape(edge, 0)) * node.element_bytes)

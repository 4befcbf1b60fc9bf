"""The ways in which each operator can run on the channel axis, and the plan that makes it run so.

A way is what `convmesh.plan.resolve` makes of an operator: where its inputs are, what its module changes at its border,
where its output is. Listed are those that a plan can ask for by name:

- convolutions and dense layers: every split that is exact and possible, from a whole input and from a split one;
- other operators that are a module of their own: following their input, or making it whole or split at their border;
- all others: following their inputs, which have to agree.

What is spread over split channels, as one value per pixel, is lent for it where it is made.

A parameter used by itself is split where what it meets is. What the network returns ends whole. Nothing is left for
`resolve` to bring together, so that it does exactly what was counted. Partitions are contiguous, or such that every
rank has a part of each piece into which channels are split later.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from convmesh.graph import Edge, Graph, Node
from convmesh.plan import followers, weighted
from convmesh.plan.merging import Conflict, merge
from convmesh.plan.pieces import partitions_for_pieces
from convmesh.plan.placement import Lent, ParameterShard, Placement, Replicate, Shard, change_between
from convmesh.plan.plan import CHANNEL, Choice, Entry
from convmesh.plan.resolve import aligned_dims, hosts, not_replaceable
from convmesh.plan.resolved import Resolved
from convmesh.planner.lending import lenders

_CHOICES = (
    Choice(split="whole"),
    Choice(split="out_channels"),
    Choice(split="out_channels", keep_input=True),
    Choice(split="in_channels"),
    Choice(split="in_channels", output="whole"),
    Choice(split="groups"),
)
_MOST_COMBINATIONS = 16
"""Placements of several inputs that are tried; beyond, only all whole and all split."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way in which an operator can run.

    Args:
        sources: Where each of its inputs is.
        choice: What a plan says about it; None if nothing.
        resolved: What becomes of it.
        ports: What neighbours have to agree on, for `convmesh.planner.assignment`: each tensor to the number of its
            placement, and each parameter that operators share to the number of its split.
        alike: Ways with the same number do the same but for names.
    """

    sources: tuple[Placement, ...]
    choice: Choice | None
    resolved: Resolved
    ports: Mapping[str, int] = field(default_factory=dict)
    alike: int = 0


def list_ways(graph: Graph, num_ranks: int) -> dict[str, tuple[Way, ...]]:
    """Lists the ways of all operators.

    Args:
        graph: The network.
        num_ranks: Ranks on the channel axis.

    Returns:
        Node name to its ways, of which the first leaves everything whole, in the order of the graph.
    """
    lister = _Lister(graph, num_ranks)
    return {node.name: lister.ways(node) for node in graph}


def entries_of(ways: Mapping[str, Way]) -> tuple[Entry, ...]:
    """What a plan says so that every operator runs in a given way.

    Args:
        ways: Node name to way.

    Returns:
        One entry for each convolution and dense layer, and for each other operator that changes its input.
    """
    return tuple(
        Entry(pattern=name, axes={CHANNEL: way.choice}) for name, way in ways.items() if way.choice is not None
    )


class _Lister:
    """Where tensors can be, as far as the walk has come."""

    def __init__(self, graph: Graph, num_ranks: int) -> None:
        self._graph = graph
        self._num_ranks = num_ranks
        self._hosts = hosts(graph)
        self._places: dict[str, tuple[tuple[Placement, ...], ...]] = {}
        self._partitions = partitions_for_pieces(graph, num_ranks)
        self._lenders = lenders(graph, self._hosts) if num_ranks > 1 else frozenset()
        self._known: dict[Hashable, tuple[Node, tuple[Way, ...]]] = {}
        self._num_known = 0
        self._interned: dict[Placement, Placement] = {}
        self._returned = {edge.node for edge in graph.outputs}
        uses = Counter(entry.name for node in graph for entry in node.parameters)
        self._shared = {name: list[object]() for name, count in uses.items() if count > 1}

    def ways(self, node: Node) -> tuple[Way, ...]:
        """The ways of the next operator."""
        key = self._key(node)
        if key not in self._known:
            found = [self._finished(node, way) for way in self._lending(node, self._of(node))]
            kept = [way for way in found if node.name not in self._returned or way.resolved.output == Replicate()]
            self._known[key] = node, tuple(map(self._noted, kept))
        template, known = self._known[key]
        ways = [_renamed(way, template, node) for way in known]
        places: list[tuple[Placement, ...]] = []
        numbers = [_number(way.resolved.outputs, places) for way in ways]
        self._places[node.name] = tuple(places)
        return tuple(
            dataclasses.replace(way, ports={**self._ports(node, way), node.name: number})
            for way, number in zip(ways, numbers, strict=True)
        )

    def _key(self, node: Node) -> Hashable:
        """Equal for operators whose ways differ in names alone."""
        own = tuple((entry.role, entry.shape, entry.trainable) for entry in node.parameters)
        places = tuple(tuple(map(id, self._at(edge))) for edge in node.inputs)
        flags = (
            node.name in self._hosts,
            node.call is not None,
            node.name in self._lenders,
            node.name in self._returned,
            node.name in self._graph.needs_gradient,
            node.kind in weighted.WEIGHTED and not_replaceable(node, self._hosts) is None,
            tuple(edge.node in self._graph.needs_gradient for edge in node.inputs),
        )
        # What a parameter or constant meets, and where it is used, is not told by shapes.
        named = any(kind in ("parameter", "constant") for kind in (node.kind, *self._makers(node)))
        same = tuple(node.inputs.index(edge) for edge in node.inputs)
        shapes = self._graph.input_shapes(node), node.output_shapes
        users = tuple(len(self._graph.consumers(Edge(node.name, place))) for place in range(len(node.output_shapes)))
        attributes = tuple(sorted(node.attributes.items()))
        wanted = self._partitions.get(node.name)
        told = node.kind, node.dtype, attributes, shapes, own, wanted
        return node.name if named else "", *told, places, flags, same, users

    def _at(self, edge: Edge) -> tuple[Placement, ...]:
        """Where a tensor can be."""
        return tuple(outputs[edge.output] for outputs in self._places[edge.node])

    def _makers(self, node: Node) -> list[str]:
        return [self._graph.node(edge.node).kind for edge in node.inputs]

    def _noted(self, way: Way) -> Way:
        """The way with a number of its own, and with the one object of where each output is."""
        output, *more = (self._interned.setdefault(place, place) for place in way.resolved.outputs)
        self._num_known += 1
        resolved = dataclasses.replace(way.resolved, output=output, more_outputs=tuple(more))
        return dataclasses.replace(way, alike=self._num_known, resolved=resolved)

    def _ports(self, node: Node, way: Way) -> dict[str, int]:
        ports = {edge.node: self._at(edge).index(place) for edge, place in zip(node.inputs, way.sources, strict=True)}
        for entry in node.parameters:
            if entry.name in self._shared:
                split = way.resolved.shards.get(entry.name), entry.name in way.resolved.summed
                ports[f"parameter {entry.name}"] = _number(split, self._shared[entry.name])
        return ports

    def _of(self, node: Node) -> Iterator[Way]:
        if not node.inputs:
            yield from self._source(node)
        elif self._num_ranks == 1:
            yield self._whole(node)
        elif node.kind in weighted.WEIGHTED:
            yield from self._weighted(node)
        elif node.kind == "opaque":
            yield self._whole(node)
        elif len(node.inputs) == 1:
            yield from self._follower(node)
        else:
            yield from self._merging(node)

    def _lending(self, node: Node, ways: Iterator[Way]) -> Iterator[Way]:
        """The ways, and those in which the result is for work on own channels."""
        for way in ways:
            yield way
            entry = way.resolved
            taken = any(isinstance(place, Lent) for place in (*way.sources, entry.output))
            if node.name in self._lenders - self._returned and not taken and entry.split != "in_channels":
                after = change_between(entry.output, Lent())
                yield dataclasses.replace(way, resolved=dataclasses.replace(entry, after=after, output=Lent()))

    def _finished(self, node: Node, way: Way) -> Way:
        """The way with what `resolve` does to a result of the network, and with the placements of its other outputs."""
        entry, output = way.resolved, way.resolved.output
        if node.name in self._returned and isinstance(output, Shard) and node.name in self._hosts:
            entry = dataclasses.replace(entry, after=change_between(output, Replicate()), output=Replicate())
        more = entry.more_outputs or tuple(entry.output for _ in node.output_shapes[1:])
        return dataclasses.replace(way, resolved=dataclasses.replace(entry, more_outputs=more))

    def _source(self, node: Node) -> Iterator[Way]:
        yield self._whole(node)
        dims = aligned_dims(self._graph, node) if node.kind == "parameter" else set()
        if self._num_ranks == 1 or len(dims) != 1 or min(dims) < 0:
            return
        dim = dims.pop()
        for place in self._met(node):
            shards = {node.parameters[0].name: ParameterShard(dim, place.lists)}
            entry = Resolved(node=node.name, split="whole", output=place, shards=shards)
            yield Way(sources=(), choice=None, resolved=entry)

    def _met(self, node: Node) -> list[Shard]:
        """The splits that a parameter could meet: contiguous parts of its users' channels."""
        sizes = {user.shape[1] for user in self._graph.consumers(Edge(node.name))}
        lists = [weighted.lists_of(Choice(split="whole"), size, self._num_ranks) for size in sizes]
        return [Shard(own) for own in lists if all(own)]

    def _whole(self, node: Node) -> Way:
        choice = Choice(split="whole") if node.kind in weighted.WEIGHTED else None
        entry = Resolved(node=node.name, split="whole", output=Replicate())
        return Way(sources=tuple(Replicate() for _ in node.inputs), choice=choice, resolved=entry)

    def _weighted(self, node: Node) -> Iterator[Way]:
        if node.name not in self._hosts or len(node.inputs) > 1:
            yield self._whole(node)
            return
        able = not_replaceable(node, self._hosts) is None
        # Where the network returns what it makes, sums end whole whatever was asked for.
        ends_whole = node.name in self._returned
        known: tuple[Choice, ...] = _CHOICES
        if (lists := self._partitions.get(node.name)) is not None:
            makers = (choice for choice in _CHOICES if choice.split != "groups" and choice.output == "sharded")
            known += tuple(dataclasses.replace(choice, partition=lists) for choice in makers if choice.split != "whole")
        choices = [
            choice
            for choice in known
            if not (ends_whole and choice.split == "in_channels" and choice.output == "sharded")
            if choice.split == "whole"
            or (able and not weighted.refusals(self._graph, node, choice, num_ranks=self._num_ranks))
        ]
        for source in dict.fromkeys(self._at(node.inputs[0])):
            for choice in choices if not isinstance(source, Lent) else ():
                if choice.keep_input and source == Replicate():
                    continue
                entry = weighted.place(node, source, choice, num_ranks=self._num_ranks, wanted=None)
                yield Way(sources=(source,), choice=choice, resolved=entry)

    def _follower(self, node: Node) -> Iterator[Way]:
        for source in dict.fromkeys(self._at(node.inputs[0])):
            for choice, chosen in self._chosen(node, source):
                way = followers.follow(
                    self._graph, node, chosen, num_ranks=self._num_ranks, replaceable=node.name in self._hosts
                )
                if way.source == source or (node.name in self._hosts and not isinstance(source, Lent)):
                    yield self._following(node, source, choice, way)

    def _chosen(self, node: Node, source: Placement) -> Iterator[tuple[Choice | None, Placement]]:
        """What a plan can make of an operator's input at its own border."""
        yield None, source
        if node.name not in self._hosts or isinstance(source, Lent):
            return
        if isinstance(source, Shard):
            yield Choice(split="whole"), Replicate()
            return
        split = Choice(split="channels")
        shape = self._graph.input_shapes(node)[0]
        if len(shape) > 1 and not weighted.refusals(self._graph, node, split, num_ranks=self._num_ranks):
            yield split, Shard(weighted.lists_of(split, shape[1], self._num_ranks))

    def _following(self, node: Node, source: Placement, choice: Choice | None, way: followers.Way) -> Way:
        shards = followers.parameter_shards(node, way.source)
        entry = Resolved(
            node=node.name,
            split="channels" if isinstance(way.source, Shard) else "whole",
            before=change_between(source, way.source),
            output=way.output,
            more_outputs=way.more_outputs or (),
            along=way.along,
            shards=shards,
            summed=followers.summed_parameters(node, way.source, shards),
        )
        return Way(sources=(source,), choice=choice, resolved=entry)

    def _merging(self, node: Node) -> Iterator[Way]:
        for sources in self._combinations(node):
            try:
                output, summed = merge(self._graph, node, sources, num_ranks=self._num_ranks)
            except Conflict:
                continue
            split = "channels" if isinstance(output, Shard) else "whole"
            entry = Resolved(node=node.name, split=split, output=output, summed=summed)
            yield Way(sources=sources, choice=None, resolved=entry)

    def _combinations(self, node: Node) -> Iterator[tuple[Placement, ...]]:
        counts = {edge.node: len(self._places[edge.node]) for edge in node.inputs}
        if math.prod(counts.values()) <= _MOST_COMBINATIONS:
            chosen: Sequence[tuple[int, ...]] = list(itertools.product(*map(range, counts.values())))
        else:
            chosen = [tuple(min(number, count - 1) for count in counts.values()) for number in (0, 1)]
        for combination in chosen:
            numbers = dict(zip(counts, combination, strict=True))
            yield tuple(self._places[edge.node][numbers[edge.node]][edge.output] for edge in node.inputs)


def _renamed(way: Way, template: Node, node: Node) -> Way:
    """The same way for another operator, which differs in names alone."""
    resolved = way.resolved
    if template is node:
        return way
    names = {old.name: new.name for old, new in zip(template.parameters, node.parameters, strict=True)}
    renamed = dataclasses.replace(
        resolved,
        node=node.name,
        shards={names[name]: shard for name, shard in resolved.shards.items()},
        summed=tuple(names[name] for name in resolved.summed),
    )
    return dataclasses.replace(way, resolved=renamed)


def _number(value: Any, known: list[Any]) -> int:
    """The place of a value in a list, to which it is added if it is new."""
    if value not in known:
        known.append(value)
    return known.index(value)

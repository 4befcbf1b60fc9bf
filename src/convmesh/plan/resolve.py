"""From a graph and a plan to the placement of every tensor on the channel axis, and on the data axis.

One walk over the operators in order. A weighted operator does what the plan says; the others follow their inputs. Where
a tensor is not as an operator needs it, it is changed at the border of a module: of the operator's own, or of the
nearest one before it that makes the tensor. That decision is noted, and the walk starts again, until nothing is
missing. What can't be brought together is an error; all of them are listed.

| operator, split | input taken | output made |
|---|---|---|
| convolution, dense by ``out_channels`` | whole (gathered) | sharded by the plan's partition |
| by ``in_channels`` | sharded (sliced) | partial sums: reduce-scattered, or all-reduced to whole |
| by ``groups`` | sharded by whole groups | sharded by the same groups |
| ``whole`` | whole (gathered) | whole |
| norms of own channels, pooling, dropout, element-wise | as it is | as it is |
| group norm | sharded by whole groups | the same |
| add, multiply, concat | all alike | alike; a concatenation of own channels |
| flatten | as it is | the features of own channels |
| what works along channels, split of channels | as it is, or whole: `convmesh.plan.along` | |
| opaque operators | whole | whole |

On the data axis the same walk is done where the plan names it. There every rank has own samples where the channel axis
has the whole: what is not named, batch norm (whose statistics are those of own samples) and what works along samples
take and make own samples, and so does the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from convmesh.errors import ConfigError, ConvMeshError, MistakeList, ModelError, raise_all
from convmesh.graph import Block, Edge, Graph, Node, choose_blocks
from convmesh.graph.graph import SOURCES
from convmesh.plan import followers, weighted
from convmesh.plan.entries import entry_mistakes, exchanged_in, split_twice, torn_parameters
from convmesh.plan.merging import Conflict, merge
from convmesh.plan.partitions import contiguous
from convmesh.plan.placement import Lent, ParameterShard, Placement, Replicate, Samples, Shard, change_between
from convmesh.plan.plan import CHANNEL, DATA, Choice, Plan
from convmesh.plan.resolved import Resolved, ResolvedPlan


def resolve(graph: Graph, plan: Plan) -> ResolvedPlan:
    """Applies a plan to a graph.

    Args:
        graph: The network.
        plan: The plan; its mesh says how many ranks the axes have.

    Returns:
        What becomes of every operator and tensor on the channel axis; on the data axis too, as its ``region``, where
        the plan names it and it has several ranks.

    Raises:
        ConvMeshError: If something can't be done exactly; several things are listed together as a ``MistakeList``.
    """
    resolver = _Resolver(graph, plan, axis=CHANNEL)
    operators = resolver.run()
    errors = [*entry_mistakes(graph, plan), *resolver.errors]
    recomputed: tuple[Block, ...] = ()
    try:
        recomputed = choose_blocks(graph, plan.execution.recompute or ())
    except MistakeList as found:
        errors += found.errors
    except ConvMeshError as found:
        errors.append(found)
    region = None
    if plan.names(DATA) and plan.mesh.size(DATA) > 1:
        of_data = _Resolver(graph, plan, axis=DATA)
        region = ResolvedPlan(graph=graph, plan=plan, operators=of_data.run(), axis=DATA)
        errors += of_data.errors or (split_twice(graph, operators, region.operators) if not resolver.errors else [])
        errors += exchanged_in(recomputed, region.operators)
    raise_all(errors)
    return ResolvedPlan(graph=graph, plan=plan, operators=operators, recomputed=recomputed, region=region)


class _Resolver:
    """The walk and what it has decided so far."""

    def __init__(self, graph: Graph, plan: Plan, *, axis: str) -> None:
        self._graph = graph
        self._plan = plan
        self._axis = axis
        self._home: Placement = Samples() if axis == DATA else Replicate()
        self._num_ranks = plan.mesh.size(axis)
        self._hosts = hosts(graph)
        self._wanted: dict[str, Placement] = {}
        self._given_up: set[str] = set()
        self._operators: dict[str, Resolved] = {}
        self.errors: list[ConvMeshError] = []

    def run(self) -> dict[str, Resolved]:
        """Walks until no tensor has to be changed any more."""
        while not self._walk():
            self._operators = {}
        self.errors += torn_parameters(self._graph, self._operators)
        return self._operators

    def _walk(self) -> bool:
        for node in self._graph:
            try:
                entry = self._place(node)
            except Conflict as conflict:
                if self._bring_together(conflict):
                    return False
                self._give_up(node, conflict.error)
                entry = Resolved(node=node.name, split=weighted.unsplit(self._axis), output=self._home)
            more = entry.more_outputs or tuple(entry.output for _ in node.output_shapes[1:])
            self._operators[node.name] = dataclasses.replace(entry, more_outputs=more)
        return all(self._bring_home(edge) for edge in self._graph.outputs)

    def _give_up(self, node: Node, *errors: ConvMeshError) -> None:
        # The walk may come by again; an error is told once.
        if node.name not in self._given_up:
            self._given_up.add(node.name)
            self.errors += errors

    def _placement(self, edge: Edge) -> Placement:
        return self._operators[edge.node].outputs[edge.output]

    def _place(self, node: Node) -> Resolved:
        if node.kind in SOURCES:
            return self._place_source(node)
        if node.kind in weighted.WEIGHTED:
            return self._place_weighted(node)
        if node.kind == "opaque" and self._plan.opaque == "refuse":
            self._refuse_opaque(node)
        return self._place_follower(node) if len(node.inputs) == 1 else self._place_merging(node)

    def _place_source(self, node: Node) -> Resolved:
        placement = self._wanted.get(node.name, self._home)
        shards = {}
        if isinstance(placement, Shard):
            shards[node.parameters[0].name] = ParameterShard(aligned_dims(self._graph, node).pop(), placement.lists)
        return Resolved(node=node.name, split=weighted.unsplit(self._axis), output=placement, shards=shards)

    def _place_weighted(self, node: Node) -> Resolved:
        unsplit = weighted.unsplit(self._axis)
        choice = self._choice(node) or Choice(split=unsplit)
        errors = self._refusals(node, choice)
        if not errors and choice.split != unsplit and (reason := not_replaceable(node, self._hosts)):
            errors = [
                ConfigError(
                    f"{node.name} can't be split by '{choice.split}': {reason}",
                    fix=f"Set '{node.name}: {{{self._axis}: {unsplit}}}', or give it a module of its own",
                )
            ]
        if errors:
            self._give_up(node, *errors)
            choice = Choice(split=unsplit)
        if isinstance(self._placement(node.inputs[0]), Lent):
            raise Conflict([[(node.inputs[0], self._home)]], self._unreachable(node))
        entry = weighted.place(
            node,
            self._placement(node.inputs[0]),
            choice,
            num_ranks=self._num_ranks,
            wanted=self._wanted.get(node.name),
            home=self._home,
        )
        if len(node.inputs) > 1 or (entry.before.kind != "none" and node.name not in self._hosts):
            return self._place_merging(node)
        return entry

    def _choice(self, node: Node) -> Choice | None:
        # One rank holds all channels, whatever would be split among several.
        return self._plan.choice(self._graph, node, self._axis) if self._num_ranks > 1 else None

    def _refusals(self, node: Node, choice: Choice) -> list[ConvMeshError]:
        return weighted.refusals(self._graph, node, choice, axis=self._axis, num_ranks=self._num_ranks)

    def _place_follower(self, node: Node) -> Resolved:
        source = self._placement(node.inputs[0])
        replaceable = node.name in self._hosts
        way = followers.follow(
            self._graph,
            node,
            self._chosen(node, source),
            home=self._home,
            num_ranks=self._num_ranks,
            replaceable=replaceable,
        )
        edge = node.inputs[0]
        if isinstance(source, Lent) and way.source != source:
            raise Conflict([[(edge, self._home)]], self._unreachable(node))
        if way.source != source and not replaceable:
            raise Conflict([[(edge, way.source)], [(edge, self._home)]], self._unreachable(node))
        wanted = self._wanted.get(node.name, way.output)
        shards = followers.parameter_shards(node, way.source)
        return Resolved(
            node=node.name,
            split="channels" if isinstance(way.source, Shard) else weighted.unsplit(self._axis),
            before=change_between(source, way.source),
            after=change_between(way.output, wanted),
            output=wanted,
            more_outputs=way.more_outputs or (),
            along=way.along,
            shards=shards,
            summed=self._summed(followers.summed_parameters(node, way.source, shards)),
        )

    def _chosen(self, node: Node, source: Placement) -> Placement:
        choice = self._choice(node)
        if choice is None:
            return source
        errors = self._refusals(node, choice)
        if errors:
            self._give_up(node, *errors)
        elif choice.split in weighted.UNSPLIT:
            return self._home
        elif source == self._home:
            num_channels = self._graph.input_shapes(node)[0][1]
            return Shard(weighted.lists_of(choice, num_channels, self._num_ranks))
        return source

    def _place_merging(self, node: Node) -> Resolved:
        sources = [self._placement(edge) for edge in node.inputs]
        if node.kind not in weighted.WEIGHTED:
            self._obey(node, sources)
        output, summed = merge(self._graph, node, sources, home=self._home, num_ranks=self._num_ranks)
        wanted = self._wanted.get(node.name, output)
        return Resolved(
            node=node.name,
            split="channels" if isinstance(output, Shard) else weighted.unsplit(self._axis),
            after=change_between(output, wanted),
            output=wanted,
            summed=self._summed(summed),
        )

    def _summed(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Whole parameters used for own channels; over the data axis all whole ones are summed once per update."""
        return () if self._axis == DATA else names

    def _obey(self, node: Node, sources: Sequence[Placement]) -> None:
        """Asks for the inputs that the plan wants an operator with several of them to have."""
        targets = [self._chosen(node, source) for source in sources]
        if node.name in self._given_up or all(
            (target == self._home) == (source == self._home) for target, source in zip(targets, sources, strict=True)
        ):
            return
        if node.kind == "concat" and targets[0] != self._home:
            sizes = [shape[1] for shape in self._graph.input_shapes(node)]
            targets = [Shard(contiguous(size, self._num_ranks)) for size in sizes]
        wide = [
            (edge, target)
            for position, (edge, target) in enumerate(zip(node.inputs, targets, strict=True))
            if target == self._home or followers.channel_extent(self._graph, node, position)[1] > 1
        ]
        raise Conflict([wide], self._unreachable(node))

    def _refuse_opaque(self, node: Node) -> None:
        if any(self._placement(edge) != self._home for edge in node.inputs):
            error = ModelError(
                f"ConvMesh knows no rule for {node.attributes['operator']} ({node.name}), whose input is split",
                fix="Set 'opaque: gather' in the plan to make its input whole, or use a built-in module instead",
            )
            self._give_up(node, error)

    def _bring_home(self, edge: Edge) -> bool:
        if self._placement(edge) == self._home:
            return True
        error = ModelError(
            "the network's output can't be made whole",
            got=f"{edge} is {self._placement(edge)}",
            fix="Let a module of its own make it",
        )
        if self._bring_together(Conflict([[(edge, self._home)]], error)):
            return False
        self._give_up(self._graph.node(edge.node), error)
        return True

    def _bring_together(self, conflict: Conflict) -> bool:
        """Notes the changes of the first alternative for which modules are found."""
        for alternative in conflict.alternatives:
            found: dict[str, Placement] = {}
            if all(self._reach(edge, target, found) for edge, target in alternative) and found:
                self._wanted |= found
                return True
        return False

    def _reach(self, edge: Edge, target: Placement, found: dict[str, Placement]) -> bool:
        """Finds the modules at which a tensor can be changed, going back from it."""
        node = self._graph.node(edge.node)
        if self._placement(edge) == target or found.get(node.name) == target:
            return True
        # What was decided before changes only from split to whole, so that the walks come to an end.
        settled = node.name in self._wanted and (target != self._home or self._wanted[node.name] == self._home)
        if settled or node.name in found:
            return False
        if self._can_change(node, target):
            found[node.name] = target
            return True
        if node.kind in SOURCES or (isinstance(target, Shard) and node.kind not in followers.PASSING):
            return False
        if isinstance(target, Lent) and not followers.lends_on(node):
            return False
        edges = [entry for entry in node.inputs if self._follows(node, entry, target)]
        return bool(edges) and all(self._reach(entry, target, found) for entry in edges)

    def _can_change(self, node: Node, target: Placement) -> bool:
        """Whether an operator's output can be changed where it is made; a parameter, if its users see one dim of it."""
        if any(isinstance(self._placement(edge), Lent) for edge in node.inputs):
            return False  # Its gradient is a summand: what lends is to be changed.
        if isinstance(target, Lent) and (node.kind in SOURCES or self._operators[node.name].split == "in_channels"):
            return False
        if node.kind == "parameter":
            dims = aligned_dims(self._graph, node)
            return len(dims) == 1 and dims.pop() >= 0
        return node.name in self._hosts and len(node.output_shapes) == 1

    def _follows(self, node: Node, edge: Edge, target: Placement) -> bool:
        if target == self._home:
            return self._placement(edge) != self._home
        if isinstance(target, Lent):
            return self._graph.node(edge.node).kind not in ("parameter", "constant")
        return self._graph.shape(edge)[1:2] == node.shape[1:2]

    def _unreachable(self, node: Node) -> ModelError:
        where = f" in {node.module}" if node.module and node.module != node.name else ""
        reason = followers.needs_home(self._graph, node, self._home, replaceable=node.name in self._hosts)
        reason = reason or "it is written as a function, or called several times"
        return ModelError(
            f"{node.name} ({node.kind}{where}) can't work on the split channels of its input: {reason}; and no module "
            "stands before it at which they could be exchanged",
            fix="Give what makes its input a module of its own, or keep the layers before it whole",
        )


def hosts(graph: Graph) -> frozenset[str]:
    """Operators at which something can be changed: modules that compute nothing else and are called once, and calls.

    Args:
        graph: The network.

    Returns:
        Names of the operators.
    """
    calls: dict[str, int] = {}
    for node in graph:
        calls[node.module] = calls.get(node.module, 0) + 1
    return frozenset(
        node.name
        for node in graph
        if node.call is not None or (node.module and node.name == node.module and calls[node.module] == 1)
    )


def not_replaceable(node: Node, hosts: frozenset[str]) -> str | None:
    """Why a convolution or dense layer can't be split, whatever its sizes.

    Args:
        node: The operator.
        hosts: Names of the operators at whose module something can be changed.

    Returns:
        The reason, or None if it can.
    """
    weight = node.parameter("weight")
    if weight is None or weight.name.rpartition(".")[0] != node.module:
        return "its weight is not a parameter of its own module"
    if node.name in hosts:
        return None
    return "its module is called several times or holds other operators too, or it is written as a function"


def aligned_dims(graph: Graph, source: Node) -> set[int]:
    """The dims of a parameter that its users align with channels.

    Args:
        graph: The network.
        source: A parameter that is used by itself.

    Returns:
        The dims; below 0 where a user aligns none, or does something else with it.
    """
    dims = set()
    for user in graph.consumers(Edge(source.name)):
        position = user.inputs.index(Edge(source.name))
        known = user.kind in followers.MERGING and user.kind != "concat"
        dims.add(followers.channel_extent(graph, user, position)[0] if known else -1)
    return dims

"""Blocks: the pieces of a network that recomputation works on.

A block is a module with one tensor in and one tensor out, or a run of children of a module that calls them one after
the other. Its forward keeps its input alone, and its backward computes the rest again.

What is a block where nobody has chosen, from the outside in:

- A module whose inner blocks hold at least half of what it keeps is none itself; its inner blocks are.
- Any other module with weights is one, if what it keeps is more than its input: a residual block, DenseNet's layer, a
  pair of convolutions of a U-Net.
- Children that are called one after the other, each with one layer with weights at most and without branches, are
  joined up to the next pooling: a stage of VGG.

A module whose parameters are used twice, or that is called with several tensors, is no block.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from convmesh.errors import ConfigError, ConvMeshError, raise_all
from convmesh.graph.graph import SOURCES, Edge, Graph, Node
from convmesh.graph.rules import KEEPS, saved_activations
from convmesh.graph.saved import Whole, what_is_kept

_WEIGHTED = ("convolution", "dense")
_POOLING = ("max_pool", "avg_pool", "adaptive_pool")
_RANGE = re.compile(r"(?P<parent>(?:.*\.)?)(?P<first>\d+)-(?P<last>\d+)")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A piece of a network with one tensor in and one tensor out.

    Args:
        name: Path of its module, or of a run of children: ``features.0-4``.
        modules: Paths of its first and last module, which are the same for a single one. Of a run, all children from
            the first to the last are called one after the other.
        nodes: Names of its operators, in the order of the graph.
        input: The tensor that it takes.
        output: The tensor that it makes.
    """

    name: str
    modules: tuple[str, str]
    nodes: tuple[str, ...]
    input: Edge
    output: Edge

    @property
    def is_run(self) -> bool:
        """Whether it is several children of a module."""
        return self.modules[0] != self.modules[1]


def blocks(graph: Graph) -> tuple[Block, ...]:
    """The blocks of a network where nobody has chosen, as the text of this module says.

    Args:
        graph: The network.

    Returns:
        Blocks that share no operator, in the order of the graph.
    """
    return _Tree(graph).blocks()


def block(graph: Graph, name: str) -> Block | None:
    """The block of a name, whether or not it is one of ``blocks``.

    Args:
        graph: The network.
        name: Path of a module, or of a run of its children by number, both ends included: ``features.0-4``.

    Returns:
        The block; None if there is no such module, or it has not one tensor in and one out, or is a single operator.
    """
    tree = _Tree(graph)
    return next((found for found in tree.blocks() if found.name == name), None) or tree.named(name)


def choose_blocks(graph: Graph, names: Sequence[str]) -> tuple[Block, ...]:
    """The blocks that are meant by names and patterns.

    Args:
        graph: The network.
        names: A name means the block of that name (see ``block``); a pattern with ``*`` or ``?`` means those of
            ``blocks`` that it matches. ``*`` matches dots too.

    Returns:
        The blocks, in the order of the graph.

    Raises:
        ConfigError: If a name means nothing, or two blocks share operators.
        MistakeList: If several things are wrong.
    """
    tree = _Tree(graph)
    usual = tree.blocks()
    found: dict[str, Block] = {}
    errors: list[ConvMeshError] = []
    for name in names:
        if any(letter in name for letter in "*?["):
            matched = [entry for entry in usual if fnmatch.fnmatchcase(entry.name, name)]
            if not matched and name != "*":
                errors.append(_unknown(name, usual, tree))
        else:
            exact = next((entry for entry in usual if entry.name == name), None) or tree.named(name)
            matched = [exact] if exact is not None else []
            if exact is None:
                errors.append(_unknown(name, usual, tree))
        found |= {entry.name: entry for entry in matched}
    order = {node.name: place for place, node in enumerate(graph)}
    chosen = tuple(sorted(found.values(), key=lambda entry: order[entry.nodes[0]]))
    raise_all([*errors, *_overlaps(chosen)])
    return chosen


def _unknown(name: str, usual: Sequence[Block], tree: _Tree) -> ConvMeshError:
    names = [entry.name for entry in usual]
    near = difflib.get_close_matches(name, names, n=3) or names[:3]
    reason = f"'{name}' is no block that can be recomputed"
    if tree.has(name):
        reason += ": it has not one tensor in and one out, or is a single operator, or its parameters are used twice"
    fix = f"Name {' or '.join(near)}" if near else "Leave recomputation off: this network has no blocks"
    return ConfigError(reason, fix=f"{fix}; convmesh graph CONFIG --blocks lists them")


def _overlaps(chosen: Sequence[Block]) -> list[ConvMeshError]:
    holder: dict[str, str] = {}
    pairs: dict[tuple[str, str], None] = {}
    for entry in chosen:
        for node in entry.nodes:
            if node in holder:
                pairs[holder[node], entry.name] = None
            holder[node] = entry.name
    return [
        ConfigError(f"the blocks '{one}' and '{other}' to recompute share operators", fix="Name one of them only")
        for one, other in pairs
    ]


class _Tree:
    """The modules of a network and what each holds."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._members: dict[str, list[Node]] = {"": []}
        self._children: dict[str, dict[str, None]] = {}
        self._saved = saved_activations(graph)
        self._where = Whole(graph)
        self._kept = {node.name: what_is_kept(graph, node, KEEPS, self._where) for node in graph}
        self._keepers: dict[Hashable, set[str]] = {}
        for name, (roots, _) in self._kept.items():
            for root in roots:
                self._keepers.setdefault(root, set()).add(name)
        for node in graph:
            if node.kind not in SOURCES:
                self._enter(node)

    def blocks(self) -> tuple[Block, ...]:
        """The blocks where nobody has chosen."""
        order = {node.name: place for place, node in enumerate(self._graph)}
        return tuple(sorted(self._within(""), key=lambda entry: order[entry.nodes[0]]))

    def has(self, path: str) -> bool:
        """Whether there is a module of this path."""
        return bool(path) and path in self._members

    def named(self, name: str) -> Block | None:
        """The block of a name: a module, or a run of children by number."""
        if self.has(name):
            found = self._piece(name)
            return found if found is not None and len(found.nodes) > 1 else None
        match = _RANGE.fullmatch(name)
        if match is None:
            return None
        parent, first, last = match["parent"].removesuffix("."), int(match["first"]), int(match["last"])
        children = [path for path in self._children.get(parent, {}) if _number(path) in range(first, last + 1)]
        pieces = [self._piece(path) for path in sorted(children, key=_number)]
        whole = [piece for piece in pieces if piece is not None]
        joined = all(one.output == other.input for one, other in itertools.pairwise(whole))
        if not whole or len(whole) < len(pieces) or not joined:
            return None
        return self._join(parent, whole)

    def _enter(self, node: Node) -> None:
        parts = node.module.split(".") if node.module else []
        self._members[""].append(node)
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            self._members.setdefault(path, []).append(node)
            self._children.setdefault(".".join(parts[: length - 1]), {})[path] = None

    def _of(self, path: str) -> list[Block]:
        """The blocks of a module: itself, or those within."""
        inner, itself = self._within(path), self._piece(path)
        if itself is None or not self._saves(itself):
            return inner
        held = self._bytes(name for entry in inner for name in entry.nodes)
        covers = any(entry.nodes == itself.nodes for entry in inner)
        return [itself] if covers or 2 * held < self._bytes(itself.nodes) else inner

    def _within(self, path: str) -> list[Block]:
        children = list(self._children.get(path, ()))
        numbered = all(_number(child) >= 0 for child in children)
        found: list[Block] = []
        run: list[Block] = []
        for child in children:
            piece = self._piece(child)
            if piece is None or not numbered or not self._is_simple(piece):
                found += self._close(path, run)
                run = []
                found += self._of(child)
                continue
            if run and run[-1].output != piece.input:
                found += self._close(path, run)
                run = []
            run.append(piece)
            if self._graph.node(piece.nodes[-1]).kind in _POOLING:
                found += self._close(path, run)
                run = []
        return found + self._close(path, run)

    def _close(self, parent: str, run: Sequence[Block]) -> list[Block]:
        joined = self._join(parent, run) if run else None
        return [joined] if joined is not None and self._saves(joined) else []

    def _join(self, parent: str, run: Sequence[Block]) -> Block | None:
        first, last = run[0].modules[0], run[-1].modules[1]
        names = {name for piece in run for name in piece.nodes}
        name = first if first == last else f"{parent}.{_number(first)}-{_number(last)}".removeprefix(".")
        if parent and len(names) == len(self._members[parent]):
            name, first, last = parent, parent, parent
        members = [node for node in self._members[parent] if node.name in names]
        found = self._closed(name, members, modules=(first, last))
        return found if found is not None and len(found.nodes) > 1 else None

    def _piece(self, path: str) -> Block | None:
        return self._closed(path, self._members[path], modules=(path, path))

    def _closed(self, name: str, members: Sequence[Node], *, modules: tuple[str, str]) -> Block | None:
        inside = {node.name for node in members}
        entering = dict.fromkeys(edge for node in members for edge in node.inputs if self._enters(edge, inside, name))
        leaving = [
            Edge(node.name, output)
            for node in members
            for output in range(len(node.output_shapes))
            if self._leaves(Edge(node.name, output), inside)
        ]
        parameters = [entry.name for node in members for entry in node.parameters]
        if len(entering) != 1 or len(leaving) != 1 or len(set(parameters)) < len(parameters):
            return None
        return Block(
            name=name,
            modules=modules,
            nodes=tuple(node.name for node in members),
            input=next(iter(entering)),
            output=leaving[0],
        )

    def _enters(self, edge: Edge, inside: set[str], name: str) -> bool:
        node = self._graph.node(edge.node)
        if node.kind == "parameter":
            # One of another module was handed in as a second argument.
            return not node.name.startswith(f"{name}.") and not _RANGE.fullmatch(name)
        return node.kind != "constant" and edge.node not in inside

    def _leaves(self, edge: Edge, inside: set[str]) -> bool:
        users = self._graph.consumers(edge)
        return edge in self._graph.outputs or any(node.name not in inside for node in users)

    def _is_simple(self, piece: Block) -> bool:
        """Whether it has no branches and at most one layer with weights."""
        nodes = [self._graph.node(name) for name in piece.nodes]
        chain = [Edge(name) for name in piece.nodes[:-1]]
        linear = all(node.inputs[:1] == (edge,) for node, edge in zip(nodes[1:], chain, strict=True))
        single = all(len(node.inputs) == 1 for node in nodes)
        return linear and single and sum(node.kind in _WEIGHTED for node in nodes) <= 1

    def _saves(self, piece: Block) -> bool:
        """Whether it has weights, and keeping its input takes less than what its operators keep."""
        inside = set(piece.nodes)
        source = self._where.given(piece.input)
        roots = {root for name in piece.nodes for root in self._kept[name][0] if self._keepers[root] <= inside}
        own = sum(self._where.num_bytes(root) for root in roots - {source})
        own += sum(self._kept[name][1] for name in piece.nodes)
        more = 0 if self._keepers.get(source) else self._where.num_bytes(source)
        return own > more and any(self._graph.node(name).kind in _WEIGHTED for name in piece.nodes)

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self._saved[name] for name in names)


def _number(path: str) -> int:
    leaf = path.rpartition(".")[2]
    return int(leaf) if leaf.isdigit() else -1

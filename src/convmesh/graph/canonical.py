"""From what an engine traced to a graph that equals the other engine's.

1. Operators that do nothing (casts, copies, reshapes to the same shape) are dropped.
2. A padding that feeds one convolution or pooling becomes that one's own, and reshape-transpose-reshape a channel
   shuffle. The joint operator belongs to the smallest module that holds all its parts; where that module holds others
   too, the parts stay apart, since nothing could be put in their place.
3. Operators are put in the order of a depth-first walk from the outputs along the inputs, which both engines share;
   what no output needs is dropped.
4. Each gets its name: the path of its module if that holds nothing else, or only calls of the same operator; else
   module path and kind. The second use of a name gets ``@2``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from convmesh.graph.fold import fold
from convmesh.graph.graph import SOURCES, Edge, Graph, Node
from convmesh.graph.operator import Operator, Port
from convmesh.graph.rules import RULES, output_shapes


def build_graph(operators: Iterable[Operator], outputs: Sequence[Port]) -> Graph:
    """Makes the graph of a traced network.

    Args:
        operators: All operators, in any order.
        outputs: What the network returns.

    Returns:
        The graph in its canonical form.
    """
    table = {operator.key: operator for operator in operators}
    table, results = _drop_identities(table, outputs)
    table, results = fold(table, results)
    table = {key: _checked(operator, table) for key, operator in table.items()}
    order = _walk(table, results)
    names = _names([table[key] for key in order])
    nodes = tuple(_node(table[key], names) for key in order)
    return Graph(nodes, outputs=tuple(Edge(names[key], output) for key, output in results))


def _drop_identities(
    table: Mapping[str, Operator], outputs: Sequence[Port]
) -> tuple[dict[str, Operator], tuple[Port, ...]]:
    def real(port: Port) -> Port:
        while table[port[0]].kind == "identity":
            port = table[port[0]].inputs[0]
        return port

    kept = {
        key: dataclasses.replace(operator, inputs=tuple(real(port) for port in operator.inputs))
        for key, operator in table.items()
        if operator.kind != "identity"
    }
    return kept, tuple(real(port) for port in outputs)


def _checked(operator: Operator, table: Mapping[str, Operator]) -> Operator:
    """The operator, or an opaque one if the rule of its kind doesn't give the shapes that were traced."""
    known = operator.kind in RULES
    if known:
        shapes = tuple(table[key].output_shapes[output] for key, output in operator.inputs)
        expected = output_shapes(operator.kind, operator.attributes, shapes)
        if expected is None or expected == operator.output_shapes:
            return operator
    origin = operator.origin or operator.kind
    return dataclasses.replace(operator, kind="opaque", attributes={"operator": origin})


def _walk(table: Mapping[str, Operator], outputs: Sequence[Port]) -> list[str]:
    """Keys after all their inputs; depth first, without recursion: networks are deeper than Python's stack."""
    order: dict[str, None] = {key: None for key, operator in table.items() if operator.kind == "input"}
    stack = [(key, False) for key, _ in reversed(outputs)]
    while stack:
        key, inputs_done = stack.pop()
        if key in order:
            continue
        if inputs_done:
            order[key] = None
            continue
        stack.append((key, True))
        stack += [(source, False) for source, _ in reversed(table[key].inputs)]
    return list(order)


def _names(operators: Sequence[Operator]) -> dict[str, str]:
    labels: dict[str, set[str]] = {}
    holders: set[str] = set()
    for operator in operators:
        if operator.kind not in SOURCES:
            labels.setdefault(operator.module, set()).add(operator.label)
    for module in labels:
        parts = module.split(".")
        holders |= {".".join(parts[:length]) for length in range(len(parts))}
    used: dict[str, int] = {}
    names: dict[str, str] = {}
    for operator in operators:
        name = _name(operator, alone=len(labels.get(operator.module, ())) == 1 and operator.module not in holders)
        used[name] = used.get(name, 0) + 1
        names[operator.key] = name if used[name] == 1 else f"{name}@{used[name]}"
    return names


def _name(operator: Operator, *, alone: bool) -> str:
    if operator.kind in SOURCES:
        return operator.key
    if operator.module and alone:
        return operator.module
    return f"{operator.module}.{operator.label}" if operator.module else operator.label


def _node(operator: Operator, names: Mapping[str, str]) -> Node:
    return Node(
        name=names[operator.key],
        kind=operator.kind,
        attributes=dict(operator.attributes),
        inputs=tuple(Edge(names[key], output) for key, output in operator.inputs),
        output_shapes=operator.output_shapes,
        parameters=operator.parameters,
        dtype=operator.dtype,
        module=operator.module,
        call=operator.call,
    )

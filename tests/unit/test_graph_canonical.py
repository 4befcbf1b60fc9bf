"""From traced operators to the one graph that both engines give: order, names, joined operators."""

from __future__ import annotations

from typing import Any

import pytest

from convmesh.graph import Graph, differences
from convmesh.graph import kinds as make
from convmesh.graph.canonical import build_graph
from convmesh.graph.operator import Operator

NO_PADDING = ((0, 0), (0, 0))


def operator(key: str, kind: str, source: str | tuple[str, ...], shape: tuple[int, ...], **more: Any) -> Operator:
    sources = (source,) if isinstance(source, str) else source
    return Operator(key=key, kind=kind, inputs=tuple((name, 0) for name in sources), output_shapes=(shape,), **more)


def source(shape: tuple[int, ...] = (2, 4, 6, 6)) -> Operator:
    return Operator(key="input", kind="input", output_shapes=(shape,))


def relu(key: str, before: str, module: str, shape: tuple[int, ...] = (2, 4, 6, 6)) -> Operator:
    return operator(key, "elementwise", before, shape, attributes={"function": "relu"}, module=module)


def pad(key: str, before: str, module: str, *, value: float = 0.0) -> Operator:
    attributes = {"mode": "constant", "padding": ((0, 0), (0, 0), (1, 0), (2, 1)), "value": value}
    return operator(key, "pad", before, (2, 4, 7, 9), attributes=attributes, module=module)


def max_pool(key: str, before: str, module: str) -> Operator:
    attributes = make.max_pool(kernel=(3, 3), stride=2, padding=NO_PADDING)
    return operator(key, "max_pool", before, (2, 4, 3, 4), attributes=attributes, module=module)


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph]


def test_an_operator_alone_in_its_module_has_the_modules_name() -> None:
    graph = build_graph(
        [source(), relu("a", "input", "block.act"), operator("b", "add", ("a", "input"), (2, 4, 6, 6), module="block")],
        [("b", 0)],
    )
    assert names(graph) == ["input", "block.act", "block.add"]
    assert [node.module for node in graph] == ["", "block.act", "block"]


def test_calls_of_one_module_are_numbered_and_different_operators_of_one_are_named_by_kind() -> None:
    twice = build_graph([source(), relu("a", "input", "act"), relu("b", "a", "act")], [("b", 0)])
    assert names(twice) == ["input", "act", "act@2"]
    mixed = build_graph(
        [source(), relu("a", "input", "act"), operator("b", "multiply", ("input", "a"), (2, 4, 6, 6), module="act")],
        [("b", 0)],
    )
    assert names(mixed) == ["input", "act.relu", "act.multiply"]


def test_the_order_follows_the_inputs_whatever_the_order_of_the_trace() -> None:
    operators = [
        source(),
        relu("left", "input", "left"),
        relu("right", "input", "right"),
        relu("unused", "right", "unused"),
        operator("sum", "add", ("right", "left"), (2, 4, 6, 6)),
    ]
    graph = build_graph(operators, [("sum", 0)])
    assert names(graph) == ["input", "right", "left", "add"]
    assert graph == build_graph(operators[::-1], [("sum", 0)])


def test_a_network_deeper_than_pythons_stack() -> None:
    operators = [source(), *(relu(f"{i}", f"{i - 1}" if i else "input", f"m{i}") for i in range(3000))]
    assert len(build_graph(operators, [("2999", 0)])) == 3001


def test_what_does_nothing_is_dropped() -> None:
    operators = [source(), operator("cast", "identity", "input", (2, 4, 6, 6)), relu("a", "cast", "act")]
    assert names(build_graph(operators, [("a", 0)])) == ["input", "act"]
    assert names(build_graph([*operators, operator("b", "identity", "a", (2, 4, 6, 6))], [("b", 0)])) == [
        "input",
        "act",
    ]


def test_padding_within_the_module_of_a_pooling_becomes_its_own() -> None:
    operators = [
        source(), relu("r", "input", "relu"), pad("p", "r", "maxpool"), max_pool("m", "p", "maxpool.pool")
    ]  # fmt: skip
    graph = build_graph(operators, [("m", 0)])
    assert names(graph) == ["input", "relu", "maxpool"]
    assert graph.node("maxpool").attributes["padding"] == ((1, 0), (2, 1))
    assert graph.node("maxpool").module == "maxpool"


@pytest.mark.parametrize(
    "operators",
    [
        pytest.param(
            [source(), pad("p", "input", "maxpool"), max_pool("m", "p", "maxpool.pool")],
            id="zeros could win over negative numbers",
        ),
        pytest.param(
            [source(), relu("r", "input", "r"), pad("p", "r", "pad"), max_pool("m", "p", "pool")],
            id="two modules side by side, which nothing can replace together",
        ),
    ],
)
def test_padding_that_is_not_the_poolings_own_stays(operators: list[Operator]) -> None:
    assert [node.kind for node in build_graph(operators, [("m", 0)])][-2:] == ["pad", "max_pool"]


def test_padding_that_something_else_sees_stays() -> None:
    operators = [
        source(),
        pad("p", "input", "m", value=float("-inf")),
        max_pool("m", "p", "m"),
        relu("r", "p", "r", (2, 4, 7, 9)),
    ]
    assert "pad" in {node.kind for node in build_graph(operators, [("m", 0), ("r", 0)])}
    assert "pad" not in {node.kind for node in build_graph(operators[:-1], [("m", 0)])}


def shuffle(order: tuple[int, ...], middle: tuple[int, ...]) -> list[Operator]:
    moved = tuple(middle[dim] for dim in order)
    return [
        source(),
        operator("a", "reshape", "input", middle, attributes={"shape": middle}, module="s"),
        operator("b", "transpose", "a", moved, attributes={"order": order}, module="s"),
        operator("c", "reshape", "b", (2, 4, 6, 6), attributes={"shape": (2, 4, 6, 6)}, module="s"),
    ]


def test_reshape_transpose_reshape_is_a_channel_shuffle() -> None:
    graph = build_graph(shuffle((0, 2, 1, 3, 4), (2, 2, 2, 6, 6)), [("c", 0)])
    assert names(graph) == ["input", "s"]
    assert graph.node("s").kind == "channel_shuffle"
    assert graph.node("s").attributes == {"groups": 2}


@pytest.mark.parametrize(("order", "middle"), [((0, 1, 2, 4, 3), (2, 2, 2, 6, 6)), ((0, 2, 1, 3, 4), (2, 4, 2, 3, 6))])
def test_other_reshapes_are_no_channel_shuffle(order: tuple[int, ...], middle: tuple[int, ...]) -> None:
    found = {node.kind for node in build_graph(shuffle(order, middle), [("c", 0)])}
    assert "channel_shuffle" not in found


def test_reshapes_in_a_row_are_one() -> None:
    operators = [
        source((2, 4, 1, 1)),
        operator("a", "flatten", "input", (2, 4, 1), attributes={"start_dim": 2, "end_dim": 3}),
        operator("b", "flatten", "a", (2, 4), attributes={"start_dim": 1, "end_dim": 2}),
    ]
    graph = build_graph(operators, [("b", 0)])
    assert names(graph) == ["input", "flatten"]
    assert graph.node("flatten").attributes == {"start_dim": 1, "end_dim": 3}


def test_an_operator_whose_rule_gives_another_shape_is_opaque() -> None:
    strange = operator("m", "max_pool", "input", (2, 4, 5, 5), origin="aten.max_pool2d.default",
                       attributes=make.max_pool(kernel=(3, 3), stride=2, padding=NO_PADDING))  # fmt: skip
    (node,) = [node for node in build_graph([source(), strange], [("m", 0)]) if node.kind != "input"]
    assert (node.kind, node.attributes) == ("opaque", {"operator": "aten.max_pool2d.default"})


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((2, 3), (2, 3), ("identity", {})),
        ((2, 3, 4, 5), (2, 60), ("flatten", {"start_dim": 1, "end_dim": 3})),
        ((2, 3, 4, 5), (2, 3, 20), ("flatten", {"start_dim": 2, "end_dim": 3})),
        ((1, 1, 1, 1), (1, 1), ("flatten", {"start_dim": 1, "end_dim": 3})),
        ((2, 3, 4, 5), (24, 5), ("flatten", {"start_dim": 0, "end_dim": 2})),
        ((2, 12), (2, 3, 4), ("reshape", {"shape": (2, 3, 4)})),
        ((4, 6), (6, 4), ("reshape", {"shape": (6, 4)})),
    ],
)
def test_changes_of_shape(old: tuple[int, ...], new: tuple[int, ...], expected: tuple[str, dict[str, Any]]) -> None:
    assert make.reshape_kind(old, new) == expected


def test_differences_are_told_by_name_and_attribute() -> None:
    operators = [source(), max_pool("m", "p", "pool"), pad("p", "input", "pad", value=1.0)]
    first = build_graph(operators, [("m", 0)])
    assert differences(first, first) == []
    other = build_graph([*operators[:2], pad("p", "input", "pad", value=2.0)], [("m", 0)])
    assert differences(first, other) == ["pad: value 1.0 and 2.0"]
    shorter = build_graph([source(), relu("r", "input", "relu")], [("r", 0)])
    told = differences(first, shorter)
    assert "pool: only in the first" in told
    assert "relu: only in the second" in told
    assert "outputs: pool and relu" in told

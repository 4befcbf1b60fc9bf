"""The graph and its rules: costs, what is kept, splits, JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from convmesh.errors import ModelError
from convmesh.graph import (
    RULES,
    SPLITS,
    Edge,
    Graph,
    Node,
    Parameter,
    list_graph,
    node_cost,
    node_splits,
    output_shapes,
    saved_activations,
    total_cost,
)
from convmesh.graph import kinds as make

Shape = tuple[int, ...]


def node(name: str, kind: str, inputs: tuple[str, ...], shape: Shape, **more: Any) -> Node:
    return Node(name=name, kind=kind, inputs=tuple(map(Edge, inputs)), output_shapes=(shape,), **more)


def conv(name: str, source: str, shapes: tuple[Shape, Shape], **more: Any) -> Node:
    (_, num_in, *_), (_, num_out, *_) = shapes
    attributes = make.convolution(in_channels=num_in, out_channels=num_out, kernel=(3, 3), padding=((1, 1), (1, 1)))
    attributes |= more
    weight = Parameter(f"{name}.weight", make.convolution_weight(attributes), "weight")
    return node(name, "convolution", (source,), shapes[1], attributes=attributes, parameters=(weight,))


def elementwise(name: str, function: str, inputs: tuple[str, ...], shape: Shape) -> Node:
    return node(name, "elementwise", inputs, shape, attributes={"function": function})


IMAGE, WIDE = (2, 3, 8, 8), (2, 4, 8, 8)


@pytest.fixture
def graph() -> Graph:
    """Convolution, batch norm, ReLU, convolution, addition of the ReLU's output, flatten, dense."""
    norms = tuple(Parameter(f"bn.{role}", (4,), role) for role in ("weight", "bias"))
    tracked = tuple(Parameter(f"bn.{role}", (4,), role, trainable=False) for role in ("running_mean", "running_var"))
    dense = {"in_features": 256, "out_features": 10, "bias": True}
    head = (Parameter("fc.weight", (10, 256), "weight"), Parameter("fc.bias", (10,), "bias"))
    nodes = (
        node("input", "input", (), IMAGE),
        conv("conv1", "input", (IMAGE, WIDE)),
        node("bn", "batch_norm", ("conv1",), WIDE, parameters=norms + tracked,
             attributes={"momentum": 0.1, "eps": 1e-5, "statistics": "batch"}),
        elementwise("relu", "relu", ("bn",), WIDE),
        conv("conv2", "relu", (WIDE, WIDE)),
        node("add", "add", ("conv2", "relu"), WIDE),
        node("flatten", "flatten", ("add",), (2, 256), attributes={"start_dim": 1, "end_dim": 3}),
        node("fc", "dense", ("flatten",), (2, 10), attributes=dense, parameters=head),
    )  # fmt: skip
    return Graph(nodes, outputs=(Edge("fc"),))


def test_parameters_are_counted_without_statistics(graph: Graph) -> None:
    assert graph.num_parameters == 4 * 3 * 9 + 8 + 4 * 4 * 9 + 2560 + 10
    assert [entry.name for entry in graph.parameters][:3] == ["conv1.weight", "bn.weight", "bn.bias"]


def test_json_reads_back_to_an_equal_graph_with_its_modules(graph: Graph) -> None:
    again = Graph.from_json(graph.to_json())
    assert again == graph
    assert [entry.module for entry in again] == [entry.module for entry in graph]
    assert json.loads(graph.to_json())["schema_version"] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-5], "not a graph"),
        (lambda text: "[]", "not a graph"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "another version"),
        (lambda text: text.replace('"kind"', '"sort"'), "damaged"),
        (lambda text: text.replace('"inputs": [["conv1", 0]]', '"inputs": [["fc", 0]]'), "no node before it"),
    ],
)
def test_damaged_json_is_told(graph: Graph, change: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Graph.from_json(change(graph.to_json()))


def test_two_nodes_of_one_name_are_refused() -> None:
    with pytest.raises(ModelError, match="two nodes of one name"):
        Graph((node("a", "input", (), IMAGE), node("a", "input", (), IMAGE)), outputs=())


def test_a_misspelt_node_is_told_with_the_nearest(graph: Graph) -> None:
    with pytest.raises(ModelError, match=r"no operator 'conv3'.*conv[12]"):
        graph.node("conv3")


def test_consumers(graph: Graph) -> None:
    assert [entry.name for entry in graph.consumers(Edge("relu"))] == ["conv2", "add"]
    assert graph.consumers(Edge("fc")) == ()


def test_multiply_adds_and_flops_of_a_convolution(graph: Graph) -> None:
    first, second = (node_cost(graph, graph.node(name)) for name in ("conv1", "conv2"))
    assert first.multiply_adds == 2 * 4 * 64 * 27
    assert first.flops_forward == 2 * first.multiply_adds
    assert first.flops_backward == 2 * first.multiply_adds  # The image needs no gradient.
    assert second.flops_backward == 4 * second.multiply_adds


def test_a_transposed_convolution_counts_its_input(graph: Graph) -> None:
    shape = (1, 6, 4, 4)
    attributes = make.convolution(
        in_channels=6, out_channels=4, kernel=(2, 2), stride=2, padding=((0, 0), (0, 0)), transposed=True
    )
    weight = Parameter("up.weight", make.convolution_weight(attributes), "weight")
    up = node("up", "convolution", ("input",), (1, 4, 8, 8), attributes=attributes, parameters=(weight,))
    assert weight.shape == (6, 4, 2, 2)
    assert output_shapes("convolution", attributes, [shape]) == ((1, 4, 8, 8),)
    only = Graph((node("input", "input", (), shape), up), outputs=())
    assert node_cost(only, up).multiply_adds == 6 * 16 * 4 * 4


def test_a_tensor_that_several_keep_counts_once(graph: Graph) -> None:
    saved = saved_activations(graph)
    image, wide = 2 * 3 * 64 * 4, 2 * 4 * 64 * 4
    assert saved == {
        "input": 0,
        "conv1": image,
        "bn": wide + 2 * 4 * 4,
        "relu": wide,  # Kept as its output, which the second convolution keeps as its input.
        "conv2": 0,
        "add": 0,
        "flatten": 0,
        "fc": wide,  # The flattened tensor, a view of the sum.
    }


def test_what_no_gradient_flows_through_keeps_nothing() -> None:
    nodes = (
        node("input", "input", (), WIDE),
        elementwise("relu", "relu", ("input",), WIDE),
        elementwise("exp", "exp", ("relu",), WIDE),
    )
    only = Graph(nodes, outputs=(Edge("exp"),))
    assert sum(saved_activations(only).values()) == 0
    assert total_cost(only).flops_backward == 0
    assert total_cost(only).flops_forward > 0


def test_listing_sums_up_by_module(graph: Graph) -> None:
    listing = list_graph(graph)
    assert [row.name for row in listing.rows] == [entry.name for entry in graph]
    assert listing.total.num_parameters == graph.num_parameters
    assert listing.total.cost == total_cost(graph)
    assert listing.total.saved_bytes == sum(saved_activations(graph).values())
    assert listing.total.shape == (2, 10)


def splits_of(kind: str, attributes: dict[str, Any], *shapes: Shape, **more: Any) -> dict[str, str | None]:
    """Split to the reason why it is refused, None for what is allowed."""
    sources = tuple(node(f"in{index}", "input", (), shape) for index, shape in enumerate(shapes))
    result = output_shapes(kind, attributes, shapes) or shapes
    made = Node(name="made", kind=kind, attributes=attributes, output_shapes=result,
                inputs=tuple(Edge(entry.name) for entry in sources), **more)  # fmt: skip
    found = node_splits(Graph((*sources, made), outputs=()), made)
    assert [*found.allowed, *found.refused] == sorted(
        SPLITS, key=lambda name: (name in found.refused, SPLITS.index(name))
    )
    assert all(found.refused.values())
    return {name: found.refused.get(name) for name in SPLITS}


def allowed(kind: str, attributes: dict[str, Any], *shapes: Shape) -> set[str]:
    return {name for name, reason in splits_of(kind, attributes, *shapes).items() if reason is None}


PIXELS, ALWAYS = {"height", "width"}, {"samples", "whole"}


def conv_attributes(**more: Any) -> dict[str, Any]:
    given = {"in_channels": 4, "out_channels": 8, "kernel": (3, 3), "padding": ((1, 1), (1, 1))}
    return make.convolution(**(given | more))


def test_splits_of_convolutions_and_dense() -> None:
    assert allowed("convolution", conv_attributes(), WIDE) == ALWAYS | PIXELS | {"in_channels", "out_channels"}
    assert allowed("convolution", conv_attributes(groups=4), WIDE) == ALWAYS | PIXELS | {"groups"}
    one = conv_attributes(kernel=(3,), padding=((1, 1),))
    assert allowed("convolution", one, (2, 4, 9)) == ALWAYS | {"width", "in_channels", "out_channels"}
    three = conv_attributes(kernel=(3,) * 3, padding=((1, 1),) * 3)
    assert allowed("convolution", three, (2, 4, 9, 9, 9)) >= {"depth", "height", "width"}
    dense = {"in_features": 4, "out_features": 8, "bias": True}
    assert allowed("dense", dense, (2, 4)) == ALWAYS | {"in_channels", "out_channels"}


BATCH_NORM = {"momentum": 0.1, "eps": 1e-5, "statistics": "batch"}
POOL = make.max_pool(kernel=(3, 3), stride=2, padding=((1, 1), (1, 1)))


@pytest.mark.parametrize(
    ("kind", "attributes", "shapes", "expected"),
    [
        ("batch_norm", BATCH_NORM, [WIDE], {"channels"} | PIXELS),
        ("group_norm", {"groups": 2, "eps": 1e-5}, [WIDE], {"channels"}),
        ("instance_norm", {"eps": 1e-5}, [WIDE], {"channels"}),
        ("layer_norm", {"num_dims": 3, "eps": 1e-5}, [WIDE], {"channels"}),
        ("layer_norm", {"num_dims": 2, "eps": 1e-5}, [WIDE], {"channels"}),
        ("dropout", {"p": 0.5, "whole_channels": False}, [WIDE], {"channels"} | PIXELS),
        ("max_pool", POOL, [WIDE], {"channels"} | PIXELS),
        ("adaptive_pool", {"function": "mean", "output_size": (1, 1)}, [WIDE], {"channels"} | PIXELS),
        ("adaptive_pool", {"function": "mean", "output_size": (2, 2)}, [WIDE], {"channels"}),
        ("adaptive_pool", {"function": "max", "output_size": (1, 1)}, [WIDE], {"channels"}),
        ("elementwise", {"function": "relu"}, [WIDE], {"channels"} | PIXELS),
        ("add", {}, [WIDE, WIDE], {"channels"} | PIXELS),
        ("multiply", {}, [WIDE, (2, 4, 1, 1)], {"channels"} | PIXELS),
        ("multiply", {}, [WIDE, (8, 8)], {"channels"}),
        ("concat", {"dim": 1}, [WIDE, WIDE], {"channels"} | PIXELS),
        ("concat", {"dim": 2}, [WIDE, WIDE], {"channels", "width"}),
        ("flatten", {"start_dim": 1, "end_dim": 3}, [WIDE], {"channels"}),
        ("flatten", {"start_dim": 2, "end_dim": 3}, [WIDE], {"channels", "height"}),
        ("transpose", {"order": (0, 2, 3, 1)}, [WIDE], set()),
        ("transpose", {"order": (0, 1, 3, 2)}, [WIDE], {"channels"}),
        ("channel_shuffle", {"groups": 2}, [WIDE], {"channels"} | PIXELS),
        ("mean", {"dims": (2, 3), "keep_dims": False}, [WIDE], {"channels"} | PIXELS),
        ("mean", {"dims": (1,), "keep_dims": True}, [WIDE], {"channels"} | PIXELS),
        ("amax", {"dims": (1, 2), "keep_dims": False, "ties": "all"}, [WIDE], {"channels"} | PIXELS),
        ("softmax", {"dim": 1, "log": False}, [WIDE], {"channels"} | PIXELS),
        ("slice", {"dim": 1, "start": 0, "stop": 2, "step": 1}, [WIDE], PIXELS),
        ("reshape", {"shape": (2, 2, 2, 8, 8)}, [WIDE], set()),
        ("reshape", {"shape": (2, 4, 4, 16)}, [WIDE], {"channels"}),
        ("upsample", {"mode": "nearest", "output_size": (16, 16), "align_corners": False}, [WIDE], {"channels"}),
    ],
)  # fmt: skip
def test_splits_of_what_has_no_weight(
    kind: str, attributes: dict[str, Any], shapes: list[Shape], expected: set[str]
) -> None:
    assert allowed(kind, attributes, *shapes) == ALWAYS | expected


def test_an_opaque_operator_is_split_by_samples_alone_and_says_its_name() -> None:
    reasons = splits_of("opaque", {"operator": "aten.cumsum.default"}, WIDE)
    assert {name for name, reason in reasons.items() if reason is None} == ALWAYS
    assert "aten.cumsum.default" in str(reasons["channels"])


def test_refusals_name_what_works_instead() -> None:
    assert "'groups'" in str(splits_of("convolution", conv_attributes(groups=2), WIDE)["in_channels"])
    assert "'out_channels'" in str(splits_of("convolution", conv_attributes(), WIDE)["groups"])
    assert "no height" in str(
        splits_of("dense", {"in_features": 4, "out_features": 8, "bias": False}, (2, 4))["height"]
    )


def test_every_kind_of_the_documentation_has_a_rule_and_the_other_way_round() -> None:
    table = [line.split("|")[1] for line in (make.__doc__ or "").splitlines() if line.startswith("| ``")]
    documented = {entry.strip().strip("`") for cell in table for entry in cell.split(",")}
    assert documented == set(RULES)

"""Signatures: one operator at the shapes of one rank; graphs at other numbers of samples."""

from __future__ import annotations

import dataclasses

import pytest
from planning import plain_network, residual_network, resolved_by_rule
from tests.graph_builder import residual

from convmesh.errors import ModelError
from convmesh.graph import Edge, Graph, Node, node_cost, total_cost
from convmesh.graph.resize import with_samples
from convmesh.mesh import Mesh
from convmesh.plan import Choice, Entry, Plan, resolve
from convmesh.planner.signature import Signature, signature_of, signatures


def test_one_rank_computes_what_the_graph_says() -> None:
    graph = residual_network()
    resolved = resolved_by_rule(graph, data=1)
    for node in graph:
        signature = signature_of(resolved, node)
        assert (node.kind == "input") == (signature is None)
        if signature is not None:
            assert signature.cost == node_cost(graph, node)
            assert signature.output_shapes == node.output_shapes


@pytest.mark.parametrize("width", [16, 18])
def test_split_channels_are_computed_once_over_all_ranks(width: int) -> None:
    # 18 channels over 4 ranks are 5 + 5 + 4 + 4; what stays whole is computed by each rank.
    graph = plain_network(width=width)
    resolved = resolved_by_rule(graph, channel=4)
    for node in graph:
        found = [signature_of(resolved, node, position=position) for position in range(4)]
        if node.kind == "convolution":
            assert resolved.operators[node.name].split != "whole"
            split = sum(signature.cost.multiply_adds for signature in found if signature)
            assert split == node_cost(graph, node).multiply_adds


def test_a_bias_added_to_a_part_of_a_sum_is_not_computed_with_the_operator() -> None:
    graph = residual()
    plan = Plan(
        mesh=Mesh({"channel": 4}),
        entries=(Entry(pattern="block0.conv2", axes={"channel": Choice(split="in_channels")}),),
    )
    resolved = resolve(graph, plan)
    found = {name: signature_of(resolved, graph.node(name)) for name in ("block0.conv1", "block0.conv2")}
    roles = {name: [entry.role for entry in one.parameters] for name, one in found.items() if one is not None}
    assert roles == {"block0.conv1": ["weight", "bias"], "block0.conv2": ["weight"]}


def test_equal_operators_have_one_text_and_others_another() -> None:
    graph = plain_network(depth=5)
    resolved = resolved_by_rule(graph, data=1)
    found = signatures(resolved)
    assert sum(found.values()) == len(graph) - 1
    assert len({signature.text for signature in found}) == len(found) < len(graph) - 1
    conv = next(signature for signature in found if signature.kind == "convolution")
    others = [
        dataclasses.replace(conv, dtype="float16"),
        dataclasses.replace(conv, gradients=(True,)),
        dataclasses.replace(conv, input_shapes=((5, 3, 16, 16),)),
        dataclasses.replace(conv, attributes=(("bias", True), *conv.attributes[1:])),
    ]
    assert len({entry.text for entry in (conv, *others)}) == 5


def test_bytes_are_those_of_each_tensor_once() -> None:
    graph = plain_network(samples=2, width=8, size=4)
    (relu,) = {s for s in signatures(resolved_by_rule(graph, data=1)) if s.kind == "elementwise"}
    elements = 2 * 8 * 4 * 4
    assert relu.num_bytes("forward") == 4 * 2 * elements
    assert relu.num_bytes("backward") == 4 * 3 * elements
    frozen = dataclasses.replace(relu, gradients=(False,))
    assert not frozen.has_backward
    assert frozen.num_bytes("backward") == 0
    assert dataclasses.replace(relu, dtype="float16").num_bytes("forward") == 2 * 2 * elements


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"groups": 1, "kernel": (3, 3), "transposed": False}, "convolution"),
        ({"groups": 1, "kernel": (1, 1), "transposed": False}, "pointwise"),
        ({"groups": 2, "kernel": (1, 1), "transposed": False}, "grouped"),
        ({"groups": 8, "kernel": (3, 3), "transposed": False}, "depthwise"),
        ({"groups": 1, "kernel": (2, 2), "transposed": True}, "convolution_transposed"),
    ],
)
def test_convolutions_have_classes(attributes: dict[str, object], expected: str) -> None:
    found = Signature("convolution", tuple(attributes.items()), ((2, 8, 4, 4),), ((2, 8, 4, 4),))
    assert found.operator_class == expected


def test_work_grows_with_samples_alone() -> None:
    graph = residual_network(samples=4)
    for num_samples in (1, 3, 40):
        other = with_samples(graph, num_samples)
        assert other == residual_network(samples=num_samples)
        assert total_cost(other).multiply_adds * 4 == total_cost(graph).multiply_adds * num_samples
        assert with_samples(other, 4) == graph


def test_reshapes_follow_and_slices_of_samples_are_refused() -> None:
    source = Node(name="input", kind="input", output_shapes=((4, 6, 2),))
    shaped = Node(
        name="r", kind="reshape", attributes={"shape": (8, 6)}, inputs=(Edge("input"),), output_shapes=((8, 6),)
    )
    assert with_samples(Graph((source, shaped), (Edge("r"),)), 3).node("r").shape == (6, 6)
    fixed = dataclasses.replace(shaped, attributes={"shape": (2, 24)}, output_shapes=((2, 24),))
    with pytest.raises(ModelError, match="reshapes"):
        with_samples(Graph((source, fixed), (Edge("r"),)), 3)
    cut = Node(
        name="s",
        kind="slice",
        attributes={"dim": 0, "start": 0, "stop": 2, "step": 1},
        inputs=(Edge("input"),),
        output_shapes=((2, 6, 2),),
    )
    with pytest.raises(ModelError, match="slice of samples"):
        with_samples(Graph((source, cut), (Edge("s"),)), 3)

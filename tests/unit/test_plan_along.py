"""Operators along channels on own ones: what they take and make, what is exchanged, and pieces of channels."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.graph_builder import Builder

from convmesh.errors import ConvMeshError
from convmesh.graph import Edge, Graph, Node
from convmesh.mesh import Mesh
from convmesh.plan import CHANNEL, Choice, Entry, Plan, resolve
from convmesh.plan.activations import rank_activations
from convmesh.plan.along import across_pieces, pieces_of
from convmesh.plan.by_rule import plan_by_rule
from convmesh.plan.collectives import operator_collectives
from convmesh.plan.partitions import is_partition
from convmesh.plan.placement import Lent, Replicate, Shard

TWO = Mesh({"data": 1, CHANNEL: 2})
FLOAT = 4


def between(kind: str, attributes: dict[str, Any], shape: tuple[int, ...] = (2, 6, 8, 8), **more: Any) -> Graph:
    """A convolution, an operator along its channels as a call in forward, and another convolution."""
    build = Builder()
    x = build.convolution("conv1", "input", 6)
    x = build.add("op", kind, x, shape, attributes=attributes, **{"module": "", "call": 0, **more})
    return build.graph(build.convolution("conv2", x, 4) if len(shape) == 4 else x)


def gated(**more: Any) -> Graph:
    """A convolution with batch norm whose halves are multiplied."""
    build = Builder()
    x = build.batch_norm("bn", build.convolution("conv1", "input", 6))
    build.nodes.append(
        Node(
            name="split", kind="split", attributes={"dim": 1, "sizes": (3, 3)}, inputs=(Edge(x),),
            output_shapes=((2, 3, 8, 8),) * 2, **{"call": 0, **more},
        )
    )  # fmt: skip
    inputs = (Edge("split", 0), Edge("split", 1))
    build.nodes.append(Node(name="gated", kind="multiply", inputs=inputs, output_shapes=((2, 3, 8, 8),)))
    return build.graph(build.convolution("conv2", "gated", 4))


def out(*names: str, partition: Any = "contiguous") -> Plan:
    choice = Choice(split="out_channels", partition=partition)
    return Plan(mesh=TWO, entries=tuple(Entry(pattern=name, axes={CHANNEL: choice}) for name in names))


SUMS = Choice(split="in_channels", output="whole")
SOFTMAX = ("softmax", {"dim": 1, "log": False})
NORM = ("layer_norm", {"num_dims": 3, "eps": 1e-5})


@pytest.mark.parametrize(
    ("kind", "attributes", "shape", "rows", "sent"),
    [
        (*SOFTMAX, (2, 6, 8, 8), 128, [("all-gather", 2), ("all-reduce", 1)]),
        (*NORM, (2, 6, 8, 8), 2, [("all-gather", 2), ("all-reduce", 2)]),
        ("mean", {"dims": (1,), "keep_dims": True}, (2, 1, 8, 8), 128, [("all-reduce", 1)]),
        ("sum", {"dims": (1, 3), "keep_dims": False}, (2, 8), 16, [("all-reduce", 1)]),
        ("amax", {"dims": (1,), "keep_dims": True, "ties": "all"}, (2, 1, 8, 8), 128, [("all-gather", 2)]),
    ],
)
def test_a_number_or_two_per_row_are_exchanged(
    kind: str, attributes: dict[str, Any], shape: tuple[int, ...], rows: int, sent: list[tuple[str, int]]
) -> None:
    found = resolve(between(kind, attributes, shape), out("conv1"))
    entry = found.operators["op"]
    assert (entry.before.kind, entry.after.kind, entry.split) == ("none", "none", "channels")
    assert isinstance(entry.output, Shard) == (kind in ("softmax", "layer_norm"))
    told = operator_collectives(found, position=0)
    assert told["op"] == tuple((name, number * rows * FLOAT) for name, number in sent)
    assert found.operators["conv1"].after.kind == "none"


@pytest.mark.parametrize(("kind", "attributes"), [SOFTMAX, NORM])
def test_what_is_no_module_and_no_call_gets_its_input_whole(kind: str, attributes: dict[str, Any]) -> None:
    found = resolve(between(kind, attributes, call=None), out("conv1"))
    assert found.operators["conv1"].after.kind == "gather"
    assert found.operators["op"].output == Replicate()
    module = resolve(between(kind, attributes, call=None, module="op"), out("conv1"))
    assert module.operators["op"].along


def test_channels_are_made_so_that_every_rank_has_a_part_of_each_piece() -> None:
    plan = plan_by_rule(gated(), TWO, min_multiply_adds=0)
    choice = next(entry.axes[CHANNEL] for entry in plan.entries if entry.pattern == "conv1")
    assert choice == Choice(split="out_channels", partition=((0, 1, 3, 4), (2, 5)))
    found = resolve(gated(), plan)
    assert found.operators["split"].outputs == (Shard(((0, 1), (2,))),) * 2
    assert operator_collectives(found, position=0)["split"] == ()
    # A plan may say otherwise: then channels are exchanged at the split.
    other = resolve(gated(), out("conv1")).operators["split"]
    assert (other.before.kind, other.outputs) == ("permute", (Shard(((0, 1), (2,))),) * 2)
    # Where the call can't be replaced, or a piece has too few channels, all come together.
    assert resolve(gated(call=None), out("conv1")).operators["split"].output == Replicate()
    with pytest.raises(ConvMeshError):
        resolve(gated(call=None), out("gated"))


def test_the_rule_leaves_partitions_alone_that_suit_and_those_of_the_data_axis() -> None:
    three = Mesh({"data": 1, CHANNEL: 3})
    plan = plan_by_rule(gated(), three, min_multiply_adds=0)
    assert plan.entries[0].axes[CHANNEL].partition == ((0, 3), (1, 4), (2, 5))
    fitting = resolve(gated(), out("conv1", partition=((0, 5, 3, 2), (4, 1))))
    assert fitting.operators["split"].before.kind == "none"
    assert fitting.operators["gated"].output == Replicate()  # The pieces are divided otherwise.
    alike = resolve(gated(), out("conv1", partition=((3, 0, 2, 5), (1, 4))))
    assert alike.operators["gated"].output == Shard(((0, 2), (1,)))
    entry = Entry(pattern="conv1", axes={"data": Choice(split="in_channels")})
    region = resolve(between(*SOFTMAX), Plan(mesh=Mesh({"data": 2}), entries=(entry,))).region
    assert region is not None
    assert region.operators["op"].split == "samples"


def spread(*, reused: bool = False) -> Graph:
    """A gate of one value per pixel, a function of what a layer makes, scales all channels; or is used again."""
    build = Builder()
    x = build.convolution("conv1", "input", 6)
    mask = build.convolution("mask", x, 1)
    gate = build.add("gate", "elementwise", mask, (2, 1, 8, 8), module="", attributes={"function": "sigmoid"})
    y = build.convolution("conv2", build.add("scale", "multiply", (x, gate), (2, 6, 8, 8), module=""), 4)
    return build.graph(build.sum("add", (y, build.convolution("other", gate, 4))) if reused else y)


def test_what_is_spread_over_channels_is_lent_and_its_gradient_summed() -> None:
    found = resolve(spread(), out("conv1", "conv2")).operators
    assert (found["scale"].split, found["conv1"].after.kind) == ("channels", "none")
    assert (found["mask"].after.kind, found["mask"].output, found["gate"].output) == ("copy", Lent(), Lent())
    told = operator_collectives(resolve(spread(), out("conv1", "conv2")), position=0)
    assert told["mask"] == (("all-gather", 2 * 3 * 64 * FLOAT), ("all-reduce", 2 * 64 * FLOAT))
    # Another layer needs its whole gradient; it can't be both.
    both = resolve(spread(reused=True), out("conv1", "conv2")).operators
    assert (both["mask"].after.kind, both["scale"].output) == ("none", Replicate())
    # Sums that a layer makes of parts are not lent; channels of a layer that are gathered are.
    summing = Plan(mesh=TWO, entries=(*out("conv1").entries, Entry(pattern="mask", axes={CHANNEL: SUMS})))
    assert resolve(spread(), summing).operators["scale"].output == Replicate()


def test_what_is_spread_over_samples_is_lent_too() -> None:
    build = Builder()
    x = build.convolution("conv1", "input", 6)
    total = build.add("sum", "sum", x, (2,), attributes={"dims": (1, 2, 3), "keep_dims": False}, module="", call=0)
    wide = build.add("view", "reshape", total, (2, 1, 1, 1), attributes={"shape": (2, 1, 1, 1)}, module="")
    graph = build.graph(build.convolution("conv2", build.add("scale", "multiply", (x, wide), (2, 6, 8, 8)), 4))
    found = resolve(graph, out("conv1", "conv2"))
    assert (found.operators["sum"].after.kind, found.operators["scale"].split) == ("copy", "channels")
    kept = rank_activations(found).kept
    assert kept["scale"] == 2 * 3 * 64 * FLOAT + 2 * FLOAT
    assert operator_collectives(found, position=0)["sum"] == (("all-reduce", 2 * FLOAT), ("all-reduce", 2 * FLOAT))


@given(sizes=st.lists(st.integers(2, 9), min_size=1, max_size=4), num_ranks=st.integers(1, 4))
def test_pieces_are_divided_over_all_ranks(sizes: list[int], num_ranks: int) -> None:
    lists = across_pieces(sizes, num_ranks)
    if min(sizes) < num_ranks:
        assert lists is None
        return
    assert lists is not None
    assert is_partition(lists, sum(sizes))
    pieces = pieces_of(lists, sizes)
    assert pieces is not None
    for piece, size in zip(pieces, sizes, strict=True):
        assert is_partition(piece, size)
        assert max(map(len, piece)) - min(map(len, piece)) <= 1

"""Regrouped images and convolutions against NumPy, whatever kernel, stride, padding, dilation and groups."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.graph_builder import Builder

from convmesh.errors import ConfigError
from convmesh.geometry.regrouped_convolution import Extent, RegroupedConvolution
from convmesh.geometry.regrouping import ChannelRegrouping
from convmesh.graph import Graph
from convmesh.graph.graph import Edge
from convmesh.mesh import Mesh
from convmesh.plan import CHANNEL, Choice, Entry, Plan, resolve
from convmesh.plan.regrouping import regrouped_layer
from convmesh.plan.ways_out import regrouping_ways

Ints = npt.NDArray[np.int64]


def convolve(x_NC: Ints, weight: Ints, extents: tuple[Extent, ...], groups: int) -> Ints:
    """A convolution by its definition, in integers."""
    pads = [(extent.before, extent.after) for extent in extents]
    x_NC = np.pad(x_NC, [(0, 0), (0, 0), *pads])
    num_out, num_in = weight.shape[:2]
    y = np.zeros((x_NC.shape[0], num_out, *(extent.num_outputs for extent in extents)), dtype=np.int64)
    for output in range(num_out):
        first = output * groups // num_out * num_in
        for taps in itertools.product(*(range(extent.kernel) for extent in extents)):
            window = tuple(
                slice(tap * e.dilation, tap * e.dilation + (e.num_outputs - 1) * e.stride + 1, e.stride)
                for tap, e in zip(taps, extents, strict=True)
            )
            pixels = x_NC[:, first : first + num_in, *window]
            y[:, output] += np.einsum("nc...,c->n...", pixels, weight[output, :, *taps])
    return y


@st.composite
def extents(draw: Any, block: int) -> Extent:
    kernel, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    before, after = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    least = max(1, dilation * (kernel - 1) + 1 - before - after)
    size = -(-(least + draw(st.integers(0, 9))) // block) * block
    stride = block * draw(st.integers(1, 3))
    return Extent(size=size, kernel=kernel, stride=stride, before=before, after=after, dilation=dilation)


@st.composite
def convolutions(draw: Any) -> RegroupedConvolution:
    num_dims, block, groups = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_channels, num_zeros = groups * draw(st.integers(1, 2)), draw(st.integers(0, 3))
    num_regrouped = num_channels * block**num_dims + num_zeros
    order = draw(st.none() | st.permutations(range(num_regrouped)))
    regrouping = ChannelRegrouping(
        num_channels=num_channels,
        block=block,
        num_zeros=num_zeros,
        order=None if order is None else tuple(order),
        num_dims=num_dims,
    )
    return RegroupedConvolution(
        regrouping=regrouping,
        out_channels=groups * draw(st.integers(1, 2)),
        groups=groups,
        extents=tuple(draw(extents(block)) for _ in range(num_dims)),
    )


@given(convolutions())
def test_a_regrouped_convolution_computes_the_same(layer: RegroupedConvolution) -> None:
    draw = np.random.default_rng(0)
    x = draw.integers(-9, 10, (2, layer.regrouping.num_channels, *(extent.size for extent in layer.extents)))
    weight = draw.integers(-9, 10, layer.original_shape)
    expected = convolve(x, weight, layer.extents, layer.groups)
    regrouped = layer.to_regrouped(weight)
    assert regrouped.shape == layer.regrouped_shape
    got = convolve(layer.regrouping.images(x), regrouped, layer.regrouped_extents, layer.regrouped_groups)
    np.testing.assert_array_equal(got, expected)


@given(convolutions())
def test_every_weight_stands_once_and_comes_back(layer: RegroupedConvolution) -> None:
    weight = np.arange(1, np.prod(layer.original_shape) + 1).reshape(layer.original_shape)
    regrouped = layer.to_regrouped(weight)
    np.testing.assert_array_equal(np.sort(regrouped[layer.is_weight]), weight.reshape(-1))
    assert not regrouped[~layer.is_weight].any()
    assert np.count_nonzero(~layer.is_weight) == layer.num_zeros
    np.testing.assert_array_equal(layer.to_original(regrouped), weight)


@given(convolutions())
def test_images_hold_every_pixel_once(layer: RegroupedConvolution) -> None:
    regrouping = layer.regrouping
    sizes = [extent.size for extent in layer.extents]
    x = np.arange(1, 2 * regrouping.num_channels * np.prod(sizes) + 1).reshape(2, regrouping.num_channels, *sizes)
    got = regrouping.images(x)
    assert got.shape == (2, regrouping.num_regrouped, *regrouping.sizes(sizes))
    for place, origin in enumerate(regrouping.origins):
        if origin is None:
            assert not got[:, place].any()
        else:
            window = tuple(slice(offset, None, regrouping.block) for offset in origin.offset)
            np.testing.assert_array_equal(got[:, place], x[:, origin.channel, *window])


def test_the_first_convolution_of_a_resnet() -> None:
    side = Extent(size=224, kernel=7, stride=2, before=3, after=3, dilation=1)
    layer = RegroupedConvolution(
        regrouping=ChannelRegrouping.of(3, space_to_depth=2), out_channels=64, groups=1, extents=(side, side)
    )
    assert layer.regrouping.num_regrouped == 12
    assert layer.regrouped_shape == (64, 12, 4, 4)
    assert layer.regrouped_extents[0] == Extent(size=112, kernel=4, stride=1, before=2, after=1, dilation=1)
    assert layer.num_zeros == 64 * (12 * 16 - 3 * 49)


def test_groups_are_kept_where_channels_stay_in_them() -> None:
    side = Extent(size=4, kernel=2, stride=2, before=0, after=0, dilation=1)

    def groups(**settings: Any) -> int:
        regrouping = ChannelRegrouping.of(4, **settings)
        layer = RegroupedConvolution(regrouping=regrouping, out_channels=8, groups=4, extents=(side, side))
        return layer.regrouped_groups

    assert groups(space_to_depth=2) == 4
    assert groups(order=(1, 0, 3, 2)) == 2
    assert groups(order=(3, 0, 1, 2)) == 1
    assert groups(pad=4) == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"order": (0, 2, 2)}, "missing 1; twice 2), expected 0 to 2"),
        ({"order": (0, 1)}, "missing 2"),
        ({"pad": 1, "order": (0, 1, 2)}, "missing 3, expected 0 to 3"),
        ({"pad_to": 2}, "got 3 channels, pad_to 2). Use 'pad_to: 3' or more"),
        ({"space_to_depth": 2, "pad_to": 8}, "got 12 channels, pad_to 8"),
        ({"pad": 1, "pad_to": 4}, "in two ways"),
        ({"pad": -1}, "the number of zero channels is too small"),
    ],
)
def test_what_is_no_regrouping_is_refused_with_numbers(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        ChannelRegrouping.of(3, **settings)
    assert told.replace(")", "") in str(error.value).replace(")", "")


def test_sizes_that_do_not_divide_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"got 225x224 pixels, blocks of 2.*Use images of 224x224 pixels"):
        ChannelRegrouping.of(3, space_to_depth=2).sizes((225, 224))
    with pytest.raises(ConfigError, match=r"or 'space_to_depth: 3'"):
        ChannelRegrouping.of(3, space_to_depth=4).sizes((27, 27))


def strided(stride: int) -> Graph:
    build = Builder()
    head = build.dense_head(build.relu("relu1", build.convolution("conv1", "input", 8)))
    graph = build.graph(head)
    nodes = [
        dataclasses.replace(node, attributes={**node.attributes, "stride": (stride, stride)})
        if node.name == "conv1"
        else node
        for node in graph.nodes
    ]
    return dataclasses.replace(graph, nodes=tuple(nodes))


def test_too_few_channels_are_refused_with_the_ways_out() -> None:
    plan = Plan(mesh=Mesh({CHANNEL: 4}), entries=(Entry(pattern="conv1", axes={CHANNEL: Choice(split="in_channels")}),))
    with pytest.raises(ConfigError) as error:
        resolve(strided(2), plan)
    for way in (
        "got 3 for 4 ranks",
        "'data: {channels: {pad_to: 4}}'",
        "make 12 channels of blocks of pixels with 'data: {channels: {space_to_depth: 2}}'",
        "split it with 'conv1: {channel: out_channels}'",
        "use 3 ranks on the axis 'channel'",
    ):
        assert way in str(error.value)
    with pytest.raises(ConfigError) as error:
        resolve(strided(1), plan)
    assert "pad_to: 4" in str(error.value)
    assert "space_to_depth" not in str(error.value)


@given(st.integers(1, 6), st.integers(4, 13))
def test_every_way_out_works(stride: int, num_ranks: int) -> None:
    graph = strided(stride)
    for way in regrouping_ways(graph, graph.node("conv1"), num_ranks):
        settings = yaml.safe_load(way.split("'")[1])["data"]["channels"]
        layer = regrouped_layer(graph, ChannelRegrouping.of(3, **settings))
        assert layer.convolution.regrouping.num_regrouped >= num_ranks
        assert layer.attributes["in_channels"] == layer.convolution.regrouping.num_regrouped
    assert regrouping_ways(graph, graph.node("relu1"), num_ranks) == []
    assert graph.consumers(Edge("input")) == (graph.node("conv1"),)

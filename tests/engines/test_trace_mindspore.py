"""MindSpore networks as graphs: node for node those of their PyTorch twins."""

from __future__ import annotations

import pytest

pytest.importorskip("mindspore")

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from convmesh.engines.tracing import trace
from convmesh.errors import EngineError, ModelError
from convmesh.graph import differences
from convmesh.models.mindspore import build
from tests.networks_mindspore import NETWORKS, batch_norm, conv

pytestmark = pytest.mark.mindspore


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cnn-small", {}),
        ("cnn-small", {"batch_norm": True}),
        ("resnet18", {}),
        ("resnet18", {"small_images": True}),
        ("resnet50", {}),
    ],
)
def test_both_engines_give_the_same_graph_of_a_reference_network(name: str, options: dict[str, bool]) -> None:
    pytest.importorskip("torch")
    from convmesh.models import torch as models_torch

    mine, theirs = (trace(make(name, **options), (2, 3, 64, 64)) for make in (build, models_torch.build))
    assert differences(mine, theirs) == []
    assert mine == theirs


@pytest.mark.torch
@pytest.mark.parametrize("name", list(NETWORKS))
def test_both_engines_give_the_same_graph_of_a_users_network(name: str) -> None:
    pytest.importorskip("torch")
    from tests import networks_torch

    mine, theirs = trace(NETWORKS[name](), (2, 3, 16, 16)), trace(networks_torch.NETWORKS[name](), (2, 3, 16, 16))
    assert differences(mine, theirs) == []
    assert [node.name for node in mine if node.kind == "opaque"] == []
    assert [node.module for node in mine if node.parameters] == [node.module for node in theirs if node.parameters]


def test_a_network_stays_as_it_was_and_still_runs() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    network = build("cnn-small", batch_norm=True)
    x = Tensor(np.random.default_rng(0).standard_normal((2, 3, 8, 8)), ms.float32)
    network.set_train(False)
    network.bn2.set_train(True)
    trace(network, (2, 3, 8, 8))
    assert not network.training
    assert network.bn2.training
    network.set_train(False)
    fresh = build("cnn-small", batch_norm=True)
    fresh.set_train(False)
    assert np.array_equal(network(x).asnumpy(), fresh(x).asnumpy())
    assert not any(name.startswith("convmesh") for cell in network.cells() for name in cell.__dict__)


class OneDim(nn.Cell):
    """MindSpore's own cells that are made of several primitives, in one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 3, pad_mode="pad", padding=1, has_bias=True)
        self.up = nn.Conv1dTranspose(6, 4, 2, stride=2, pad_mode="valid")
        self.act = nn.LeakyReLU(0.1)
        self.fc = nn.Dense(16, 5)

    def construct(self, x: Tensor) -> Tensor:
        return self.fc(self.act(self.up(self.conv(x))))


def test_cells_made_of_several_primitives_are_one_operator() -> None:
    graph = trace(OneDim(), (2, 3, 8))
    assert [(node.name, node.kind) for node in graph] == [
        ("input", "input"),
        ("conv", "convolution"),
        ("up", "convolution"),
        ("act", "elementwise"),
        ("fc", "dense"),
    ]
    assert graph.node("conv").attributes["kernel"] == (3,)
    assert graph.node("conv").parameter("weight").shape == (6, 3, 3)  # type: ignore[union-attr]
    assert graph.node("act").attributes == {"function": "leaky_relu", "negative_slope": 0.1}


class ThreeDims(nn.Cell):
    """Convolution, batch norm and pooling in three dims, and padded pooling in two."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 4, 3, pad_mode="pad", padding=1)
        self.bn = nn.BatchNorm3d(4)
        self.pool = nn.MaxPool3d(2, 2)
        self.flat = nn.MaxPool2d(3, 2, pad_mode="pad", padding=1)
        self.average = nn.AvgPool2d(3, 2, pad_mode="pad", padding=1)

    def construct(self, x: Tensor) -> Tensor:
        x = self.pool(self.bn(self.conv(x)))
        return self.average(self.flat(x.mean(2)))


def test_three_dims_and_padded_pooling() -> None:
    graph = trace(ThreeDims(), (2, 2, 8, 8, 8))
    assert [node.name for node in graph] == ["input", "conv", "bn", "pool", "mean", "flat", "average"]
    assert graph.node("bn").kind == "batch_norm"
    assert graph.node("bn").shape == (2, 4, 8, 8, 8)
    assert graph.node("flat").attributes["padding"] == ((1, 1), (1, 1))
    assert graph.node("average").attributes["count_padding"]


class SamePadding(nn.Cell):
    """Padding that depends on the size, on one side more than on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, pad_mode="same")
        self.pool = nn.MaxPool2d(3, 2, pad_mode="same")

    def construct(self, x: Tensor) -> Tensor:
        return self.pool(self.conv(x))


def test_same_padding_becomes_numbers_per_side() -> None:
    graph = trace(SamePadding(), (2, 3, 8, 9))
    assert graph.node("conv").attributes["padding"] == ((0, 1), (1, 1))
    assert graph.node("pool").attributes["padding"] == ((0, 1), (1, 1))


class Inner(nn.Cell):
    """Called with a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(4, 4, 3)
        self.bn = batch_norm(4)

    def construct(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return ops.relu(self.bn(self.conv(x)) * scale)


class WithKeywords(nn.Cell):
    """Calls a cell with a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 4, 3)
        self.first = Inner()
        self.second = Inner()

    def construct(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.stem(x)), scale=2.0)


def test_cells_that_are_called_with_keywords() -> None:
    parts = ("conv", "bn", "multiply_scalar", "relu")
    expected = ["input", "stem", *(f"{cell}.{part}" for cell in ("first", "second") for part in parts)]
    assert [node.name for node in trace(WithKeywords(), (2, 3, 8, 8))] == expected


class Pair(nn.Cell):
    """Takes and returns two tensors."""

    def construct(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return ops.relu(x), y + x


class Pairs(nn.Cell):
    """Two cells of one class whose functions MindSpore parses once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Pair()
        self.second = Pair()

    def construct(self, x: Tensor) -> Tensor:
        u, v = self.first(x, ops.tanh(x))
        u, v = self.second(u, v)
        return u + v


def test_functions_are_named_after_the_cell_that_calls_them() -> None:
    names = {node.name for node in trace(Pairs(), (2, 3))}
    assert names == {"input", "tanh", "first.relu", "first.add", "second.relu", "second.add", "add"}


class Cumulative(nn.Cell):
    """Uses a primitive without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(4, 4)

    def construct(self, x: Tensor) -> Tensor:
        return ops.cumsum(self.fc(x), 1)


def test_a_primitive_without_a_rule_is_opaque() -> None:
    graph = trace(Cumulative(), (2, 4))
    assert graph.node("cumsum").attributes == {"operator": "CumSum"}


class Broken(nn.Cell):
    """Does not fit its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(3, 4)

    def construct(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_a_network_that_does_not_compile_is_refused_with_what_stopped_it() -> None:
    with pytest.raises(ModelError, match="Broken can't be compiled"):
        trace(Broken(), (2, 4))


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(EngineError, match="known engine"):
        trace(object(), (2, 4))

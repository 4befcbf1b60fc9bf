"""What of a plan MindSpore's cells can't do is told by name, before anything is changed."""

from __future__ import annotations

import pytest

pytest.importorskip("mindspore")

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from convmesh.engines.mindspore.parallelize import parallelize, refusals
from convmesh.engines.mindspore.trace import trace
from convmesh.errors import ConfigError
from convmesh.graph import Graph
from convmesh.mesh import Mesh
from convmesh.plan import CHANNEL, Choice, Entry, Plan, ResolvedPlan, resolve
from convmesh.plan.by_rule import plan_by_rule

pytestmark = pytest.mark.mindspore


@pytest.fixture(autouse=True)
def graph_mode() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")


class OwnNorm(nn.Cell):
    """A group norm of one's own."""

    def __init__(self, groups: int, width: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = Parameter(ops.ones((width,)), name="weight")
        self.bias = Parameter(ops.zeros((width,)), name="bias")

    def construct(self, x: Tensor) -> Tensor:
        return ops.group_norm(x, self.groups, self.weight, self.bias, 1e-5)


class Between(nn.Cell):
    """A layer between two convolutions."""

    def __init__(self, layer: nn.Cell) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, pad_mode="pad", padding=1)
        self.layer = layer
        self.last = nn.Conv2d(8, 6, 1)

    def construct(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x)))


class Surplus(nn.Cell):
    """A convolution with a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(ops.ones((8, 8, 1, 1)), name="weight")
        self.unused = Parameter(ops.ones((2,)), name="unused")
        self.convolve = ops.Conv2D(8, 1)

    def construct(self, x: Tensor) -> Tensor:
        return self.convolve(x, self.weight)


def resolved(network: nn.Cell, **splits: str) -> ResolvedPlan:
    graph: Graph = trace(network, (2, 3, 6, 6))
    entries = tuple(Entry(pattern=name, axes={CHANNEL: Choice(split=split)}) for name, split in splits.items())
    return resolve(graph, Plan(mesh=Mesh({CHANNEL: 2}), entries=entries))


class OwnDropout(nn.Cell):
    """Dropout in a cell of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = ops.Dropout(keep_prob=0.5)

    def construct(self, x: Tensor) -> Tensor:
        return self.drop(x)[0]


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (OwnDropout, "layer can't drop own channels only: it is no nn.Dropout, nn.Dropout2d or nn.Dropout3d"),
        (lambda: OwnNorm(4, 8), "layer can't normalise own channels: it is no nn.GroupNorm (got OwnNorm)"),
    ],
)
def test_layers_of_another_kind_are_refused_by_name(layer: object, said: str) -> None:
    network = Between(layer())  # type: ignore[operator]
    (error,) = refusals(network, resolved(network, first="out_channels"))
    assert said in str(error)
    # The way out that it tells.
    assert "'layer: {channel: whole}'" in str(error)
    assert refusals(network, resolved(network, first="out_channels", layer="whole")) == []


def test_what_works_is_not_refused() -> None:
    for layer in (nn.Dropout(p=0.5), nn.Dropout2d(p=0.5), nn.GroupNorm(4, 8), nn.BatchNorm2d(8), nn.ReLU()):
        network = Between(layer)
        assert refusals(network, resolved(network, first="out_channels", last="in_channels")) == []


def test_a_cell_that_holds_more_than_its_convolution_is_not_replaced() -> None:
    network = Between(Surplus())
    (error,) = refusals(network, resolved(network, layer="out_channels"))
    assert "layer can't be replaced: its cell holds more than the operator needs (got unused)" in str(error)


def test_a_plan_for_more_ranks_than_were_started_is_refused() -> None:
    network = Between(nn.ReLU())
    plan = plan_by_rule(trace(network, (2, 3, 6, 6)), Mesh({CHANNEL: 2}), min_multiply_adds=0)
    with pytest.raises(ConfigError, match=r"does not fit the ranks that were started \(got 1, expected 2\)"):
        parallelize(network, plan)

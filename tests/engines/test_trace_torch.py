"""PyTorch networks as graphs: published figures, shapes and kept tensors as PyTorch has them, what can't be read."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from convmesh.engines.torch.trace_pieces import read_pieces
from convmesh.engines.tracing import trace
from convmesh.errors import ModelError
from convmesh.graph import Graph, differences, output_shapes, saved_activations, total_cost
from convmesh.graph import kinds as make
from convmesh.graph.canonical import build_graph
from convmesh.graph.resize import with_samples
from convmesh.mesh import Mesh
from convmesh.models.torch import build
from convmesh.plan import Plan, resolve
from convmesh.plan.activations import rank_activations
from convmesh.planner.precision import with_precision
from convmesh.planner.prediction import Training
from tests.networks_torch import NETWORKS

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "num_parameters", "giga_multiply_adds"),
    [("resnet18", 11_689_512, 1.81), ("resnet50", 25_557_032, 4.09), ("resnet152", 60_192_808, 11.51)],
)
def test_published_figures_at_224_pixels(name: str, num_parameters: int, giga_multiply_adds: float) -> None:
    # torchvision's table of weights; multiply-adds of convolutions and the dense layer, nothing else.
    with torch.device("meta"):
        network = build(name)
    graph = trace(network, (1, 3, 224, 224))
    assert graph.num_parameters == num_parameters
    assert round(total_cost(graph).multiply_adds / 1e9, 2) == giga_multiply_adds


@pytest.mark.parametrize("name", ["cnn-small", "resnet50", *NETWORKS])
def test_a_graph_at_other_samples_is_what_tracing_them_gives(name: str) -> None:
    network, size = (NETWORKS[name](), 16) if name in NETWORKS else (build(name), 32)
    few, many = (trace(network, (num_samples, 3, size, size)) for num_samples in (2, 5))
    assert with_samples(few, 5) == many
    assert with_samples(many, 2) == few


def kept_bytes(network: nn.Module, x: Tensor) -> int:
    """Bytes of the storages that autograd keeps, without those of parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers())}
    kept: dict[int, tuple[int, Tensor]] = {}

    def remember(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        network(x)
    return sum(num_bytes for num_bytes, _ in kept.values())


@pytest.mark.parametrize("name", ["resnet18", *NETWORKS])
def test_kept_activations_follow_mixed_precision(name: str) -> None:
    network, shape = (NETWORKS[name](), (2, 3, 16, 16)) if name in NETWORKS else (build(name), (2, 3, 64, 64))
    graph = trace(network, shape)
    training = Training(global_batch=2, compute_dtype="bfloat16")
    resolved = resolve(with_precision(graph, training, device_kind="cpu"), Plan(mesh=Mesh({"data": 1})))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = kept_bytes(network.train(), torch.randn(shape))
    # Autograd also keeps the weights that were cast.
    weights = sum(entry.num_elements for entry in graph.parameters if entry.role == "weight" and len(entry.shape) > 1)
    assert rank_activations(resolved).kept_bytes == pytest.approx(kept - 2 * weights, rel=0.15)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", *NETWORKS])
def test_kept_activations_are_those_that_autograd_keeps(name: str) -> None:
    network, shape = (NETWORKS[name](), (2, 3, 16, 16)) if name in NETWORKS else (build(name), (2, 3, 64, 64))
    predicted = sum(saved_activations(trace(network, shape)).values())
    assert predicted == pytest.approx(kept_bytes(network.train(), torch.randn(shape)), rel=0.05)


class Activations(nn.Module):
    """Every activation once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.acts = nn.Sequential(
            nn.SiLU(), nn.GELU(), nn.Hardswish(), nn.LeakyReLU(0.1), nn.ReLU6(), nn.Mish(), nn.Hardsigmoid(),
            nn.Tanh(), nn.ELU(), nn.Softplus(), nn.PReLU(4), nn.Hardtanh(), nn.Softmax(dim=1), nn.Dropout2d(0.3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.acts(self.conv(x))
        y = torch.exp(y) + torch.rsqrt(y + 2) - torch.maximum(y, y.square()) / (y.abs() + 1)
        return torch.where(y > 0, 1 - y, torch.log1p(y.clamp(min=0)))


def test_activations_are_known_by_name_and_keep_what_autograd_keeps() -> None:
    network = Activations()
    graph = trace(network, (2, 3, 8, 8))
    assert [node.name for node in graph if node.kind == "opaque"] == []
    assert graph.node("acts.3").attributes == {"function": "leaky_relu", "negative_slope": 0.1}
    assert graph.node("acts.4").attributes == {"function": "relu6"}
    predicted = sum(saved_activations(graph).values())
    assert predicted == pytest.approx(kept_bytes(network.train(), torch.randn(2, 3, 8, 8)), rel=0.05)


SIZES = st.integers(1, 12)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_dims=st.integers(1, 3), transposed=st.booleans())
def test_shapes_of_convolutions_are_pytorchs(data: st.DataObject, num_dims: int, transposed: bool) -> None:
    each = st.integers(1, 3)
    groups = data.draw(each)
    num_in, num_out = groups * data.draw(each), groups * data.draw(each)
    kernel, stride, dilation = (tuple(data.draw(each) for _ in range(num_dims)) for _ in range(3))
    padding = tuple(data.draw(st.integers(0, 2)) for _ in range(num_dims))
    shape = (2, num_in, *(data.draw(SIZES) for _ in range(num_dims)))
    extra = tuple(data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    layer = getattr(nn, f"Conv{'Transpose' if transposed else ''}{num_dims}d")
    options = {"output_padding": extra} if transposed else {}
    with torch.device("meta"):
        module = layer(
            num_in, num_out, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups, **options
        )
        try:
            expected = tuple(module(torch.empty(shape)).shape)
        except RuntimeError:
            return  # No window fits.
    attributes = make.convolution(
        in_channels=num_in, out_channels=num_out, kernel=kernel, stride=stride, dilation=dilation, groups=groups,
        padding=make.pairs(padding, num_dims), transposed=transposed, output_padding=extra if transposed else 0,
    )  # fmt: skip
    if 0 not in expected:
        assert output_shapes("convolution", attributes, [shape]) == (expected,)
        assert make.convolution_weight(attributes) == tuple(module.weight.shape)


@settings(max_examples=60, deadline=None)
@given(
    size=SIZES, kernel=st.integers(1, 4), stride=st.integers(1, 4), ceil_mode=st.booleans(), halved=st.integers(0, 2)
)
def test_shapes_of_pooling_are_pytorchs(size: int, kernel: int, stride: int, ceil_mode: bool, halved: int) -> None:
    padding = min(halved, kernel // 2)
    x = torch.empty(1, 1, size, size, device="meta")
    try:
        expected = tuple(F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode).shape)
    except RuntimeError:
        return
    attributes = make.max_pool(
        kernel=(kernel, kernel), stride=stride, padding=make.pairs(padding, 2), ceil_mode=ceil_mode
    )
    assert output_shapes("max_pool", attributes, [tuple(x.shape)]) == (expected,)


def test_a_network_stays_as_it_was() -> None:
    network = build("resnet18")
    network.eval()
    network.layer1.train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    trace(network, (2, 3, 32, 32))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not network.training
    assert network.layer1[0].bn1.training


def test_frozen_parameters_count_and_take_no_gradient() -> None:
    network = NETWORKS["vgg"]()
    all_trainable = total_cost(trace(network, (1, 3, 16, 16)))
    network.features.requires_grad_(False)
    graph = trace(network, (1, 3, 16, 16))
    assert graph.num_parameters == sum(parameter.numel() for parameter in network.parameters())
    assert graph.needs_gradient == {"head.1", "head.2", "head.3", "head.4"}
    assert total_cost(graph).flops_backward < all_trainable.flops_backward


class Tied(nn.Module):
    """One dense layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x))


def test_a_shared_weight_counts_once() -> None:
    graph = trace(Tied(), (2, 4))
    assert [node.name for node in graph] == ["input", "fc", "fc@2"]
    assert graph.num_parameters == 20


class InPlace(nn.Module):
    """Changes a tensor that is used under its old name later."""

    def __init__(self, *, of_view: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.of_view = of_view

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y = x.flatten(2) if self.of_view else x
        F.relu(y, inplace=True)
        return x * 2


def test_an_operator_in_place_changes_what_is_used_later() -> None:
    graph = trace(InPlace(of_view=False), (2, 3, 4, 4))
    assert [node.name for node in graph] == ["input", "conv", "relu", "multiply_scalar"]


def test_an_operator_in_place_on_a_view_is_refused() -> None:
    with pytest.raises(ModelError, match="in place"):
        trace(InPlace(of_view=True), (2, 3, 4, 4))


class Normalised(nn.Module):
    """A convolution whose weight is computed from its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.conv.weight - self.conv.weight.mean(), self.conv.bias)


def test_a_convolution_with_a_computed_weight_is_opaque() -> None:
    graph = trace(Normalised(), (2, 3, 8, 8))
    assert graph.node("conv2d").kind == "opaque"
    assert graph.num_parameters == 4 * 27 + 4


@torch.library.custom_op("convmesh_tests::scale_by_two", mutates_args=())
def scale_by_two(x: Tensor) -> Tensor:
    return x * 2


class Foreign(nn.Module):
    """An operator that only runs on real tensors, so that torch.export can't follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.ops.convmesh_tests.scale_by_two(self.bn(self.conv(x)))
        a, b = x.chunk(2, dim=1)
        return self.fc(torch.cat([b, a], dim=1).mean((2, 3)))


def test_what_torch_export_cannot_follow_is_read_piece_by_piece() -> None:
    network = Foreign()
    graph = trace(network, (2, 3, 8, 8))
    assert [node.name for node in graph if node.kind == "opaque"] == ["scale_by_two"]
    assert [node.kind for node in graph][-5:] == ["opaque", "split", "concat", "mean", "dense"]
    assert graph.node("conv").parameters[0].name == "conv.weight"
    assert network.bn.num_batches_tracked == 0


@pytest.mark.parametrize("name", ["vgg", "densenet", "squeeze_excite", "unet", "swish", "mobilenet"])
def test_both_ways_read_the_same_graph(name: str) -> None:
    network = NETWORKS[name]().train()
    pieces = read_pieces(network, torch.zeros(2, 3, 16, 16))
    assert differences(trace(network, (2, 3, 16, 16)), build_graph(pieces.operators, pieces.outputs)) == []


class Branching(nn.Module):
    """Takes another way for other values."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


def test_a_network_that_depends_on_values_is_refused_with_what_stopped_it() -> None:
    with pytest.raises(
        ModelError, match=r"Branching can't be read.*torch\.export:.*torch\.fx:.*not depend on its values"
    ):
        trace(Branching(), (2, 3))


def test_an_example_that_is_no_batch_is_refused() -> None:
    with pytest.raises(ModelError, match="no batch of images"):
        trace(build("cnn-small"), "images")


def test_tensors_and_arrays_are_examples_too() -> None:
    network, expected = build("cnn-small"), trace(build("cnn-small"), (2, 3, 8, 8))
    assert trace(network, torch.zeros(2, 3, 8, 8)) == expected
    assert trace(network, torch.zeros(2, 3, 8, 8).numpy()) == expected


def test_json_of_a_traced_network_reads_back() -> None:
    for make_network in NETWORKS.values():
        graph = trace(make_network(), (2, 3, 16, 16))
        assert Graph.from_json(graph.to_json()) == graph

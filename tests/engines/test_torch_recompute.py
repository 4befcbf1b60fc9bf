"""Recomputed blocks on PyTorch: equal numbers, buffers that learn once, equal masks, and the memory that was told."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints

from convmesh.engines.torch.parallelize import parallelize, refusals
from convmesh.engines.tracing import trace
from convmesh.errors import ModelError
from convmesh.graph import blocks, kept_with
from convmesh.mesh import Mesh
from convmesh.models.torch import build
from convmesh.models.torch.resnet import Bottleneck, ResNet
from convmesh.plan import Execution, Plan, resolve
from convmesh.plan.network import network_facts
from tests.networks_torch import NETWORKS

pytestmark = pytest.mark.torch


class Pair(nn.Sequential):
    """U-Net's pair of convolutions."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(
            nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU(),
        )  # fmt: skip


class UNetOfPairs(nn.Module):
    """Pairs of convolutions down and up, with skips by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = Pair(3, 8), Pair(8, 12), Pair(12, 16)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.merge2 = nn.ConvTranspose2d(16, 12, 2, stride=2), Pair(24, 12)
        self.up1, self.merge1 = nn.ConvTranspose2d(12, 8, 2, stride=2), Pair(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(self.pool(skip1))
        x = self.merge2(torch.cat([self.up2(self.bottom(self.pool(skip2))), skip2], dim=1))
        return self.head(self.merge1(torch.cat([self.up1(x), skip1], dim=1)))


class Counted(nn.Module):
    """Blocks with dropout, and with a buffer of their own on which their result depends."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.one, self.two = CountedBlock(), CountedBlock()
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.two(self.one(self.stem(x))).mean((2, 3)))


class CountedBlock(nn.Module):
    """A convolution scaled by how often it was called; the count is replaced, not changed."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.drop2d = nn.Dropout(0.3), nn.Dropout2d(0.2)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        y = torch.relu(self.bn(self.conv(self.drop(x)))) * (1 / self.calls)
        return self.drop2d(y) + x


def network_of(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "bottlenecks":
        return ResNet(Bottleneck, (1, 2, 1, 1), num_classes=10, small_images=True)
    if name in ("unet_of_pairs", "counted"):
        return UNetOfPairs() if name == "unet_of_pairs" else Counted()
    return NETWORKS[name]() if name in NETWORKS else build(name, num_classes=10, small_images=True)


def recomputed(network: nn.Module, names: tuple[str, ...] = ("*",), size: int = 16) -> nn.Module:
    graph = trace(network, (2, 3, size, size))
    plan = Plan(mesh=Mesh({"data": 1}), execution=Execution(recompute=names), network=network_facts(graph))
    return parallelize(network, plan)


NAMES = ["bottlenecks", "vgg", "mobilenet", "densenet", "shufflenet", "unet_of_pairs", "counted"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_memory_changes(name: str) -> None:
    network = network_of(name).double()
    other = recomputed(copy.deepcopy(network))
    assert list(other.state_dict()) == list(network.state_dict())
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    for net in (network, other):
        for step in range(2):
            torch.manual_seed(step)
            net(x).square().sum().backward()
    for (key, one), two in zip(network.named_parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-12, atol=0, msg=key)
    for key, value in network.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value, rtol=0, atol=0, msg=key)


def kept_bytes(network: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[int]]:
    """Bytes kept by a forward, and by each block when it is computed again; parameters and buffers not counted."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers())}
    original, again = checkpoints._recomputation_hook, []

    class Counting(original):  # type: ignore[misc,valid-type]
        def __enter__(self) -> object:
            pack, sums = self.pack_hook, {}
            again.append(sums)

            def count(tensor: Tensor) -> object:
                storage = tensor.untyped_storage()
                buffers = {buffer.untyped_storage().data_ptr() for buffer in network.buffers()}  # Copies, right now.
                sums[storage.data_ptr()] = storage.nbytes() if storage.data_ptr() not in inputs | buffers else 0
                alive.append(tensor)
                return pack(tensor)

            alive: list[Tensor] = []
            self.pack_hook = count
            return super().__enter__()

    monkeypatch.setattr(checkpoints, "_recomputation_hook", Counting)
    inputs = set(own)
    kept: dict[int, Tensor] = {}

    def remember(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        y = network(x)
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    inputs |= kept.keys()
    y.sum().backward()
    return total, [sum(sums.values()) for sums in reversed(again)]


@pytest.mark.parametrize("name", NAMES[:-1])
def test_kept_bytes_are_those_that_were_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = network_of(name), torch.randn(2, 3, 16, 16)
    graph = trace(network, tuple(x.shape))
    told = kept_with(graph, blocks(graph))
    kept, again = kept_bytes(recomputed(network).train(), x, monkeypatch)
    assert kept == told.kept_bytes
    assert again == [sum(told.again[node] for node in entry.nodes) for entry in blocks(graph)]


def test_half_types_are_computed_again_as_they_were() -> None:
    network = network_of("bottlenecks")
    other = recomputed(copy.deepcopy(network))
    x = torch.randn(4, 3, 16, 16)
    for net in (network, other):
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        y.float().square().sum().backward()
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=0, atol=0)


def test_evaluation_and_copies_work_as_before() -> None:
    network = network_of("vgg")
    other = copy.deepcopy(recomputed(copy.deepcopy(network)))
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(x), network.eval()(x), rtol=0, atol=0)
        other.features[0].weight.zero_()
        assert not torch.equal(other(x), network(x))


class Listed(nn.Module):
    """Children in a list, called one after the other by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2)])
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.fc(x.mean((2, 3)))


def test_what_cannot_be_recomputed_is_refused() -> None:
    network = Listed()
    graph = trace(network, (2, 3, 16, 16))
    plan = Plan(mesh=Mesh({"data": 1}), execution=Execution(recompute=("layers.0-2",)), network=network_facts(graph))
    (error,) = refusals(network, resolve(graph, plan))
    assert "only an nn.Sequential calls its children" in str(error)
    with pytest.raises(ModelError, match="ModuleList"):
        parallelize(network, plan)
    twice = recomputed(network_of("vgg"))
    with pytest.raises(ModelError, match="split already"):
        recomputed(twice)

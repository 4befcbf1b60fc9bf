"""Networks of PyTorch that take regrouped images compute and learn what they did before, and keep their own state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import convmesh
from convmesh.config import parse_config
from convmesh.engines.contract import Batch, PixelScale
from convmesh.engines.torch.collectives import DataAxis
from convmesh.engines.torch.regroup import regroup_channels, regroup_images, regrouped_of
from convmesh.engines.torch.state import export_network
from convmesh.engines.torch.trace import trace
from convmesh.engines.torch.train_step import TorchTrainStep
from convmesh.errors import ConvMeshError
from convmesh.geometry.regrouping import ChannelRegrouping

pytestmark = pytest.mark.torch

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], dict[str, Any]]] = {
    "stem": (nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False), (3, 16, 12), {"space_to_depth": 2}),
    "patches": (nn.Conv2d(3, 8, 4, stride=4), (3, 16, 12), {"space_to_depth": 4}),
    "dilated": (nn.Conv2d(2, 6, 3, stride=(2, 4), padding=(1, 2), dilation=(2, 3)), (2, 12, 16), {"space_to_depth": 2}),
    "depthwise": (nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3), (3, 8, 8), {"space_to_depth": 2, "pad": 3}),
    "ordered": (nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 7, 5), {"pad_to": 6, "order": [5, 2, 0, 3, 1, 4]}),
    "padded": (nn.Conv2d(3, 8, 3, padding=1), (3, 7, 5), {"pad_to": 4}),
    "one-dimensional": (nn.Conv1d(3, 8, 5, stride=2, padding=2), (3, 12), {"space_to_depth": 2, "num_dims": 1}),
    "volumes": (nn.Conv3d(1, 4, 3, stride=2, padding=1), (1, 6, 8, 4), {"space_to_depth": 2, "num_dims": 3}),
}


class Wrapped(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.first(x))


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_the_original(name: str) -> None:
    layer, shape, settings = LAYERS[name]
    before = Wrapped(copy.deepcopy(layer)).double()
    regrouping = ChannelRegrouping.of(shape[0], **settings)
    after = regroup_channels(copy.deepcopy(before), regrouping, image_shape=shape)
    kept = regrouped_of(after)
    assert kept is not None
    graph = trace(after, (2, regrouping.num_regrouped, *regrouping.sizes(shape[1:])))
    assert [node.kind for node in graph] == ["input", "convolution", "elementwise"]
    assert graph.node("first").attributes == kept.attributes
    x = torch.randn(2, *shape, dtype=torch.float64)
    np.testing.assert_array_equal(regroup_images(x, regrouping).numpy(), regrouping.images(x.numpy()))
    results = []
    for network, prepare in ((before, nn.Identity()), (after, lambda images: regroup_images(images, regrouping))):
        images = x.clone().requires_grad_()
        y = network(prepare(images))
        (y * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)).sum().backward()
        results.append((y, images.grad, {key: p.grad.numpy() for key, p in network.named_parameters()}))
    (y, of_x, gradients), (y_after, of_x_after, gradients_after) = results
    torch.testing.assert_close(y_after, y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_x_after, of_x, rtol=1e-12, atol=1e-12)
    assert not gradients_after["first.weight"][~kept.convolution.is_weight].any()
    for key, gradient in kept.to_original(gradients_after).items():
        np.testing.assert_allclose(gradient, gradients[key], rtol=1e-10, atol=1e-12, err_msg=key)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01, "clip_norm": 0.5},
        {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.1, "clip_norm": 0.5},
    ],
    ids=["sgd", "adamw"],
)
def test_many_steps_are_those_of_the_original(optimizer: dict[str, Any]) -> None:
    run = parse_config(
        {
            "engine": "torch",
            "model": {"name": "resnet18"},
            "data": {"source": "digits"},
            "optimizer": optimizer,
            "train": {"global_batch": 6, "weight_average": 0.9, "device": "cpu"},
        }
    )
    regrouping = ChannelRegrouping.of(3, space_to_depth=2, pad_to=16, order=[*range(15, -1, -1)])
    torch.manual_seed(0)
    before = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(128, 5))
    before = before.double()
    after = regroup_channels(copy.deepcopy(before), regrouping, image_shape=(3, 8, 8))
    axis = DataAxis(None)
    scale = PixelScale((0.01, 0.02, 0.03), (-1.0, 0.5, -0.2))
    origins = [None if origin is None else origin.channel for origin in regrouping.origins]
    regrouped_scale = PixelScale(
        tuple(0.0 if c is None else scale.factor_C[c] for c in origins),
        tuple(0.0 if c is None else scale.offset_C[c] for c in origins),
    )
    one = TorchTrainStep(before, run, pixel_scale=scale, axis=axis)
    two = TorchTrainStep(after, run, pixel_scale=regrouped_scale, axis=axis)
    draw = np.random.default_rng(0)
    for update in range(12):
        images = draw.integers(0, 256, (6, 8, 8, 3)).astype(np.uint8)
        labels, weights = draw.integers(0, 5, 6).astype(np.int32), np.ones(6, np.float32)
        moved = np.moveaxis(regrouping.images(np.moveaxis(images, -1, 1)), 1, -1)
        told = [
            step.update(
                [Batch(pixels, labels, weights)],
                global_count=6,
                learning_rate=0.05,
                loss_scale=1.0,
                update_index=update,
            )
            for step, pixels in ((one, images), (two, moved))
        ]
        np.testing.assert_allclose(float(told[1].loss_sum), float(told[0].loss_sum), rtol=1e-9)
        np.testing.assert_allclose(told[1].gradient_norm, told[0].gradient_norm, rtol=1e-9)
    kept = regrouped_of(after)
    assert kept is not None
    assert not export_network(after)["0.weight"][~kept.convolution.is_weight].any()
    assert two.num_parameters() == one.num_parameters()
    expected, got = one.export_state(), two.export_state()
    for part in ("network", "optimizer", "average"):
        assert getattr(got, part).keys() == getattr(expected, part).keys()
        for name, value in getattr(expected, part).items():
            np.testing.assert_allclose(getattr(got, part)[name], value, rtol=1e-8, atol=1e-12, err_msg=name)
    # A state goes from one to the other and back.
    two.import_state(expected)
    for name, value in two.export_state().optimizer.items():
        np.testing.assert_array_equal(value, expected.optimizer[name], err_msg=name)


def test_a_copy_of_a_regrouped_network_keeps_zeros_too() -> None:
    network = regroup_channels(
        Wrapped(nn.Conv2d(3, 4, 3, 2, 1)), ChannelRegrouping.of(3, space_to_depth=2), image_shape=(3, 8, 8)
    )
    kept, twin = regrouped_of(network), copy.deepcopy(network)
    assert kept is not None
    twin(torch.randn(2, 12, 4, 4)).sum().backward()
    gradient = twin.first.weight.grad.numpy()
    assert not gradient[~kept.convolution.is_weight].any()
    assert gradient[kept.convolution.is_weight].any()


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + x.mean()


class PaddedOutside(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (1, 1, 1, 1), mode=self.mode))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x))


@pytest.mark.parametrize(
    ("network", "settings", "told"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), {"space_to_depth": 2},
         "blocks do not fit the stride of 0.*got stride 1x1, blocks of 2.*Add zero channels instead, with 'pad_to'"),
        (nn.Sequential(nn.Conv2d(3, 4, 3, stride=2)), {"space_to_depth": 4}, "Use 'space_to_depth: 2'"),
        (nn.Sequential(nn.Conv2d(3, 4, 3, stride=6)), {"space_to_depth": 3}, "got 8x8 pixels, blocks of 3.*6x6 pixels"),
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")), {"pad_to": 4}, "mode 'reflect'"),
        (PaddedOutside("constant"), {"pad_to": 4}, "which is no convolution|can't be replaced"),
        (PaddedOutside("circular"), {"pad_to": 4}, "which is no convolution"),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), {"pad_to": 4}, r"0 takes them.*got batch_norm"),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 3)), {"pad_to": 4}, "got a transposed convolution"),
        (nn.Sequential(nn.Conv2d(4, 4, 3)), {"pad_to": 4}, None),
        (Functional(), {"pad_to": 4}, r"several operators use them.*conv \(convolution\), mean \(mean\)"),
        (Shared(), {"pad_to": 4}, "can't be replaced"),
    ],
)  # fmt: skip
def test_what_cannot_be_exact_is_refused_by_name(
    network: nn.Module, settings: dict[str, Any], told: str | None
) -> None:
    with pytest.raises(ConvMeshError, match=told):
        regroup_channels(network, ChannelRegrouping.of(3, **settings), image_shape=(3, 8, 8))
    assert regrouped_of(network) is None


def test_checkpoints_of_ones_own_loop_hold_the_original(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(128, 5))
    network = copy.deepcopy(before)
    regrouping = convmesh.ChannelRegrouping.of(3, space_to_depth=2)
    convmesh.regroup_channels(network, regrouping, (2, 3, 8, 8))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(2, 3, 8, 8)
    network(convmesh.regroup_images(x, regrouping)).sum().backward()
    optimizer.step()
    path = convmesh.save_checkpoint(tmp_path, network, optimizer, update=1)
    plain = torch.optim.SGD(before.parameters(), lr=0.1, momentum=0.9)
    assert convmesh.load_checkpoint(path, before, plain) == 1
    assert plain.state[before[0].weight]["momentum_buffer"].shape == (8, 3, 7, 7)
    network.eval()
    before.eval()
    torch.testing.assert_close(network(convmesh.regroup_images(x, regrouping)), before(x), rtol=1e-5, atol=1e-5)
    assert convmesh.gather_state(network)["0.weight"].shape == (8, 3, 7, 7)
    convmesh.load_checkpoint(path, network, optimizer)
    with pytest.raises(ConvMeshError, match="regrouped images already"):
        convmesh.regroup_channels(network, regrouping, (2, 3, 8, 8))

"""The reference networks on PyTorch: parameter counts, names, options, initial weights."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from convmesh.errors import ModelError
from convmesh.models.torch import build

pytestmark = pytest.mark.torch


def num_parameters(network: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("name", "expected"), [("resnet18", 11_689_512), ("resnet50", 25_557_032), ("resnet152", 60_192_808)]
)
def test_resnets_have_the_published_number_of_parameters(name: str, expected: int) -> None:
    with torch.device("meta"):
        assert num_parameters(build(name, num_classes=1000)) == expected


def test_cnn_small_has_the_number_of_parameters_that_its_header_states() -> None:
    assert num_parameters(build("cnn-small")) == 66_362


def test_resnet_names_are_torchvisions() -> None:
    with torch.device("meta"):
        names = set(build("resnet50").state_dict())
    for name in ("conv1.weight", "bn1.running_mean", "layer1.0.downsample.0.weight", "layer4.2.bn3.bias", "fc.bias"):
        assert name in names
    assert len(names) == 320
    assert "layer1.0.downsample.0.weight" not in set(build("resnet18").state_dict())


@pytest.mark.parametrize("size", [4, 8, 28, 33])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_cnn_small_takes_any_size(size: int, batch_norm: bool) -> None:
    network = build("cnn-small", num_classes=7, num_channels=1, batch_norm=batch_norm)
    assert network(torch.zeros(2, 1, size, size)).shape == (2, 7)


def test_small_images_keep_their_resolution_in_the_stem() -> None:
    small, usual = build("resnet18", small_images=True, num_classes=3), build("resnet18", num_classes=3)
    x_NCHW = torch.zeros(1, 3, 32, 32)
    assert small.maxpool(small.conv1(x_NCHW)).shape[-2:] == (32, 32)
    assert usual.maxpool(usual.conv1(x_NCHW)).shape[-2:] == (8, 8)
    assert small(x_NCHW).shape == (1, 3)


def test_zero_init_residual_starts_blocks_as_identity() -> None:
    network = build("resnet18", zero_init_residual=True, small_images=True)
    block = network.layer1[0].eval()
    x_NCHW = torch.rand(1, 64, 4, 4)
    torch.testing.assert_close(block(x_NCHW), x_NCHW)
    assert build("resnet18").layer1[0].bn2.weight.min() == 1


def test_initial_weights_follow_their_distributions() -> None:
    torch.manual_seed(0)
    network = build("resnet18", num_classes=1000)
    weight = network.layer4[1].conv2.weight
    assert abs(weight.std().item() / (2 / (512 * 9)) ** 0.5 - 1) < 0.01
    bound = 512**-0.5
    assert 0.99 * bound < network.fc.weight.abs().max().item() <= bound
    assert network.fc.bias.abs().max().item() <= bound


def test_unknown_names_and_arguments_are_sentences() -> None:
    with pytest.raises(ModelError, match="resnet50"):
        build("resnet51")
    with pytest.raises(ModelError, match=r"small_image'.*small_images"):
        build("resnet18", small_image=True)

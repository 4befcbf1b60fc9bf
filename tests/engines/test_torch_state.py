"""State of a user's own network and optimizer, without the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from convmesh.engines.torch.state import export_network, export_optimizer, import_network, import_optimizer
from convmesh.errors import CheckpointError

pytestmark = pytest.mark.torch


def network_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


def train(network: nn.Module, optimizer: torch.optim.Optimizer, num_updates: int) -> None:
    for number in range(num_updates):
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        network(x).square().sum().backward()
        optimizer.step()


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_users_loop_resumes_to_the_same_numbers(name: str) -> None:
    network = network_of(0).to(memory_format=torch.channels_last)
    optimizer = OPTIMIZERS[name](network.parameters())
    train(network, optimizer, 2)
    arrays, slots = export_network(network), export_optimizer(optimizer, network)
    train(network, optimizer, 2)

    other = network_of(1)
    resumed = OPTIMIZERS[name](other.parameters())
    import_network(other, arrays)
    import_optimizer(resumed, other, slots)
    train(other, resumed, 2)
    for key, value in export_network(network).items():
        np.testing.assert_allclose(export_network(other)[key], value, rtol=1e-5, atol=1e-7, err_msg=key)


def test_slots_have_neutral_names() -> None:
    network = network_of(0)
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    train(network, optimizer, 1)
    slots = export_optimizer(optimizer, network)
    assert set(slots) == {f"momentum/{name}" for name, _ in network.named_parameters()}


def test_the_counter_of_batches_may_be_absent() -> None:
    network = network_of(0)
    arrays = export_network(network_of(1))
    del arrays["1.num_batches_tracked"]
    import_network(network, arrays)
    np.testing.assert_array_equal(export_network(network)["0.weight"], arrays["0.weight"])


def test_half_a_checkpoint_is_refused_and_changes_nothing() -> None:
    network = network_of(0)
    before = export_network(network)
    arrays: dict[str, Any] = export_network(network_of(1))
    del arrays["4.bias"]
    arrays["4.weight"] = np.zeros((3, 4), np.float32)
    with pytest.raises(CheckpointError) as caught:
        import_network(network, arrays)
    assert "4.bias" in str(caught.value)
    assert "4.weight (3, 4) for (2, 4)" in str(caught.value)
    for name, value in export_network(network).items():
        np.testing.assert_array_equal(value, before[name])


def test_optimizer_tensors_of_another_network_are_refused() -> None:
    network = network_of(0)
    optimizer = OPTIMIZERS["sgd"](network.parameters())
    with pytest.raises(CheckpointError, match="momentum/other"):
        import_optimizer(optimizer, network, {"momentum/other": np.zeros(3)})

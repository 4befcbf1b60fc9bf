"""The training loops of the README, run as they stand there, beside the same loops on one device."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

import convmesh
from convmesh.engines.contract import Engine, World

GLOBAL_BATCH, NUM_BATCHES = 8, 2


def _batches(position: int, size: int, convert: Callable[[np.ndarray], Any]) -> list[tuple[Any, Any]]:
    """Batches of one position on a data axis of a size."""
    draw = np.random.default_rng(0)
    own = slice(GLOBAL_BATCH // size * position, GLOBAL_BATCH // size * (position + 1))
    images = draw.standard_normal((NUM_BATCHES, GLOBAL_BATCH, 3, 16, 16)).astype(np.float32)
    labels = np.arange(GLOBAL_BATCH, dtype=np.int32)
    return [(convert(batch[own]), convert(labels[own])) for batch in images]


def torch_loop(_engine: Engine, world: World, *, code: str) -> dict[str, Any]:
    """The loop of PyTorch."""
    import torch
    from torch.nn import functional as F

    from tests.networks_torch import NETWORKS

    torch.manual_seed(0)
    network = NETWORKS["swish"]()
    alone = copy.deepcopy(network)
    position = convmesh.Mesh({"data": 2, "channel": 2}).coordinate(world.rank)["data"]

    def convert(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(torch.float32 if array.ndim > 1 else torch.int64)

    names = {"convmesh": convmesh, "torch": torch, "F": F, "network": network, "global_batch": GLOBAL_BATCH}
    names["loader"] = _batches(position, 2, convert)
    exec(code, names)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for images, labels in _batches(0, 1, convert):
        optimizer.zero_grad()
        F.cross_entropy(alone(images), labels).backward()
        optimizer.step()
    expected = {name: tensor.detach().numpy() for name, tensor in alone.state_dict().items()}
    num_held = sum(parameter.numel() for parameter in names["network"].parameters())
    return _answer(names["state"], expected, num_held)


def mindspore_loop(_engine: Engine, world: World, *, code: str) -> dict[str, Any]:
    """The loop of MindSpore."""
    import mindspore
    from mindspore import Tensor, nn

    from convmesh.engines.mindspore.state import export_network
    from tests.networks_mindspore import NETWORKS

    networks = []
    for _ in range(2):
        mindspore.set_seed(1)
        networks.append(NETWORKS["swish"]())
    network, alone = networks
    position = convmesh.Mesh({"data": 2, "channel": 2}).coordinate(world.rank)["data"]
    names = {"convmesh": convmesh, "mindspore": mindspore, "nn": nn, "network": network, "global_batch": GLOBAL_BATCH}
    names["loader"] = _batches(position, 2, Tensor)
    exec(code, names)
    optimizer = nn.SGD(alone.trainable_params(), learning_rate=0.1, momentum=0.9)
    loss = nn.WithLossCell(alone, nn.CrossEntropyLoss())
    differentiate = mindspore.value_and_grad(loss, None, optimizer.parameters)
    for images, labels in _batches(0, 1, Tensor):
        optimizer(differentiate(images, labels)[1])
    num_held = sum(parameter.size for parameter in names["network"].trainable_params())
    return _answer(names["state"], export_network(alone), num_held)


def run(engine: Engine, world: World, *, name: str, code: str) -> dict[str, Any]:
    """The loop of an engine by its name."""
    loop = getattr(importlib.import_module(__name__), f"{name}_loop")
    answer: dict[str, Any] = loop(engine, world, code=code)
    return answer


def _answer(state: dict[str, Any], expected: dict[str, Any], num_held: int) -> dict[str, Any]:
    return {
        "state": state,
        "expected": expected,
        "num_held": num_held,
        "num_whole": sum(array.size for array in expected.values()),
    }

"""Recomputed blocks on MindSpore: equal numbers, statistics that learn once, equal masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore")

import mindspore as ms
from mindspore import Tensor, nn, ops

from convmesh.engines.mindspore.objective import compute_in_half
from convmesh.engines.mindspore.parallelize import parallelize, refusals
from convmesh.engines.mindspore.state import export_network
from convmesh.engines.tracing import trace
from convmesh.mesh import Mesh
from convmesh.plan import Execution, Plan, resolve
from convmesh.plan.network import network_facts
from tests.networks_mindspore import NETWORKS, batch_norm, conv

pytestmark = pytest.mark.mindspore


@pytest.fixture(autouse=True)
def graph_mode() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")


class Residual(nn.Cell):
    """A residual block with batch norm and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(width, width, 3, bias=False), conv(width, width, 3)
        self.bn1, self.bn2 = batch_norm(width), batch_norm(width)
        self.drop, self.relu = nn.Dropout(p=0.3), nn.ReLU()

    def construct(self, x: Tensor) -> Tensor:
        return self.relu(x + self.bn2(self.conv2(self.drop(self.relu(self.bn1(self.conv1(x)))))))


class Residuals(nn.Cell):
    """Residual blocks, then a flat run of layers with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8, 3)
        self.blocks = nn.SequentialCell(Residual(8), Residual(8))
        self.tail = nn.SequentialCell(
            conv(8, 8, 3), batch_norm(8), nn.ReLU(), nn.MaxPool2d(2, 2), conv(8, 8, 3), batch_norm(8), nn.ReLU()
        )
        self.fc = nn.Dense(8, 10)

    def construct(self, x: Tensor) -> Tensor:
        return self.fc(ops.mean(self.tail(self.blocks(self.stem(x))), (2, 3)))


def trained(name: str, *, recompute: bool, half: bool = False) -> dict[str, Any]:
    """Losses, last gradients and state after three forwards and backwards."""
    ms.set_seed(1)
    network: nn.Cell = Residuals() if name == "residuals" else NETWORKS[name]()
    graph = trace(network, (4, 3, 16, 16))
    names = list(export_network(network))
    if recompute:
        plan = Plan(mesh=Mesh({"data": 1}), execution=Execution(recompute=("*",)), network=network_facts(graph))
        assert resolve(graph, plan).recomputed
        parallelize(network, plan)
    if half:
        compute_in_half(network, dtype=ms.float16, on_cpu=True)
    assert list(export_network(network)) == names
    network.set_train()
    loss = nn.WithLossCell(network, nn.CrossEntropyLoss())
    differentiate = ms.value_and_grad(loss, None, ms.ParameterTuple(network.trainable_params()))
    images = np.random.default_rng(0).standard_normal((3, 4, 3, 16, 16)).astype(np.float32)
    labels = Tensor(np.arange(4).astype(np.int32))
    losses, gradients = [], ()
    for batch in images:
        value, gradients = differentiate(Tensor(batch), labels)
        losses.append(float(value.asnumpy()))
    network.set_train(False)
    return {
        "losses": np.array(losses),
        "state": export_network(network),
        "gradients": [gradient.asnumpy() for gradient in gradients],
        "scores": network(Tensor(images[0])).asnumpy(),
    }


@pytest.mark.parametrize(("name", "half"), [("residuals", False), ("residuals", True), ("vgg", False)])
def test_nothing_but_memory_changes(name: str, half: bool) -> None:
    plain, again = (trained(name, recompute=recompute, half=half) for recompute in (False, True))
    np.testing.assert_allclose(again["losses"], plain["losses"], rtol=1e-6)
    for one, two in zip(plain["gradients"], again["gradients"], strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6)
    for key, value in plain["state"].items():
        np.testing.assert_allclose(again["state"][key], value, rtol=1e-6, atol=1e-7, err_msg=key)
    np.testing.assert_allclose(again["scores"], plain["scores"], rtol=1e-5, atol=1e-6)


class Listed(nn.Cell):
    """Children in a list, called one after the other by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([conv(3, 8, 3), nn.ReLU(), conv(8, 8, 3), nn.MaxPool2d(2, 2)])
        self.fc = nn.Dense(8, 10)

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.fc(ops.mean(x, (2, 3)))


def test_what_cannot_be_recomputed_is_refused() -> None:
    network = Listed()
    graph = trace(network, (2, 3, 16, 16))
    plan = Plan(mesh=Mesh({"data": 1}), execution=Execution(recompute=("layers.0-2",)), network=network_facts(graph))
    (error,) = refusals(network, resolve(graph, plan))
    assert "only an nn.SequentialCell calls its children" in str(error)

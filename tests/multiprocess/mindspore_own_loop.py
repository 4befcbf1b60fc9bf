"""A training loop as people write it, with a network that ConvMesh splits; and what its ranks refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

import convmesh
from convmesh.engines.contract import Engine, World
from convmesh.engines.mindspore.channel_split import FromFirst
from convmesh.engines.mindspore.graph_record import Recorded
from convmesh.engines.mindspore.state import export_network
from tests.multiprocess.mindspore_channel_cases import axis_of
from tests.multiprocess.mindspore_channel_training import Slopes


def network_of() -> nn.Cell:
    ms.set_seed(1)
    return Slopes()


def train(_engine: Engine, world: World, *, sizes: Mapping[str, int]) -> dict[str, Any]:
    network, alone = network_of(), network_of()
    mesh = convmesh.Mesh(sizes)
    graph = convmesh.trace(network, (4, 3, 12, 12))
    network = convmesh.parallelize(network, convmesh.plan_by_rule(graph, mesh, min_multiply_adds=0))
    draw = np.random.default_rng(0)
    images, labels = draw.standard_normal((8, 3, 12, 12)).astype(np.float32), np.arange(8, dtype=np.int32)
    first = 8 // mesh.size("data") * mesh.coordinate(world.rank).get("data", 0)
    own = slice(first, first + 8 // mesh.size("data"))
    for net, part in ((network, own), (alone, slice(0, 8))):
        optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        loss = nn.WithLossCell(net, nn.CrossEntropyLoss(reduction="sum"))
        differentiate = ms.value_and_grad(loss, None, optimizer.parameters)
        for _ in range(3):
            _, gradients = differentiate(Tensor(images[part]), Tensor(labels[part]))
            gradients = tuple(gradient / len(labels) for gradient in gradients)
            if net is network:
                gradients = convmesh.reduce_gradients(net, gradients)
            optimizer(gradients)
    return {
        "state": convmesh.gather_state(network),
        "alone": export_network(alone),
        "num_held": sum(parameter.size for parameter in network.trainable_params()),
        "num_whole": sum(parameter.size for parameter in alone.trainable_params()),
    }


def mistakes(_engine: Engine, world: World) -> tuple[str, ...]:
    network = network_of()
    graph = convmesh.trace(network, (2, 3, 12, 12))
    plan = convmesh.plan_by_rule(graph, convmesh.Mesh({"channel": world.num_ranks}), min_multiply_adds=0)
    not_split = said(lambda: convmesh.reduce_gradients(network, ()))
    convmesh.parallelize(network, plan)
    twice = said(lambda: convmesh.parallelize(network, plan))
    too_few = said(lambda: convmesh.reduce_gradients(network, ()))
    larger = convmesh.plan_by_rule(graph, convmesh.Mesh({"channel": 2 * world.num_ranks}), min_multiply_adds=0)
    return not_split, twice, too_few, said(lambda: convmesh.parallelize(network_of(), larger))


def said(action: Callable[[], object]) -> str:
    try:
        action()
    except convmesh.ConvMeshError as error:
        return str(error)
    return ""


class Unlike(nn.Cell):
    """Another graph on each rank."""

    def __init__(self, rank: int, axis: Any) -> None:
        super().__init__(auto_prefix=False)
        self.is_first = rank == 0
        self.sum = axis.collective("AllReduce", "all-reduce")

    def construct(self, x: Tensor) -> Tensor:
        if self.is_first:
            return self.sum(ops.relu(x))
        return ops.relu(self.sum(x))


def unlike(_engine: Engine, world: World) -> str:
    recorded = Recorded(Unlike(world.rank, axis_of(world)), axis_of(world))
    return said(lambda: recorded(Tensor(np.ones(3, np.float32))))


def from_first(_engine: Engine, world: World) -> list[np.ndarray]:
    own = [np.full((2, 3), world.rank + 1.0, np.float32), np.full(4, 10.0 * world.rank + 5, np.float32)]
    found = FromFirst([(2, 3), (4,)], axis_of(world))(*[Tensor(array) for array in own])
    return [tensor.asnumpy() for tensor in found]

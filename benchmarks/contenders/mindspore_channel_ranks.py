"""One device, data parallel and channel parallel training of one network on MindSpore; runs on every rank.

The twin of `benchmarks.contenders.channel_ranks`. The loop is the one people write themselves: one device is plain
MindSpore, data parallel sums gradients as `convmesh.reduce_gradients` does, channel parallel is split by rule.

Legend: N samples, C channels, H rows, W columns.
"""

from __future__ import annotations

import resource

import mindspore as ms
import numpy as np
from benchmarks.contenders.channel_wire import Wire
from benchmarks.contenders.channel_work import NUM_CLASSES, Memory, Network, Seconds, resident_bytes, timed
from mindspore import Tensor, nn

import convmesh
from convmesh.engines.contract import Engine, World
from convmesh.engines.mindspore.channel_split import split_of
from convmesh.models.mindspore import build


class WideField(nn.Cell):
    """Four 3x3 convolutions of 32 channels with batch norm and ReLU at full resolution, and a linear classifier."""

    def __init__(self, num_channels: int = 32, num_layers: int = 4) -> None:
        super().__init__()
        layers: list[nn.Cell] = []
        for number in range(num_layers):
            layers += [
                nn.Conv2d(num_channels if number else 3, num_channels, 3, pad_mode="pad", padding=1, has_bias=False),
                nn.BatchNorm2d(num_channels),
                nn.ReLU(),
            ]
        self.features = nn.SequentialCell(layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Dense(num_channels, NUM_CLASSES)

    def construct(self, x_NCHW: Tensor) -> Tensor:
        """Scores of each class."""
        return self.fc(self.flatten(self.pool(self.features(x_NCHW))))


class _Trainer:
    """A network, its optimizer and its share of the global batch."""

    def __init__(self, network: Network, axis: str, world: World) -> None:
        ms.set_seed(0)
        self.cell: nn.Cell = (
            WideField() if network.name == "wide_field" else build(network.name, num_classes=NUM_CLASSES)
        )
        draw = np.random.default_rng(0)
        images_NCHW = draw.standard_normal(
            (network.global_batch, 3, network.image_size, network.image_size), np.float32
        )
        labels_N = draw.integers(0, NUM_CLASSES, network.global_batch).astype(np.int32)
        own = slice(0, network.global_batch)
        self._splits = axis != "one"
        if self._splits:
            graph = convmesh.trace(self.cell, tuple(images_NCHW.shape))
            convmesh.parallelize(self.cell, convmesh.plan_by_rule(graph, convmesh.Mesh({axis: world.num_ranks})))
        if axis == "data":
            num_own = network.global_batch // world.num_ranks
            own = slice(world.rank * num_own, (world.rank + 1) * num_own)
        self._images_NCHW, self._labels_N = Tensor(images_NCHW[own]), Tensor(labels_N[own])
        self.optimizer = nn.Momentum(self.cell.trainable_params(), 0.01, 0.9)
        self._mean = 1.0 / network.global_batch
        loss = nn.WithLossCell(self.cell, nn.CrossEntropyLoss(reduction="sum"))
        loss.set_train()
        self._differentiate = ms.value_and_grad(loss, None, self.optimizer.parameters)

    def step(self) -> None:
        """One step of training."""
        _, gradients = self._differentiate(self._images_NCHW, self._labels_N)
        _ = gradients[-1].shape  # Else whoever computes with it first would wait for it in a busy loop, one device too.
        if self._splits:
            gradients = convmesh.reduce_gradients(self.cell, gradients)
        self.optimizer(tuple(gradient * self._mean for gradient in gradients))
        self.optimizer.parameters[0].asnumpy()


_trainers: dict[str, _Trainer] = {}
_wires: dict[str, Wire] = {}


def prepare(engine: Engine, world: World, *, network: Network, axis: str, num_threads: int) -> Memory:
    """Builds a network on this rank of an axis, trains two steps, and tells the memory that they took."""
    before = resident_bytes()
    trainer = _trainers["only"] = _Trainer(network, axis, world)
    for _ in range(2):
        trainer.step()
    parameters = trainer.cell.trainable_params()
    held = sum(parameter.nbytes for parameter in parameters)
    split, wire = split_of(trainer.cell), None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if split is not None and split.axis.exchange is not None:
        wire = _wires["only"] = Wire(split.axis.exchange)
        wire.recording = True
        trainer.step()
        wire.recording = False
    return Memory(
        parameter_bytes=held,
        optimizer_bytes=sum(state.nbytes for state in trainer.optimizer.get_parameters()) - held,
        saved_bytes=0,
        resident_bytes=peak - before,
        sent_bytes=wire.num_bytes if wire is not None else 0,
    )


def run(engine: Engine, world: World, *, num_steps: int) -> Seconds:
    """Trains some steps and tells the seconds of one on this rank."""
    return timed(_trainers["only"].step, _wires.get("only"), lambda: engine.all_gather(None), num_steps=num_steps)

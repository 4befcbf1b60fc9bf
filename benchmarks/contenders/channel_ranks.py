"""One device, data parallel and channel parallel training of one network; runs on every rank.

The loop is the one people write themselves: one device is plain PyTorch, data parallel is PyTorch's own
DistributedDataParallel, channel parallel is a network that ConvMesh splits by rule.

Legend: N samples, C channels, H rows, W columns.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from benchmarks.contenders.channel_wire import Wire
from benchmarks.contenders.channel_work import NUM_CLASSES, Memory, Network, Seconds, resident_bytes, timed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import convmesh
from convmesh.engines.contract import Engine, World
from convmesh.engines.torch.channel_split import split_of
from convmesh.models.torch import build


class WideField(nn.Module):
    """Four 3x3 convolutions of 32 channels with batch norm and ReLU at full resolution, and a linear classifier."""

    def __init__(self, num_channels: int = 32, num_layers: int = 4) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number in range(num_layers):
            layers += [
                nn.Conv2d(num_channels if number else 3, num_channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(num_channels),
                nn.ReLU(inplace=True),
            ]
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(num_channels, NUM_CLASSES)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Scores of each class."""
        y: Tensor = self.fc(self.flatten(self.pool(self.features(x_NCHW))))
        return y


class _Trainer:
    """A network, its optimizer and its share of the global batch."""

    def __init__(self, network: Network, axis: str, world: World) -> None:
        torch.manual_seed(0)
        known = WideField() if network.name == "wide_field" else build(network.name, num_classes=NUM_CLASSES)
        self.module: nn.Module = known.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images_NCHW = torch.randn(network.global_batch, 3, network.image_size, network.image_size)
        labels_N = torch.randint(0, NUM_CLASSES, (network.global_batch,))
        own = slice(0, network.global_batch)
        self._forward: Callable[[Tensor], Tensor] = self.module
        if axis == "data":
            num_own = network.global_batch // world.num_ranks
            own = slice(world.rank * num_own, (world.rank + 1) * num_own)
            self._forward = DistributedDataParallel(self.module)
        elif axis == "channel":
            graph = convmesh.trace(self.module, tuple(images_NCHW.shape))
            plan = convmesh.plan_by_rule(graph, convmesh.Mesh({"channel": world.num_ranks}))
            convmesh.parallelize(self.module, plan)
        self._splits = axis == "channel"
        self._images_NCHW = images_NCHW[own].clone(memory_format=torch.channels_last)
        self._labels_N = labels_N[own].clone()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9)

    def step(self, saved: _SavedBytes | None = None) -> None:
        """One step of training; DistributedDataParallel averages gradients, so each rank takes its own mean loss."""
        self.optimizer.zero_grad()
        with saved.counted() if saved is not None else contextlib.nullcontext():
            loss = F.cross_entropy(self._forward(self._images_NCHW), self._labels_N)
        loss.backward()
        if self._splits:
            convmesh.reduce_gradients(self.module)
        self.optimizer.step()


class _SavedBytes:
    """Bytes of the memories that the forward keeps for the backward, each counted once, parameters not."""

    def __init__(self, module: nn.Module) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._sizes: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(self._sizes.values())

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what is saved within."""

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own:
                self._sizes[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # The tensor itself could hold the function that holds it.

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


_trainers: dict[str, _Trainer] = {}
_wires: dict[str, Wire] = {}


def prepare(engine: Engine, world: World, *, network: Network, axis: str, num_threads: int) -> Memory:
    """Builds a network on this rank of an axis, trains two steps, and tells the memory that they took."""
    torch.set_num_threads(num_threads)
    before = resident_bytes()
    trainer = _trainers["only"] = _Trainer(network, axis, world)
    trainer.step()  # Makes the optimizer's state.
    saved = _SavedBytes(trainer.module)
    split = split_of(trainer.module)
    if split is not None:
        split.axis.begin_update()
    trainer.step(saved)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sent_bytes = sum(count.num_bytes for count in split.axis.counts()) if split is not None else 0
    if split is not None and (shared := split.axis._transports._shared) is not None:
        wire = _wires["only"] = Wire(shared._exchange)
        wire.recording = True
        trainer.step()
        wire.recording = False
    states = [tensor for state in trainer.optimizer.state.values() for tensor in state.values() if tensor is not None]
    return Memory(
        parameter_bytes=sum(map(_num_bytes, trainer.module.parameters())),
        optimizer_bytes=sum(map(_num_bytes, states)),
        saved_bytes=saved.total,
        resident_bytes=peak - before,
        sent_bytes=sent_bytes,
    )


def run(engine: Engine, world: World, *, num_steps: int) -> Seconds:
    """Trains some steps and tells the seconds of one on this rank."""
    return timed(_trainers["only"].step, _wires.get("only"), lambda: engine.all_gather(None), num_steps=num_steps)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

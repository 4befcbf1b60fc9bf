"""Training on ranks of MindSpore that split a network along channels, and the same on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from convmesh.data.channels import regroup_images, regroup_scale
from convmesh.engines.contract import Batch, Engine, TrainState, World
from convmesh.engines.mindspore.channel_axis import channel_axis
from convmesh.engines.mindspore.collectives import data_axis
from convmesh.engines.mindspore.engine import MindSporeEngine
from convmesh.engines.mindspore.regroup import regroup_channels
from convmesh.engines.mindspore.state import export_network
from convmesh.engines.mindspore.trace import trace
from convmesh.engines.mindspore.verification import OneDevice
from convmesh.geometry import ChannelRegrouping
from convmesh.mesh import Mesh
from convmesh.models.mindspore import build
from convmesh.plan import Choice, Entry, Execution, Plan, resolve
from convmesh.plan.by_rule import plan_by_rule
from convmesh.plan.collectives import SAMPLES_TOLD, channel_collectives
from convmesh.plan.network import network_facts
from convmesh.training.sync import check_sync
from tests.multiprocess.alive import live_tensors, whole_alive
from tests.multiprocess.mindspore_cases import GLOBAL_BATCH, SCALE, micro_batches, run_config
from tests.networks_mindspore import NETWORKS

FULL = (GLOBAL_BATCH,) * 3

_engines: dict[str, MindSporeEngine] = {}


def on_mesh(world: World, sizes: Mapping[str, int]) -> tuple[MindSporeEngine, World]:
    """The ranks of a pool as another mesh; groups are made once."""
    mesh = Mesh(sizes)
    placed = dataclasses.replace(world, mesh=mesh)
    if str(mesh) not in _engines:
        engine = MindSporeEngine()
        engine._world = placed
        engine._axis = data_axis(placed)
        engine._channel = channel_axis(placed)
        _engines[str(mesh)] = engine
    return _engines[str(mesh)], placed


class Slopes(nn.Cell):
    """Convolutions with one learned slope for all channels, which every rank uses for its own channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 9, 3, pad_mode="pad", padding=1, has_bias=True)
        self.act1 = nn.PReLU(1)
        self.conv2 = nn.Conv2d(9, 7, 3, pad_mode="pad", padding=1, has_bias=True)
        self.act2 = nn.PReLU(1)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Dense(7, 10)

    def construct(self, x: Tensor) -> Tensor:
        x = self.act2(self.conv2(self.act1(self.conv1(x))))
        return self.fc(self.flatten(self.avgpool(x)))


class Drops(nn.Cell):
    """Dropout of split channels, of pixels and whole, of split features, and of a tensor that all ranks drop alike."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, pad_mode="pad", padding=1, has_bias=True)
        self.drop1 = nn.Dropout(p=0.2)
        self.conv2 = nn.Conv2d(8, 7, 3, pad_mode="pad", padding=1, has_bias=True)
        self.whole = nn.Dropout2d(p=0.3)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Dense(7, 12)
        self.drop2 = nn.Dropout(p=0.5)
        self.fc2 = nn.Dense(12, 10)
        self.drop3 = nn.Dropout(p=0.1)

    def construct(self, x: Tensor) -> Tensor:
        x = self.whole(self.conv2(self.drop1(self.conv1(x))))
        return self.drop3(self.fc2(self.drop2(self.fc1(self.flatten(self.avgpool(x))))))


class Stem(nn.Cell):
    """As large networks begin: a stride of 2, and padding and kernel that do not divide by it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, pad_mode="pad", padding=3)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, pad_mode="pad", padding=1, has_bias=True)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Dense(8, 10)

    def construct(self, x: Tensor) -> Tensor:
        x = ops.tanh(self.conv2(ops.tanh(self.bn1(self.conv1(x)))))
        return self.fc(self.flatten(self.avgpool(x)))


class DenseHead(nn.Cell):
    """Convolutions, and a head of dense layers that hold most of the parameters.

    Args:
        norm: Whether there is batch norm, for which it matters how samples lie on ranks.
    """

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        # Before batch norm the gradient of a bias is nothing but rounding.
        first = nn.Conv2d(3, 8, 3, 2, pad_mode="pad", padding=1, has_bias=not norm)
        second = nn.Conv2d(8, 12, 3, pad_mode="pad", padding=1, has_bias=True)
        layers = [first, nn.ReLU(), second, nn.ReLU(), nn.AvgPool2d(3, 3)]
        if norm:
            layers.insert(1, nn.BatchNorm2d(8))
        self.features = nn.SequentialCell(*layers)
        self.flatten = nn.Flatten()
        self.fc1, self.fc2, self.fc3 = nn.Dense(48, 25), nn.Dense(25, 18), nn.Dense(18, 10)
        self.drop = nn.Dropout(p=0.0)

    def construct(self, x: Tensor) -> Tensor:
        x = ops.relu(self.fc1(self.flatten(self.features(x))))
        return self.fc3(ops.tanh(self.fc2(self.drop(x))))


def head_plan(name: str, sizes: Mapping[str, int], head: Mapping[str, Any]) -> Plan:
    """A plan that splits the head along data."""
    choices = {path: Choice(split=c) if isinstance(c, str) else Choice(**c) for path, c in head.items()}
    entries = tuple(Entry(pattern=path, axes={"data": choice}) for path, choice in choices.items())
    graph = trace(network_of(name), (4, 3, 12, 12))
    return Plan(mesh=Mesh(sizes), entries=entries, network=network_facts(graph))


def head_told(name: str, sizes: Mapping[str, int], head: Mapping[str, Any], num_samples: int) -> Any:
    """What an update of ``head_plan`` exchanges along data; on rank 0."""
    region = resolve(trace(network_of(name), (num_samples, 3, 12, 12)), head_plan(name, sizes, head)).region
    assert region is not None
    found = channel_collectives(region, position=0, samples=SAMPLES_TOLD["mindspore"])
    return {entry.kind: (entry.number, entry.num_bytes) for entry in found}


class Residual(nn.Cell):
    """A residual block with batch norm and dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, pad_mode="pad", padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(width, momentum=0.9), nn.BatchNorm2d(width, momentum=0.9)
        self.drop = nn.Dropout(p=dropout)
        self.conv2 = nn.Conv2d(width, width, 3, pad_mode="pad", padding=1, has_bias=True)
        self.relu = nn.ReLU()

    def construct(self, x: Tensor) -> Tensor:
        y = self.drop(self.relu(self.bn1(self.conv1(x))))
        return self.relu(x + self.bn2(self.conv2(y)))


class Residuals(nn.Cell):
    """A stem and two residual blocks."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, pad_mode="pad", padding=1, has_bias=True)
        self.blocks = nn.SequentialCell(Residual(8, dropout), Residual(8, dropout))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Dense(8, 10)

    def construct(self, x: Tensor) -> Tensor:
        return self.fc(self.flatten(self.avgpool(self.blocks(self.stem(x)))))


def network_of(name: str) -> nn.Cell:
    """A network with equal initial weights wherever it is built."""
    ms.set_seed(1)
    if name.startswith("head"):
        return DenseHead(norm=name == "head-norm")
    if name.startswith("residuals"):
        return Residuals(dropout=0.3 if name == "residuals-dropout" else 0.0)
    own = {"stem": Stem, "slopes": Slopes, "drops": Drops}
    if name in own:
        return own[name]()
    if name in NETWORKS:
        return NETWORKS[name]()
    if name == "resnet18":
        return build(name, num_classes=10, small_images=True)
    return build("cnn-small", batch_norm=name == "cnn-small")


def plan_for(
    name: str, sizes: Mapping[str, int], *, uneven: bool = False, regroup: Mapping[str, Any] | None = None
) -> Plan:
    """The plan by rule for images of 12x12 pixels, in which no layer is too small; two of its layers may be uneven.

    Of regrouped images every rank takes own channels: the first convolution is split by its inputs.
    """
    network, regrouping = network_of(name), ChannelRegrouping.of(3, **(regroup or {}))
    if regroup is not None:
        regroup_channels(network, regrouping, image_shape=(3, 12, 12))
    graph = trace(network, (4, regrouping.num_regrouped, *regrouping.sizes((12, 12))))
    plan = plan_by_rule(graph, Mesh(sizes), min_multiply_adds=0)
    if not uneven and regroup is None:
        return plan
    choices = (
        {"conv1": Choice(split="in_channels")}
        if regroup is not None
        else {
            "conv1": Choice(split="out_channels", partition=(5, 27)),
            "conv2": Choice(split="in_channels", partition=(40, 24)),
        }
    )
    entries = [Entry(pattern=name, axes={"channel": choice}) for name, choice in choices.items()]
    return dataclasses.replace(plan, entries=(*plan.entries, *entries))


def told_for(
    name: str, sizes: Mapping[str, int], num_samples: int, num_micro_batches: int, recompute: Sequence[str] = ()
) -> Any:
    """What an update of ``plan_for`` communicates over the channel axis, without the norm; on rank 0."""
    plan = dataclasses.replace(plan_for(name, sizes), execution=Execution(recompute=tuple(recompute)))
    resolved = resolve(trace(network_of(name), (num_samples, 3, 12, 12)), plan)
    found = channel_collectives(resolved, position=0, num_micro_batches=num_micro_batches)
    return {entry.kind: (entry.number, entry.num_bytes) for entry in found}


def train(
    _engine: Engine,
    world: World,
    *,
    sizes: Mapping[str, int],
    name: str,
    counts: Sequence[int] = FULL,
    start: TrainState | None = None,
    first_update: int = 0,
    infinite_on: int | None = None,
    loss_scale: float = 1.0,
    regroup: Mapping[str, Any] | None = None,
    watches: bool = False,
    **parts: dict[str, Any],
) -> dict[str, Any]:
    """Trains for ``len(counts)`` updates; ``parts`` are sections of the run, with the plan's path in ``strategy``."""
    engine, placed = on_mesh(world, sizes)
    run = run_config(**parts)
    # A parameter's class is one that MindSpore makes as it runs.
    kinds = (ms.Tensor, type(ms.Parameter(ms.Tensor(0.0))))
    known = live_tensors(kinds) if watches else []
    network, scale = network_of(name), SCALE
    regrouping = ChannelRegrouping.of(3, **regroup) if regroup is not None else None
    if regrouping is not None:
        network = engine.regroup_channels(network, regrouping, image_shape_HWC=(12, 12, 3))
        scale = regroup_scale(SCALE, regrouping)
    step = engine.build_step(network, run, pixel_scale=scale)
    if start is not None:
        step.import_state(start)
    losses, norms, overflows, states, alive = [], [], [], [], set()
    if watches:
        step.on_gradients = lambda _: alive.update(whole_alive(step, kinds, known=known))
    for update, count in enumerate(counts, start=first_update):
        batches = batches_of(update, count, placed.mesh.size("data"), placed.shard, run.strategy.accumulation)
        if regrouping is not None:
            batches = [regrouped(batch, regrouping) for batch in batches]
        if infinite_on == world.rank and update == 1:
            batches = [Batch(b.images_NHWC, b.labels_N, np.full_like(b.weights_N, 3e38)) for b in batches]
        result = step.update(
            batches,
            global_count=count,
            learning_rate=run.optimizer.learning_rate,
            loss_scale=loss_scale,
            update_index=update,
        )
        of_rank = engine.all_gather(float(result.loss_sum))
        losses.append(sum(of_rank[rank] for rank in placed.mesh.groups("data")[0]) / count)
        norms.append(result.gradient_norm)
        overflows.append(result.overflow)
        alive.update(whole_alive(step, kinds, known=known) if watches else ())
        states.append(step.export_state())
    check_sync(step.local_tensors(), all_gather=engine.all_gather, groups=placed.mesh.groups("data"))
    check_replicas(step, placed, engine)
    batch = batches_of(99, 8, 1, 0, 1)[0]
    evaluated = step.evaluate(batch if regrouping is None else regrouped(batch, regrouping))
    return {
        "losses": losses,
        "norms": norms,
        "overflows": overflows,
        "states": states,
        "whole_alive": sorted(alive),
        "collectives": step.collectives(),
        "num_parameters": step.num_parameters(),
        "optimizer_bytes": step.optimizer_bytes(),
        "parameter_bytes": [parameter.nbytes for parameter in step._trained.values()],
        "eval_loss": float(evaluated.loss_sum),
    }


def check_replicas(step: Any, world: World, engine: MindSporeEngine) -> None:
    """Whole tensors of a split network are equal on all ranks, bit for bit."""
    shards = step._split.shards if step._split is not None else {}
    whole = {name: array for name, array in step.local_tensors().items() if name not in shards}
    check_sync(whole, all_gather=engine.all_gather)


def regrouped(batch: Batch, regrouping: ChannelRegrouping) -> Batch:
    """The batch with regrouped channels."""
    return dataclasses.replace(batch, images_NHWC=regroup_images(batch.images_NHWC, regrouping))


def batches_of(update: int, count: int, num_shards: int, shard: int, accumulation: int) -> list[Batch]:
    """Micro-batches of a shard."""
    return micro_batches(update, count, num_shards=num_shards, shard=shard, accumulation=accumulation)


def train_alone(
    *, name: str, num_shards: int = 1, counts: Sequence[int] = FULL, reverse: bool = False, **parts: dict[str, Any]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same on one device, without anything of the ranks; optionally with the samples in another order."""
    parts = {**parts, "strategy": {"accumulation": parts.get("strategy", {}).get("accumulation", 1)}}
    run = run_config(**parts)
    network = network_of(name)
    device = OneDevice(network, run, pixel_scale=SCALE)
    losses = []
    for update, count in enumerate(counts):
        shards = [batches_of(update, count, num_shards, s, run.strategy.accumulation) for s in range(num_shards)]
        if reverse:
            shards = [[_reversed(batch) for batch in batches] for batches in shards]
        losses.append(device.update(shards, count=count, notes=None))
    return losses, export_network(network)


def _reversed(batch: Batch) -> Batch:
    return Batch(batch.images_NHWC[::-1].copy(), batch.labels_N[::-1].copy(), batch.weights_N[::-1].copy())

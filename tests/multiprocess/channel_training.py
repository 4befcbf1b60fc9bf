"""Training on ranks that split a network along channels, and the same on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from convmesh.data.channels import regroup_images, regroup_scale
from convmesh.engines.contract import Batch, Engine, TrainState, World
from convmesh.engines.torch.regroup import regroup_channels
from convmesh.engines.torch.trace import trace
from convmesh.engines.torch.verification import OneDevice
from convmesh.geometry import ChannelRegrouping
from convmesh.mesh import Mesh
from convmesh.models.torch import build
from convmesh.models.torch.resnet import Bottleneck, ResNet
from convmesh.plan import CHANNEL, Choice, Entry, Execution, Plan, resolve
from convmesh.plan.by_rule import plan_by_rule
from convmesh.plan.collectives import channel_collectives
from convmesh.plan.network import network_facts
from convmesh.training.sync import check_sync
from tests.multiprocess.alive import live_tensors, whole_alive
from tests.multiprocess.channel_cases import on_mesh
from tests.multiprocess.channel_networks import EXTRA
from tests.multiprocess.torch_cases import GLOBAL_BATCH, SCALE, micro_batches, run_config
from tests.networks_torch import NETWORKS

FULL = (GLOBAL_BATCH,) * 3
TENSORS = (torch.Tensor, torch.nn.Parameter)


class PreActivated(nn.Module):
    """A residual block with dropout that ends with its addition: only its result needs its last convolutions."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(num_in), nn.BatchNorm2d(num_out)
        self.shortcut = nn.Conv2d(num_in, num_out, 1, bias=False)
        self.conv1 = nn.Conv2d(num_in, num_out, 3, padding=1)
        self.drop = nn.Dropout(0.3)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(x))
        shortcut = self.shortcut(y)
        y = self.drop(torch.relu(self.bn2(self.conv1(y))))
        return self.conv2(y) + shortcut


class PreActivatedNet(nn.Module):
    """A stem, two blocks, dense."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(PreActivated(8, 12), PreActivated(12, 8))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.avgpool(self.blocks(self.stem(x))), 1))


def network_of(name: str, dtype: str) -> nn.Module:
    """A network with equal initial weights wherever it is built."""
    torch.manual_seed(1)
    network: nn.Module
    if name == "stem":
        # As large networks begin: a stride of 2, and padding and kernel that do not divide by it.
        network = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 8, 3, 1, 1), nn.Tanh(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
        )  # fmt: skip
    elif name == "bottlenecks":
        network = ResNet(Bottleneck, (1, 1, 1, 1), num_classes=10, small_images=True)
    elif name == "pre_activated":
        network = PreActivatedNet()
    elif name == "resnet18":
        network = build(name, num_classes=10, small_images=True)
    else:
        known = {**NETWORKS, **EXTRA}
        network = known[name]() if name in known else build("cnn-small", batch_norm=name == "cnn-small")
    return network.to({"float32": torch.float32, "float64": torch.float64}[dtype])


def plan_for(
    name: str, sizes: Mapping[str, int], recompute: Sequence[str] = (), *, regroup: Mapping[str, Any] | None = None
) -> Plan:
    """The plan by rule for images of 12x12 pixels, in which no layer is too small.

    Of regrouped images every rank takes own channels: the first convolution is split by its inputs.
    """
    network, regrouping = network_of(name, "float32"), ChannelRegrouping.of(3, **(regroup or {}))
    if regroup is not None:
        regroup_channels(network, regrouping, image_shape=(3, 12, 12))
    graph = trace(network, (4, regrouping.num_regrouped, *regrouping.sizes((12, 12))))
    plan = plan_by_rule(graph, Mesh(sizes), min_multiply_adds=0)
    if regroup is not None:
        first = Entry(pattern=graph.nodes[1].name, axes={CHANNEL: Choice(split="in_channels")})
        plan = dataclasses.replace(plan, entries=(*plan.entries, first))
    return dataclasses.replace(plan, execution=Execution(recompute=tuple(recompute)), network=network_facts(graph))


def told_for(
    name: str, sizes: Mapping[str, int], *, recompute: Sequence[str], num_samples: int, num_micro_batches: int
) -> Any:
    """What an update communicates over the channel axis in float64, without the norm; on rank 0."""
    resolved = resolve(trace(network_of(name, "float32"), (num_samples, 3, 12, 12)), plan_for(name, sizes, recompute))
    found = channel_collectives(resolved, position=0, num_micro_batches=num_micro_batches, element_bytes=8)
    return {entry.kind: (entry.number, entry.num_bytes) for entry in found}


def train(
    _engine: Engine,
    world: World,
    *,
    sizes: Mapping[str, int],
    name: str,
    dtype: str = "float32",
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
    known = live_tensors(TENSORS) if watches else []
    network, scale = network_of(name, dtype), SCALE
    regrouping = ChannelRegrouping.of(3, **regroup) if regroup is not None else None
    if regrouping is not None:
        network = engine.regroup_channels(network, regrouping, image_shape_HWC=(12, 12, 3))
        scale = regroup_scale(SCALE, regrouping)
    step = engine.build_step(network, run, pixel_scale=scale)
    if start is not None:
        step.import_state(start)
    losses, norms, overflows, states, alive = [], [], [], [], set()
    if watches:
        step.on_gradients = lambda _: alive.update(whole_alive(step, TENSORS, known=known))
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
        alive.update(whole_alive(step, TENSORS, known=known) if watches else ())
        states.append(step.export_state())
    check_sync(step.local_tensors(), all_gather=engine.all_gather, groups=placed.mesh.groups("data"))
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
        "parameter_bytes": [p.numel() * p.element_size() for p in step._network.parameters()],
        "eval_loss": float(evaluated.loss_sum),
    }


def regrouped(batch: Batch, regrouping: ChannelRegrouping) -> Batch:
    """The batch with regrouped channels."""
    return dataclasses.replace(batch, images_NHWC=regroup_images(batch.images_NHWC, regrouping))


def batches_of(update: int, count: int, num_shards: int, shard: int, accumulation: int) -> list[Batch]:
    """Micro-batches of a shard."""
    return micro_batches(update, count, num_shards=num_shards, shard=shard, accumulation=accumulation)


def train_alone(
    *,
    name: str,
    num_shards: int = 1,
    dtype: str = "float32",
    counts: Sequence[int] = FULL,
    **parts: dict[str, Any],
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same on one device, without anything of the ranks."""
    parts = {**parts, "strategy": {"accumulation": parts.get("strategy", {}).get("accumulation", 1)}}
    run = run_config(**parts)
    network = network_of(name, dtype)
    if run.train.channels_last:
        network.to(memory_format=torch.channels_last)
    device = OneDevice(network, run, pixel_scale=SCALE)
    losses = [
        device.update(
            [batches_of(update, count, num_shards, shard, run.strategy.accumulation) for shard in range(num_shards)],
            count=count,
            index=update,
            notes=None,
        )
        for update, count in enumerate(counts)
    ]
    return losses, {key: tensor.detach().numpy() for key, tensor in network.state_dict().items()}

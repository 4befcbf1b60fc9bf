"""Cases for ranks of PyTorch, and a plain one-device training loop to compare them with.

Every rank makes the same global batches from a seed and takes its own part, so that one device can repeat them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from convmesh.config.schema import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    StrategyConfig,
    TrainConfig,
)
from convmesh.engines.contract import Arrays, Batch, Engine, PixelScale, TrainState, World
from convmesh.models.torch import build

SCALE = PixelScale(factor_C=(1 / 60, 1 / 61, 1 / 62), offset_C=(-2.1, -2.0, -1.9))
GLOBAL_BATCH = 16


def run_config(**parts: dict[str, Any]) -> RunConfig:
    """A run of the small network; parts are sections of the run file."""
    return RunConfig(
        engine="torch",
        model=ModelConfig(name="cnn-small"),
        data=DataConfig(source="digits"),
        strategy=StrategyConfig(**parts.get("strategy", {})),
        precision=PrecisionConfig(**parts.get("precision", {})),
        optimizer=OptimizerConfig(**{"learning_rate": 0.05, "weight_decay": 1e-2, **parts.get("optimizer", {})}),
        train=TrainConfig(**{"global_batch": GLOBAL_BATCH, "device": "cpu", **parts.get("train", {})}),
    )


def new_network(seed: int = 1, **args: Any) -> nn.Module:
    torch.manual_seed(seed)
    return build("cnn-small", **args)


def global_batch(update: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(100 + update)
    images = generator.integers(0, 256, (count, 12, 12, 3), dtype=np.uint8)
    return images, generator.integers(0, 10, count).astype(np.int32)


def micro_batches(
    update: int, count: int, *, num_shards: int, shard: int, accumulation: int, global_size: int = GLOBAL_BATCH
) -> list[Batch]:
    """This shard's micro-batches; a shard without samples gets one of weight 0."""
    images, labels = global_batch(update, count)
    own = np.array_split(np.arange(count), num_shards)[shard]
    if len(own) == 0:
        return [Batch(images[:1], labels[:1], np.zeros(1, np.float32))]
    size = global_size // (num_shards * accumulation)
    parts = [own[first : first + size] for first in range(0, len(own), size)]
    return [Batch(images[ids], labels[ids], np.ones(len(ids), np.float32)) for ids in parts]


def train(
    engine: Engine,
    world: World,
    *,
    counts: Sequence[int] = (GLOBAL_BATCH,) * 3,
    network_args: dict[str, Any] | None = None,
    start: TrainState | None = None,
    first_update: int = 0,
    seed_by_rank: bool = False,
    dtype: str = "float32",
    **parts: dict[str, Any],
) -> dict[str, Any]:
    """Trains for ``len(counts)`` updates through the engine and returns everything that can be compared."""
    run = run_config(**parts)
    network = new_network(1 + world.rank if seed_by_rank else 1, **(network_args or {})).to(getattr(torch, dtype))
    step = engine.build_step(network, run, pixel_scale=SCALE)
    if start is not None:
        step.import_state(start)
    losses, norms = [], []
    for update, count in enumerate(counts, start=first_update):
        batches = micro_batches(
            update,
            count,
            num_shards=world.mesh.size("data"),
            shard=world.shard,
            accumulation=run.strategy.accumulation,
        )
        result = step.update(
            batches, global_count=count, learning_rate=0.05 / (1 + update), loss_scale=1.0, update_index=update
        )
        losses.append(sum(engine.all_gather(float(result.loss_sum))) / count)
        norms.append(result.gradient_norm)
    return {
        "losses": losses,
        "norms": norms,
        "state": step.export_state(),
        "local": step.local_tensors(),
        "collectives": step.collectives(),
        "optimizer_bytes": step.optimizer_bytes(),
        "held_bytes": held_bytes(step),
        "num_parameters": step.num_parameters(),
    }


def held_bytes(step: Any) -> int:
    """Bytes of the tensors that torch.optim really holds."""
    states = step._optimizer._optimizer.state.values()
    return sum(t.numel() * t.element_size() for state in states for t in state.values() if t.ndim > 0)


def train_plainly(
    network: nn.Module, *, counts: Sequence[int] = (GLOBAL_BATCH,) * 3, **parts: dict[str, Any]
) -> tuple[list[float], Arrays]:
    """The same training as its user would write it for one device: one large batch, torch.optim's defaults."""
    run = run_config(**parts)
    config = run.optimizer
    decayed = [p for p in network.parameters() if p.ndim >= 2 or config.decay_norm_and_bias]
    others = [p for p in network.parameters() if not (p.ndim >= 2 or config.decay_norm_and_bias)]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer = (
        torch.optim.AdamW(groups, lr=1.0, betas=config.betas, eps=config.epsilon, foreach=False)
        if config.name == "adamw"
        else torch.optim.SGD(groups, lr=1.0, momentum=config.momentum, foreach=False)
    )
    network.train()
    losses = []
    for update, count in enumerate(counts):
        images, labels = global_batch(update, count)
        x = torch.from_numpy(images).float() * torch.tensor(SCALE.factor_C) + torch.tensor(SCALE.offset_C)
        optimizer.zero_grad()
        loss = F.cross_entropy(
            network(x.permute(0, 3, 1, 2)), torch.from_numpy(labels).long(), label_smoothing=run.train.label_smoothing
        )
        loss.backward()
        if config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + update)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach().numpy() for name, tensor in network.state_dict().items()}


def train_plainly_with_norm(
    network: nn.Module, *, counts: Sequence[int], num_shards: int, accumulation: int
) -> tuple[list[float], Arrays]:
    """One device that runs every shard's micro-batches from the same buffers and averages what each made of them.

    In float64: two orders of the same sums may put a value of float32 on either side of a ReLU's kink.
    """
    network = network.double()
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9, foreach=False)
    floating = {name: buffer for name, buffer in network.named_buffers() if buffer.is_floating_point()}
    losses = []
    for update, count in enumerate(counts):
        optimizer.zero_grad()
        before = {name: buffer.clone() for name, buffer in floating.items()}
        mean = {name: torch.zeros_like(buffer) for name, buffer in floating.items()}
        loss_sum = 0.0
        for shard in range(num_shards):
            for name, buffer in floating.items():
                buffer.copy_(before[name])
            batches = micro_batches(update, count, num_shards=num_shards, shard=shard, accumulation=accumulation)
            num_real = sum(int(batch.weights_N.sum()) for batch in batches)
            for batch in batches if num_real else ():
                x = torch.from_numpy(batch.images_NHWC).double() * torch.tensor(SCALE.factor_C, dtype=torch.float64)
                x = (x + torch.tensor(SCALE.offset_C, dtype=torch.float64)).permute(0, 3, 1, 2)
                loss = F.cross_entropy(network(x), torch.from_numpy(batch.labels_N).long(), reduction="sum") / count
                loss.backward()
                loss_sum += loss.item()
            for name, buffer in floating.items():
                mean[name] += buffer * num_real / count
        for name, buffer in floating.items():
            buffer.copy_(mean[name])
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + update)
        optimizer.step()
        losses.append(loss_sum)
    return losses, {name: tensor.detach().numpy() for name, tensor in network.state_dict().items()}


def overflow_on(engine: Engine, world: World, *, rank: int, compute: str) -> dict[str, Any]:
    """One good update, one whose gradient is infinite on one rank only, one good update."""
    run = run_config(precision={"compute": compute}, strategy={"optimizer_sharding": True})
    step = engine.build_step(new_network(batch_norm=True), run, pixel_scale=SCALE)
    states, overflows = [], []
    for update in range(3):
        (batch,) = micro_batches(update, GLOBAL_BATCH, num_shards=world.num_ranks, shard=world.shard, accumulation=1)
        if update == 1 and world.rank == rank:
            batch = Batch(batch.images_NHWC, batch.labels_N, np.full_like(batch.weights_N, 3e38))
        result = step.update(
            [batch], global_count=GLOBAL_BATCH, learning_rate=0.01, loss_scale=1024.0, update_index=update
        )
        overflows.append(result.overflow)
        states.append(step.export_state())
    return {"overflows": overflows, "states": states}


class PartlyUsed(nn.Module):
    """Uses one of two branches by what it is told, and never a third."""

    def __init__(self, branch: int) -> None:
        super().__init__()
        self.branch = branch
        self.branches = nn.ModuleList(nn.Conv2d(3, 4, 3) for _ in range(3))
        self.fc = nn.Linear(4, 10)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        return self.fc(self.branches[self.branch](x_NCHW).mean(dim=(2, 3)))


def partly_used(engine: Engine, world: World) -> dict[str, Any]:
    """Rank 0 uses branch 0 and rank 1 branch 1; nobody branch 2."""
    torch.manual_seed(3)
    network = PartlyUsed(world.rank)
    before = {name: p.detach().clone().numpy() for name, p in network.named_parameters()}
    step = engine.build_step(network, run_config(), pixel_scale=SCALE)
    for update in range(2):
        batches = micro_batches(update, GLOBAL_BATCH, num_shards=2, shard=world.shard, accumulation=1)
        step.update(batches, global_count=GLOBAL_BATCH, learning_rate=0.1, loss_scale=1.0, update_index=update)
    return {"before": before, "after": step.local_tensors()}


def count_with_profiler(engine: Engine, world: World, *, bucket_bytes: int) -> dict[str, Any]:
    """Collectives of one update as Gloo saw them, and as the step tells."""
    run = run_config(strategy={"bucket_bytes": bucket_bytes, "optimizer_sharding": True})
    step = engine.build_step(new_network(batch_norm=True), run, pixel_scale=SCALE)
    (batch,) = micro_batches(0, GLOBAL_BATCH, num_shards=world.num_ranks, shard=world.shard, accumulation=1)
    settings = {"global_count": GLOBAL_BATCH, "learning_rate": 0.1, "loss_scale": 1.0}
    step.update([batch], update_index=0, **settings)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step.update([batch], update_index=1, **settings)
    seen = [event.name for event in profile.events() if event.name.startswith("gloo:")]
    sizes = [p.numel() * 4 for p in new_network(batch_norm=True).parameters()]
    return {"seen": seen, "told": step.collectives(), "parameter_bytes": sizes}


def built_differently(engine: Engine, world: World) -> str:
    """Ranks whose factories don't agree."""
    network = new_network(num_classes=10 + world.rank)
    try:
        engine.build_step(network, run_config(), pixel_scale=SCALE)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def memory_formats(engine: Engine, world: World, *, sharding: bool) -> dict[str, Any]:
    """Memory order of weights and gradients after two updates, and what PyTorch warned of."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 6, 3, groups=6)]
    network = nn.Sequential(*convolutions, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10))
    run = run_config(strategy={"optimizer_sharding": sharding})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = engine.build_step(network, run, pixel_scale=SCALE)
        for update in range(2):
            batches = micro_batches(update, GLOBAL_BATCH, num_shards=2, shard=world.shard, accumulation=1)
            step.update(batches, global_count=GLOBAL_BATCH, learning_rate=0.1, loss_scale=1.0, update_index=update)
    weights = [convolution.weight for convolution in convolutions]
    return {
        "channels_last": [t.is_contiguous(memory_format=torch.channels_last) for w in weights for t in (w, w.grad)],
        "warnings": [str(warning.message) for warning in caught if "stride" in str(warning.message)],
    }

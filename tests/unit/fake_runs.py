"""Makes run folders like those of real runs, in the state that a test wants."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = """\
engine: mindspore
model:
  name: cnn-small
  args: {}
data:
  source: cifar10
  num_train: 10000
  sampler: stratified
strategy:
  mesh: {data: 2}
precision:
  compute: COMPUTE
train:
  epochs: EPOCHS
  global_batch: 64
"""
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@dataclass(frozen=True)
class FakeRun:
    """What a made-up run looks like."""

    num_ranks: int = 2
    epochs: int = 4
    updates_per_epoch: int = 157
    log_every: int = 10
    num_classes: int = 10
    compute: str = "float32"
    stratified: bool = True
    slow_rank: int | None = None
    diverges_at: int | None = None
    with_summary: bool = True
    resumed_at: int | None = None
    seed: int = 0

    @property
    def num_updates(self) -> int:
        return self.epochs * self.updates_per_epoch


def write_fake_run(run_dir: Path, fake: FakeRun) -> Path:
    """Writes config, versions, metrics and (if the run got that far) summary into a folder."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(CONFIG.replace("COMPUTE", fake.compute).replace("EPOCHS", str(fake.epochs)))
    versions = {"convmesh": "0.1.0", "python": "3.11.9", "numpy": "1.26.4", "mindspore": "2.10.0", "cores": "2"}
    (run_dir / "versions.json").write_text(json.dumps(versions))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in fake_records(fake)))
    if fake.with_summary:
        (run_dir / "summary.json").write_text(json.dumps(fake_summary(fake)))
    return run_dir


def fake_records(fake: FakeRun) -> list[dict[str, Any]]:
    """All records of a run; a resumed one does the updates after ``resumed_at`` twice."""
    rng = np.random.default_rng(fake.seed)
    if fake.resumed_at is None:
        return [_start(fake, 0), *_updates(fake, rng, 0, fake.num_updates)]
    killed_at = min(fake.num_updates, fake.resumed_at + 45)
    return [
        _start(fake, 0),
        *_updates(fake, rng, 0, killed_at),
        _start(fake, fake.resumed_at),
        *_updates(fake, rng, fake.resumed_at, fake.num_updates),
    ]


def fake_summary(fake: FakeRun) -> dict[str, Any]:
    rng = np.random.default_rng(fake.seed)
    counts = class_counts(fake, rng)
    return {
        "status": "finished",
        "engine": "mindspore",
        "num_ranks": fake.num_ranks,
        "mesh": {"data": fake.num_ranks},
        "device": "cpu",
        "epochs": fake.epochs,
        "num_updates": fake.num_updates,
        "accuracy": 0.5931,
        "loss": 1.1482,
        "best_accuracy": 0.5931,
        "best_update": fake.num_updates,
        "images_per_second": 704.2,
        "seconds": 88.4,
        "peak_memory_bytes": [int(1.1e9 + 3e7 * rng.random()) for _ in range(fake.num_ranks)],
        "optimizer_bytes": [280_000] * fake.num_ranks,
        "skipped_updates": 6 if fake.compute == "float16" else 0,
        "skipped_samples": 0,
        "dropped_samples": 0,
        "num_parameters": 70_890,
        "collectives": [
            {"purpose": "gradients", "kind": "all-reduce", "number": 3, "num_bytes": 283_560},
            {"purpose": "buffers", "kind": "all-reduce", "number": 1, "num_bytes": 1_792},
        ],
        "class_balance": {
            "class_names": CIFAR10 if fake.num_classes == 10 else [f"class {i}" for i in range(fake.num_classes)],
            "counts": counts.tolist(),
            "largest_deviation": 0.5,
        },
        "sync_checks": 2,
        "resumed_from": [] if fake.resumed_at is None else [fake.resumed_at],
    }


def class_counts(fake: FakeRun, rng: np.random.Generator) -> np.ndarray:
    """Samples per rank and class: within one of proportional, or as chance has it."""
    per_class = rng.integers(732, 1301, size=fake.num_classes)
    if not fake.stratified:
        return np.stack([rng.multinomial(total, [1 / fake.num_ranks] * fake.num_ranks) for total in per_class], axis=1)
    return np.stack(
        [np.bincount(np.arange(total) % fake.num_ranks, minlength=fake.num_ranks) for total in per_class], axis=1
    )


def _start(fake: FakeRun, update: int) -> dict[str, Any]:
    return {
        "kind": "start",
        "update": update,
        "num_updates": fake.num_updates,
        "epochs": fake.epochs,
        "num_ranks": fake.num_ranks,
        "mesh": {"data": fake.num_ranks},
        "engine": "mindspore",
        "device": "cpu",
        "compute": fake.compute,
        "time": 1_780_000_000.0 + update,
    }


def _updates(fake: FakeRun, rng: np.random.Generator, first: int, last: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for update in range(first + 1, last + 1):
        ends_epoch = update % fake.updates_per_epoch == 0
        if update % fake.log_every == 0 or ends_epoch:
            records.append(_step(fake, rng, update))
        if ends_epoch:
            records += _epoch_end(fake, update)
    if first == 0:
        records.append({"kind": "event", "level": "info", "text": "data order: stratified over 10 classes"})
    return records


def _loss(fake: FakeRun, update: int, noise: float) -> float | None:
    if fake.diverges_at is not None and update >= fake.diverges_at:
        return None
    return 1.05 + 1.25 * math.exp(-2.2 * update / fake.num_updates) + 0.09 * noise


def _step(fake: FakeRun, rng: np.random.Generator, update: int) -> dict[str, Any]:
    share = update / fake.num_updates
    skipped = min(6, update // 10) if fake.compute == "float16" else 0
    data = [0.004 + 0.001 * rng.random() for _ in range(fake.num_ranks)]
    if fake.slow_rank is not None:
        data[fake.slow_rank] += 0.03
    slowest = max(data)
    return {
        "kind": "step",
        "update": update,
        "epoch": (update - 1) // fake.updates_per_epoch,
        "num_updates": fake.num_updates,
        "loss": _loss(fake, update, rng.standard_normal()),
        "learning_rate": 0.05 * 0.5 * (1 + math.cos(math.pi * share)),
        "loss_scale": 2.0 ** (24 - skipped) if fake.compute == "float16" else 1.0,
        "skipped_updates": skipped,
        "images_per_second": 705 + 22 * rng.standard_normal(),
        "step_seconds": [0.085 + slowest - wait for wait in data],
        "data_seconds": data,
        "gradient_norm": None,
        "eta_seconds": 88 * (1 - share),
    }


def _epoch_end(fake: FakeRun, update: int) -> list[dict[str, Any]]:
    epoch, share = update // fake.updates_per_epoch - 1, update / fake.num_updates
    return [
        {"kind": "epoch", "epoch": epoch, "update": update, "loss": 1.05 + 1.25 * math.exp(-2.2 * share),
         "seconds": 22.1, "images_per_second": 703.0, "dropped_samples": 0, "skipped_samples": 0},
        {"kind": "eval", "epoch": epoch, "update": update, "loss": 1.1 + 1.2 * math.exp(-2.3 * share),
         "accuracy": 0.62 * (1 - math.exp(-3.1 * share)), "num_samples": 10000, "seconds": 2.2},
        {"kind": "checkpoint", "update": update, "path": f"checkpoints/step-{update:08d}", "seconds": 0.03,
         "num_bytes": 571_000},
    ]  # fmt: skip

"""Plans an epoch of ImageNet's size, and compares how evenly samplers spread classes over ranks.

Run: ``python -m benchmarks.sampler``. Writes ``benchmarks/results/sampler.md``.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.data.inspect import micro_batch_deviation
from convmesh.data.samplers import Batching, RandomSampler, Sampler, StratifiedSampler
from convmesh.engines import is_installed

NUM_SAMPLES, NUM_CLASSES = 1_281_167, 1_000
GLOBAL_BATCH, NUM_SHARDS = 256, 8
RESULTS = Path(__file__).parent / "results" / "sampler.md"

Ids = npt.NDArray[np.int64]
Labels = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Spread:
    """How a sampler spreads an epoch.

    Args:
        name: The sampler.
        rank_deviation: Largest difference between a rank's samples of a class in an epoch and its share.
        batch_deviation: The same for a micro-batch.
        num_missing: Samples that no rank saw.
        num_repeated: Samples seen beyond the first time.
    """

    name: str
    rank_deviation: float
    batch_deviation: float
    num_missing: int
    num_repeated: int

    def row(self) -> str:
        """A row of the table."""
        return (
            f"| {self.name} | {self.rank_deviation:.2f} | {self.batch_deviation:.2f} "
            f"| {self.num_missing} | {self.num_repeated} |"
        )


def imagenet_like_labels() -> Labels:
    """Labels in random order, with class sizes between 732 and 1,300 as in ImageNet's training set."""
    rng = np.random.default_rng(0)
    sizes = np.full(NUM_CLASSES, 1_300)
    # In ImageNet 896 classes have 1,300 images and the others fewer.
    small = rng.choice(NUM_CLASSES, 104, replace=False)
    weights = rng.random(104)
    missing = NUM_CLASSES * 1_300 - NUM_SAMPLES
    taken = np.minimum((weights / weights.sum() * missing).astype(int), 1_300 - 732)
    while taken.sum() < missing:
        taken[rng.choice(np.flatnonzero(taken < 1_300 - 732))] += 1
    sizes[small] -= taken
    return rng.permutation(np.repeat(np.arange(NUM_CLASSES, dtype=np.int32), sizes))


def measure_plan(labels: Labels, *, repeats: int) -> tuple[list[float], int]:
    """Seconds for the plans of several epochs and all shards, and the largest memory that one took, in bytes."""
    batching = Batching(GLOBAL_BATCH, NUM_SHARDS)
    seconds = []
    for epoch in range(repeats):
        sampler = StratifiedSampler(labels, batching)
        begun = time.perf_counter()
        sampler.micro_batches(epoch, 0, 0)
        seconds.append(time.perf_counter() - begun)
    tracemalloc.start()
    StratifiedSampler(labels, batching).micro_batches(0, 0, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak


def measure_spread(name: str, labels: Labels, epoch_ids: Callable[[int], Ids]) -> Spread:
    """Counts what every rank gets in one epoch."""
    ids_R = [epoch_ids(shard) for shard in range(NUM_SHARDS)]
    share_C = np.bincount(labels, minlength=NUM_CLASSES) / len(labels)
    counts_RC = np.array([np.bincount(labels[ids], minlength=NUM_CLASSES) for ids in ids_R])
    seen = np.bincount(np.concatenate(ids_R), minlength=len(labels))
    size = GLOBAL_BATCH // NUM_SHARDS
    batch_deviation = 0.0
    for ids in ids_R:
        sizes = np.full(-(-len(ids) // size), size)
        sizes[-1] = len(ids) - size * (len(sizes) - 1)
        batch_deviation = max(batch_deviation, micro_batch_deviation(labels[ids], sizes, share_C=share_C))
    return Spread(
        name=name,
        rank_deviation=float(np.abs(counts_RC - share_C * len(labels) / NUM_SHARDS).max()),
        batch_deviation=batch_deviation,
        num_missing=int(np.count_nonzero(seen == 0)),
        num_repeated=int((seen - 1).clip(min=0).sum()),
    )


def torch_ids(shard: int) -> Ids:
    """What PyTorch's DistributedSampler gives a rank."""
    import torch
    from torch.utils.data import DistributedSampler

    data: Any = torch.utils.data.TensorDataset(torch.zeros(NUM_SAMPLES))
    return np.array(list(DistributedSampler(data, num_replicas=NUM_SHARDS, rank=shard, shuffle=True, seed=0)))


def mindspore_ids(shard: int) -> Ids:
    """What MindSpore's DistributedSampler gives a rank."""
    import mindspore.dataset as ds

    ds.config.set_seed(0)  # Ranks with different seeds would miss samples.
    sampler = ds.DistributedSampler(NUM_SHARDS, shard, shuffle=True)
    data = ds.NumpySlicesDataset(np.arange(NUM_SAMPLES, dtype=np.int32), ["id"], sampler=sampler).batch(4096)
    batches = [ids for (ids,) in data.create_tuple_iterator(num_epochs=1, output_numpy=True)]
    ids: Ids = np.concatenate(batches).astype(np.int64)
    return ids


def all_spreads(labels: Labels) -> list[Spread]:
    """Our samplers, and those of the frameworks that are installed."""
    batching = Batching(GLOBAL_BATCH, NUM_SHARDS)
    samplers: dict[str, Sampler[Any]] = {
        "ConvMesh stratified": StratifiedSampler(labels, batching),
        "ConvMesh random": RandomSampler(len(labels), batching),
    }
    found = [
        measure_spread(name, labels, lambda shard, sampler=sampler: sampler.epoch_ids(0, shard))  # type: ignore[misc]
        for name, sampler in samplers.items()
    ]
    if is_installed("torch"):
        found.append(measure_spread(f"PyTorch {version('torch')} DistributedSampler", labels, torch_ids))
    if is_installed("mindspore"):
        found.append(measure_spread(f"MindSpore {version('mindspore')} DistributedSampler", labels, mindspore_ids))
    return found


def write_results(seconds: list[float], peak_bytes: int, spreads: list[Spread]) -> str:
    """Writes the page and returns it."""
    text = "\n".join(
        [
            "# Sampler",
            "",
            f"{NUM_SAMPLES:,} labels in {NUM_CLASSES:,} classes (sizes as in ImageNet, 732 to 1,300), global batch "
            f"{GLOBAL_BATCH}, {NUM_SHARDS} ranks. Made by `python -m benchmarks.sampler`.",
            "",
            f"Stratified plan of a whole epoch for all ranks: {statistics.median(seconds):.3f} s (median of "
            f"{len(seconds)}, {min(seconds):.3f} to {max(seconds):.3f}), {peak_bytes / 1e6:.0f} MB of memory at most.",
            "",
            "Largest difference from the proportional share of a class, in samples, over one epoch:",
            "",
            "| sampler | of a rank | of a micro-batch of 32 | samples missed | samples repeated |",
            "|---|---|---|---|---|",
            *(spread.row() for spread in spreads),
            "",
            "The share of a class in a micro-batch of 32 is about 0.03 samples: below 1, no class came twice.",
            "",
            f"Measured on {platform.machine()}, {os.cpu_count()} cores, {platform.system()}, "
            f"Python {platform.python_version()}, NumPy {np.__version__}.",
            "",
        ]
    )
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(text, encoding="utf-8")
    return text


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="epochs to plan")
    arguments = parser.parse_args()
    labels = imagenet_like_labels()
    seconds, peak_bytes = measure_plan(labels, repeats=arguments.repeats)
    print(write_results(seconds, peak_bytes, all_spreads(labels)))


if __name__ == "__main__":
    main()

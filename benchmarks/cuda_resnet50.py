"""ResNet-50 at 224 px on one CUDA GPU: ConvMesh against a plain PyTorch script, in turn in one run.

Batch 256, bfloat16 autocast, channels-last, synthetic images. Run from the repository:
``python -m benchmarks.cuda_resnet50``; on a machine without a GPU it says so and ends with exit code 2.

Legend: N samples, H rows, W columns, C channels.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from benchmarks.contenders.work import MEAN, NUM_CLASSES, STD

from convmesh.config import RunConfig
from convmesh.config.schema import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrainConfig
from convmesh.engines import load_engine, load_launcher
from convmesh.engines.contract import Batch, Engine, PixelScale, World
from convmesh.errors import ConvMeshError
from convmesh.mesh import Mesh

RESULTS = Path(__file__).parent / "results" / "cuda_resnet50.md"
Update = Callable[[], object]


class SyntheticReader:
    """The same random uint8 images for every key; a `convmesh.engines.contract.Reader`."""

    def __init__(self, batch: int, image_size: int) -> None:
        generator = np.random.default_rng(0)
        self._batch = Batch(
            images_NHWC=generator.integers(0, 256, (batch, image_size, image_size, 3), dtype=np.uint8),
            labels_N=generator.integers(0, NUM_CLASSES, batch).astype(np.int32),
            weights_N=np.ones(batch, np.float32),
        )

    def read(self, key: tuple[int, int, int]) -> Batch:
        """The micro-batch."""
        return self._batch


def convmesh_update(engine: Engine, batch: int, image_size: int) -> Update:
    """Builds ConvMesh's update, driven by the calls of its own loop."""
    run = RunConfig(
        engine="torch",
        model=ModelConfig(name="resnet50"),
        data=DataConfig(source="image_folder", path=".", image_size=image_size),
        precision=PrecisionConfig(compute="bfloat16"),
        optimizer=OptimizerConfig(learning_rate=0.01, weight_decay=1e-4),
        train=TrainConfig(global_batch=batch, device="cuda"),
    )
    network = engine.build_network(run.model, num_classes=NUM_CLASSES, num_channels=3, seed=0)
    scale = PixelScale(
        factor_C=tuple(1 / 255 / std for std in STD),
        offset_C=tuple(-mean / std for mean, std in zip(MEAN, STD, strict=True)),
    )
    step = engine.build_step(network, run, pixel_scale=scale)
    keys = [(0, number, 0) for number in range(100_000)]
    batches = engine.load(SyntheticReader(batch, image_size), keys, num_workers=2)
    numbers = itertools.count()

    def update() -> object:
        return step.update(
            [next(batches)], global_count=batch, learning_rate=0.01, loss_scale=1.0, update_index=next(numbers)
        )

    return update


def plain_update(batch: int, image_size: int) -> Update:
    """Builds the update of a script as PyTorch's users write it; its images already lie on the GPU."""
    import torch
    import torch.nn.functional as F

    from convmesh.models.torch import build

    model = build("resnet50", num_classes=NUM_CLASSES).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    x_NCHW = torch.randn(batch, 3, image_size, image_size, device="cuda").to(memory_format=torch.channels_last)
    labels_N = torch.randint(0, NUM_CLASSES, (batch,), device="cuda")

    def update() -> object:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x_NCHW), labels_N)
        loss.backward()
        optimizer.step()
        return loss

    return update


def measure(update: Update, *, batch: int, num_updates: int) -> float:
    """Images per second."""
    import torch

    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(num_updates):
        update()
    torch.cuda.synchronize()
    return batch * num_updates / (time.perf_counter() - begun)


def peak_bytes(build: Callable[[], Update]) -> int:
    """Largest memory of a contender on its own, over five updates."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    update = build()
    for _ in range(5):
        update()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=20, help="updates of each contender per round")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=224)
    options = parser.parse_args()
    launcher, engine = load_launcher("torch"), load_engine("torch")
    world = World(rank=0, num_ranks=1, local_rank=0, num_local_ranks=1, mesh=Mesh({}), device="cuda", num_threads=4)
    try:
        if launcher.resolve_device("auto") != "cuda":
            print("This benchmark needs a CUDA GPU and a CUDA build of PyTorch; none was found.", file=sys.stderr)
            return 2
        engine.start(world)
    except ConvMeshError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    builders = {
        "ConvMesh": lambda: convmesh_update(engine, options.batch, options.image_size),
        "plain PyTorch": lambda: plain_update(options.batch, options.image_size),
    }
    memory = {name: peak_bytes(build) for name, build in builders.items()}
    updates = {name: build() for name, build in builders.items()}
    rates: dict[str, list[float]] = {name: [] for name in updates}
    for update in updates.values():
        measure(update, batch=options.batch, num_updates=10)
    for number in range(options.rounds):
        for name in list(updates) if number % 2 == 0 else list(updates)[::-1]:
            rates[name].append(measure(updates[name], batch=options.batch, num_updates=options.updates))
    text = report(rates, memory, versions=engine.versions(), work=f"batch {options.batch}, {options.image_size} px")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text)
    print(text)
    return 0


def report(rates: dict[str, list[float]], memory: dict[str, int], *, versions: dict[str, str], work: str) -> str:
    """The result as Markdown."""
    ratios = [ours / plain for ours, plain in zip(*rates.values(), strict=True)]
    lines = [
        "# ResNet-50 on one GPU",
        "",
        f"{work}, bfloat16 autocast, channels-last, SGD with momentum, in turn in one run; medians and ranges.",
        "ConvMesh also copies its uint8 images to the GPU and scales them there; the plain script's lie there already.",
        "",
        f"Ran on: {', '.join(f'{name} {value}' for name, value in versions.items())}; {platform.platform()}.",
        "",
        "| | images/s | peak memory |",
        "|---|---|---|",
    ]
    for name, values in rates.items():
        lines.append(
            f"| {name} | {statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f}) "
            f"| {memory[name] / 2**30:.2f} GiB |"
        )
    lines += ["", f"Ratio: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

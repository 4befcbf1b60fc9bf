"""What a convolution on MindSpore's CPU holds, whole and split, by the threads that oneDNN plans for.

Run from the repository: ``python -m benchmarks.convolution_scratch``. Each figure is taken in a process of its own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "convolution_scratch.md"
IMAGES, CHANNELS, SIZE, KERNEL = 2, 64, 128, 3
SPLITS = {"whole": (1, 1), "`out_channels` of 2 ranks": (1, 2), "`in_channels` of 2 ranks": (2, 1)}
"""Parts into which inputs and outputs are cut."""
THREADS = (1, 2)


def grown_mib(inputs: int, outputs: int, num_threads: int) -> float:
    """What forward and backward of one convolution add to the memory of a process that has run another.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        num_threads: Threads that oneDNN plans for.

    Returns:
        MiB of resident memory, the image not counted.
    """
    import mindspore as ms
    import numpy as np
    import psutil
    from mindspore import Tensor, nn

    from convmesh.engines.mindspore import kernels, threads

    kernels.prepare()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    threads.compute_with(num_threads)
    grown = 0
    for num_in, num_out, size in ((16, 8, 16), (inputs, outputs, SIZE)):
        image = Tensor(np.ones((IMAGES, num_in, size, size), np.float32))
        cell = nn.Conv2d(num_in, num_out, KERNEL, pad_mode="pad", padding=KERNEL // 2)
        differentiate = ms.grad(cell, 0, cell.trainable_params())
        before = psutil.Process().memory_info().rss
        differentiate(image)[0].asnumpy()
        grown = psutil.Process().memory_info().rss - before
    return grown / 2**20


def lines() -> Iterator[str]:
    """The page of results."""
    import mindspore as ms

    image = IMAGES * CHANNELS * SIZE * SIZE * 4 / 2**20
    yield from (
        "# Scratch memory of a convolution on MindSpore's CPU",
        "",
        f"One {KERNEL}x{KERNEL} convolution of {CHANNELS} to {CHANNELS} channels, {IMAGES} images of {SIZE} pixels, "
        f"float32: what its forward and backward add to the resident memory of a process, the image ({image:.0f} MiB) "
        "not counted. Beside tensors that is scratch which the convolution keeps: one image with each pixel's "
        f"neighbours side by side is {image / IMAGES * KERNEL**2:.0f} MiB for each thread that oneDNN plans for. A "
        "split by outputs leaves it as it is. Made by `python -m benchmarks.convolution_scratch`.",
        "",
        f"Ran on: MindSpore {ms.__version__}.",
        "",
        "| | " + " | ".join(f"{number} thread{'s' if number > 1 else ''}" for number in THREADS) + " |",
        "|---|" + "---|" * len(THREADS),
    )
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for title, (inputs, outputs) in SPLITS.items():
            cells = [pool.apply(grown_mib, (CHANNELS // inputs, CHANNELS // outputs, number)) for number in THREADS]
            yield f"| {title} | " + " | ".join(f"{cell:.0f} MiB" for cell in cells) + " |"


def main() -> None:
    text = "\n".join(lines())
    print(text)
    RESULTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

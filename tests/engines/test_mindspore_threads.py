"""Threads of MindSpore's kernels on CPU: oneDNN plans for a rank's own, not for all cores of the machine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import psutil
import pytest

pytest.importorskip("mindspore")

import mindspore as ms
from mindspore import Tensor, nn

from convmesh.engines.mindspore import threads

pytestmark = pytest.mark.mindspore

IMAGES, CHANNELS, SIZE = 4, 32, 96
SCRATCH_BYTES = 4 * CHANNELS * 9 * SIZE * SIZE
"""Of one thread in the backward of a 3x3 convolution: one image with each pixel's neighbours side by side (im2col)."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = threads.planned_threads()
    if before is None:
        pytest.skip("this MindSpore has no oneDNN that can be told")
    yield
    threads.plan_convolutions_for(before)


def test_onednn_is_told() -> None:
    for number in (1, 3):
        threads.plan_convolutions_for(number)
        assert threads.planned_threads() == number


def test_a_convolution_keeps_scratch_memory_for_the_threads_of_its_rank_only() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    images = Tensor(np.ones((IMAGES, CHANNELS, SIZE, SIZE), np.float32))

    kept = []  # What is freed would hide what is taken.

    def grown(num_threads: int) -> int:
        threads.plan_convolutions_for(num_threads)
        # Another number of outputs each time: else MindSpore would take the kernel that it has made already.
        cell = nn.Conv2d(CHANNELS, 8 * num_threads, 3, pad_mode="pad", padding=1)
        differentiate = ms.grad(cell, 0, cell.trainable_params())
        kept.append((cell, differentiate))
        before = psutil.Process().memory_info().rss
        differentiate(images)[0].asnumpy()
        return int(psutil.Process().memory_info().rss) - before

    grown(2)  # Memory that the process takes for good.
    assert grown(4) - grown(1) > SCRATCH_BYTES

"""A run set up badly on purpose: images of unequal size on a slow disk, and a network of many small layers.

Legend: N samples, C channels, H rows, W columns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

SMALL, LARGE = 32, 600
"""Smallest and largest side of an image in pixels."""


def network(num_classes: int = 10, num_channels: int = 3, *, bytes_per_second: float, width: int, depth: int) -> Any:
    """Builds convolutions with batch norm and ReLU for PyTorch; from then on files are read as slowly as said."""
    from torch import nn

    _slow_down(bytes_per_second)
    layers: list[Any] = []
    for number in range(depth):
        channels = width if number else num_channels
        convolution = nn.Conv2d(channels, width, 3, padding=1, stride=2 if number == 0 else 1, bias=False)
        layers.append(nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))


def _slow_down(bytes_per_second: float) -> None:
    from convmesh.data.sources.image_folder import FolderSource

    if getattr(FolderSource, "is_slow", False):
        return
    opened = FolderSource.opened

    @contextmanager
    def slowly(self: Any, sample_id: int) -> Iterator[Any]:
        time.sleep(float(self.costs(np.array([sample_id]))[0]) / bytes_per_second)
        with opened(self, sample_id) as image:
            yield image

    FolderSource.opened = slowly  # type: ignore[method-assign]
    FolderSource.is_slow = True  # type: ignore[attr-defined]


def write_images(folder: Path, *, number: int, seed: int = 0) -> None:
    """Writes PNG files of noise in ten classes, their sides as unequal as those of photographs: log-normal.

    Args:
        folder: Gets ``train`` and ``val``.
        number: Training images.
        seed: Of sizes and pixels.
    """
    from PIL import Image

    random = np.random.default_rng(seed)
    for part, count in (("train", number), ("val", 20)):
        for index in range(count):
            side = int(np.clip(random.lognormal(np.log(70), 0.9), SMALL, LARGE))
            path = folder / part / f"class{index % 10}" / f"{index:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(path)

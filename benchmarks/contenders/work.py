"""What every contender trains on, whatever its engine.

Legend: N samples, H rows, W columns, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NUM_IMAGES, NUM_CLASSES = 512, 1000


@dataclass(frozen=True)
class Work:
    """What every contender does.

    Args:
        network: One of our networks.
        image_size: Side in pixels.
        batch: Samples per rank and update.
        changes: Sections of the run file that differ from the defaults; for ConvMesh only.
    """

    network: str
    image_size: int
    batch: int
    changes: dict[str, dict[str, Any]]


def images_of(image_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Random uint8 images (N, H, W, C) and labels (N,), equal on all ranks."""
    generator = np.random.default_rng(0)
    images_NHWC = generator.integers(0, 256, (NUM_IMAGES, image_size, image_size, 3), dtype=np.uint8)
    return images_NHWC, generator.integers(0, NUM_CLASSES, NUM_IMAGES).astype(np.int32)

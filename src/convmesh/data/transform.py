"""Random and fixed changes to images, as a pure function of seed, epoch and sample; equal on all engines and ranks.

Legend: N samples, H rows, W columns, C channels, S side of the square images that the network sees, K random numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image

Images = npt.NDArray[np.uint8]
Uniforms = npt.NDArray[np.float64]

NUM_SHIFT = 3
"""Random numbers that ``crop_and_flip`` takes per sample: row, column, mirror."""
_ATTEMPTS = 10
NUM_RESIZED_CROP = 2 * _ATTEMPTS + 2
"""Random numbers that ``random_resized_crop`` takes per sample."""

_AREA = (0.08, 1.0)
_ASPECT = (3 / 4, 4 / 3)
_EVAL_RATIO = 256 / 224

Box = tuple[int, int, int, int]
"""Left, upper, right, lower."""


def crop_and_flip(images_NHWC: Images, *, padding: int, flip: bool, uniforms_NK: Uniforms) -> Images:
    """Crops a random window of the image size out of images with a black border, and mirrors half of them.

    Args:
        images_NHWC: uint8 images.
        padding: Width of the border in pixels; 0 crops nothing.
        flip: Whether to mirror left and right with probability 1/2.
        uniforms_NK: ``NUM_SHIFT`` numbers in [0, 1) per sample.

    Returns:
        uint8 images of the same shape; a new array if anything changed.
    """
    images = images_NHWC
    if padding:
        num, rows, columns, channels = images.shape
        padded = np.zeros((num, rows + 2 * padding, columns + 2 * padding, channels), dtype=np.uint8)
        padded[:, padding : padding + rows, padding : padding + columns] = images
        top_N, left_N = (uniforms_NK[:, :2] * (2 * padding + 1)).astype(np.int64).T
        windows = np.lib.stride_tricks.as_strided(
            padded,
            shape=(num, 2 * padding + 1, 2 * padding + 1, rows, columns, channels),
            strides=(*padded.strides[:3], *padded.strides[1:]),
            writeable=False,
        )
        images = windows[np.arange(num), top_N, left_N]
    if flip:
        mirrored_N = uniforms_NK[:, 2] < 0.5
        images = images.copy() if images is images_NHWC else images
        images[mirrored_N] = images[mirrored_N, :, ::-1]
    return images


def resized_crop_box(width: int, height: int, uniforms_K: Uniforms) -> Box:
    """A random box of 8 % to 100 % of the area with aspect 3/4 to 4/3; the central one if none of ten fits.

    As torchvision's ``RandomResizedCrop`` (Szegedy et al., "Going deeper with convolutions", 2015).

    Args:
        width: Of the image, in pixels.
        height: Of the image, in pixels.
        uniforms_K: ``NUM_RESIZED_CROP`` numbers in [0, 1).

    Returns:
        The box, in pixels.
    """
    *shapes, row, column = uniforms_K.tolist()
    for area, aspect in zip(shapes[::2], shapes[1::2], strict=True):
        area_pixels = width * height * (_AREA[0] + area * (_AREA[1] - _AREA[0]))
        ratio = math.exp(math.log(_ASPECT[0]) + aspect * math.log(_ASPECT[1] / _ASPECT[0]))
        box_width, box_height = round(math.sqrt(area_pixels * ratio)), round(math.sqrt(area_pixels / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, upper = int(column * (width - box_width + 1)), int(row * (height - box_height + 1))
            return left, upper, left + box_width, upper + box_height
    box_width = min(width, round(height * _ASPECT[1]))
    box_height = min(height, round(width / _ASPECT[0]))
    left, upper = (width - box_width) // 2, (height - box_height) // 2
    return left, upper, left + box_width, upper + box_height


def random_resized_crop(image: Image, *, size: int, uniforms_K: Uniforms) -> Images:
    """Crops ``resized_crop_box`` and resizes it.

    Args:
        image: An opened image.
        size: Side S of the result.
        uniforms_K: ``NUM_RESIZED_CROP`` numbers in [0, 1).

    Returns:
        uint8 of shape (S, S, C).
    """
    from PIL.Image import Resampling

    width, height = image.size
    box = resized_crop_box(width, height, uniforms_K)
    # JPEG decodes at 1/2, 1/4 or 1/8 at little cost: never below the size that the crop will have.
    scale = max(size / (box[2] - box[0]), size / (box[3] - box[1]))
    image = _decoded(image, at_least=(math.ceil(width * scale), math.ceil(height * scale)))
    ratio_x, ratio_y = image.width / width, image.height / height
    drafted = (box[0] * ratio_x, box[1] * ratio_y, box[2] * ratio_x, box[3] * ratio_y)
    return _pixels(image.resize((size, size), Resampling.BILINEAR, box=drafted))


def fit_image(image: Image, *, size: int) -> Images:
    """Resizes the shorter side to 256/224 of the size and crops the centre; leaves an image of the size as it is.

    Args:
        image: An opened image.
        size: Side S of the result.

    Returns:
        uint8 of shape (S, S, C).
    """
    from PIL.Image import Resampling

    if image.size == (size, size):
        return _pixels(_decoded(image, at_least=image.size))
    shorter = round(size * _EVAL_RATIO)
    scale = shorter / min(image.size)
    wanted = (max(round(image.width * scale), shorter), max(round(image.height * scale), shorter))
    resized = _decoded(image, at_least=wanted).resize(wanted, Resampling.BILINEAR)
    left, upper = (wanted[0] - size) // 2, (wanted[1] - size) // 2
    return _pixels(resized.crop((left, upper, left + size, upper + size)))


def stretch_image(image: Image, *, size: int) -> Images:
    """Resizes a whole image to S x S.

    Args:
        image: An opened image.
        size: Side S of the result.

    Returns:
        uint8 of shape (S, S, C).
    """
    from PIL.Image import Resampling

    return _pixels(image.resize((size, size), Resampling.BILINEAR))


def _decoded(image: Image, *, at_least: tuple[int, int]) -> Image:
    """The image as RGB, decoded no larger than needed; images made of arrays are what they shall be already."""
    from PIL.ImageFile import ImageFile

    if not isinstance(image, ImageFile):
        return image
    image.draft("RGB", at_least)
    return image if image.mode == "RGB" else image.convert("RGB")


def _pixels(image: Image) -> Images:
    array = np.asarray(image, dtype=np.uint8)
    return array[:, :, None] if array.ndim == 2 else array

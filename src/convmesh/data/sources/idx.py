"""Files in the idx format of MNIST and its family, raw or gzipped.

Format: two zero bytes, a type code (8: uint8), the number of dims, each dim as a big-endian 32-bit number, then the
data (Y. LeCun, C. Cortes, C. Burges, "The MNIST database").
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from convmesh.data.sources.base import ArraySource
from convmesh.errors import DataError

_UINT8 = 8
_STEMS = {"train": ("train",), "test": ("t10k", "test")}


def idx_sources(folder: Path) -> tuple[ArraySource, ArraySource]:
    """Finds and opens training and test files.

    Args:
        folder: Holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and the same with ``t10k``, raw or
            ``.gz``.

    Returns:
        Training and test images as (N, H, W, 1), or with channels (N, H, W, C) where the files have four dims.

    Raises:
        DataError: If a file is missing or damaged, or a label of the test set is not one of the training set's.
    """
    paths = {(split, kind): _find(folder, split, kind) for split in _STEMS for kind in ("images", "labels")}
    labels = {split: _read_labels(paths[split, "labels"]) for split in _STEMS}
    class_names = tuple(str(number) for number in range(int(labels["train"].max(initial=0)) + 1))
    train, test = (
        ArraySource(
            partial(read_images, paths[split, "images"]),
            labels_N=labels[split],
            class_names=class_names,
            name=f"{folder.name} {split}",
        )
        for split in _STEMS
    )
    return train, test


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Reads one idx file of bytes; raw files are mapped into memory.

    Args:
        path: The file; gzipped if it ends in ``.gz``.

    Returns:
        uint8 of the shape that the file says.

    Raises:
        DataError: If it is not such a file, or shorter or longer than it says.
    """
    try:
        content = _content(path)
        zeros, code, num_dims = struct.unpack(">HBB", content[:4].tobytes())
        start = 4 + 4 * num_dims
        shape = struct.unpack(f">{num_dims}I", content[4:start].tobytes())
    except (OSError, EOFError, struct.error, zlib.error, ValueError) as error:
        raise _damaged(path, got=error, expected="an idx file") from None
    if zeros or code != _UINT8:
        raise _damaged(path, got=f"first bytes {bytes(content[:4])!r}", expected="an idx file of unsigned bytes")
    if len(content) - start != math.prod(shape):
        raise _damaged(path, got=f"{len(content) - start} bytes of data", expected=f"{math.prod(shape)} for {shape}")
    return content[start:].reshape(shape)


def read_images(path: Path) -> npt.NDArray[np.uint8]:
    """Reads images as (N, H, W, C); grey ones have one channel."""
    images = read_idx(path)
    if images.ndim not in (3, 4):
        raise _damaged(path, got=f"{images.ndim} dims", expected="3 (grey images), or 4 with channels last")
    return images[..., None] if images.ndim == 3 else images


def _read_labels(path: Path) -> npt.NDArray[np.uint8]:
    labels = read_idx(path)
    if labels.ndim != 1:
        raise _damaged(path, got=f"{labels.ndim} dims", expected="1")
    return labels


def _content(path: Path) -> npt.NDArray[np.uint8]:
    if path.suffix == ".gz":
        with gzip.open(path) as file:
            return np.frombuffer(file.read(), dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")


def _find(folder: Path, split: str, kind: str) -> Path:
    patterns = [f"{stem}[-_]{kind}[-.]idx?-ubyte{end}" for stem in _STEMS[split] for end in ("", ".gz")]
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            return path
    raise DataError(
        f"there are no {split} {kind} in {folder}",
        expected=f"a file like {_STEMS[split][0]}-{kind}-idx{3 if kind == 'images' else 1}-ubyte, raw or .gz",
        fix="Set 'data.path' to the folder of the idx files",
    )


def _damaged(path: Path, *, got: object, expected: str) -> DataError:
    return DataError(f"the idx file {path} is damaged", got=got, expected=expected, fix="Fetch it again")

"""CIFAR-10 in the forms in which it is handed out: binary and Python batches, and sheets of PNG.

A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009. Each official batch holds 10,000 images as
rows of 3,072 bytes, the red plane first. A sheet holds one image per row of 1,024 pixels.

Legend: N samples, C channels, H rows, W columns.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from convmesh.data.sources.base import ArraySource, LoadOnce
from convmesh.data.sources.safe_pickle import load_arrays
from convmesh.errors import DataError

CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

_SIDE = 32
_IMAGE_BYTES = 3 * _SIDE * _SIDE
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_BATCHES = {"train": _TRAIN, "test": ("test_batch",)}
_SUFFIXES = {"binary": ".bin", "python": "", "sheets": ".png"}

Part = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]


def find_layout(folder: Path) -> tuple[Path, str] | None:
    """Finds CIFAR-10 in a folder or right below it.

    Args:
        folder: Where to look.

    Returns:
        The folder that holds the files, and ``"binary"``, ``"python"`` or ``"sheets"``; None if there is none.
    """
    below = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    for place in (folder, *below):
        for layout, suffix in _SUFFIXES.items():
            if any((place / f"{batch}{suffix}").is_file() for batch in (*_TRAIN, "test_batch")):
                return place, layout
    return None


def read_split(folder: Path, *, layout: str, split: str) -> Part:
    """Decodes all images of a split.

    Args:
        folder: The folder that holds the files.
        layout: As ``find_layout`` says.
        split: ``"train"`` or ``"test"``.

    Returns:
        uint8 images (N, 32, 32, 3) and int32 labels (N).

    Raises:
        DataError: If a file is missing or damaged.
    """
    paths = [folder / f"{batch}{_SUFFIXES[layout]}" for batch in _BATCHES[split]]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise DataError(
            f"CIFAR-10 in {folder} is not whole",
            got=f"no {', '.join(missing)}",
            fix="Unpack the official archive again, or run: convmesh data fetch cifar10",
        )
    if layout == "sheets":
        return _read_sheets(paths, folder / f"{split}_lables.json")
    parts = [(_read_binary if layout == "binary" else _read_python)(path) for path in paths]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def folder_source(folder: Path, *, layout: str, split: str) -> ArraySource:
    """A source that decodes an official folder into memory.

    Args:
        folder: The folder that holds the files.
        layout: As ``find_layout`` says.
        split: ``"train"`` or ``"test"``.
    """
    images, labels = read_split(folder, layout=layout, split=split)
    load = LoadOnce(partial(_read_images, folder, layout, split), images)
    return ArraySource(load, labels_N=labels, class_names=CLASS_NAMES, name=f"{folder.name} {split}")


def _read_images(folder: Path, layout: str, split: str) -> npt.NDArray[np.uint8]:
    return read_split(folder, layout=layout, split=split)[0]


def _read_binary(path: Path) -> Part:
    rows = np.fromfile(path, dtype=np.uint8)
    if len(rows) == 0 or len(rows) % (1 + _IMAGE_BYTES):
        raise _damaged(path, got=f"{len(rows)} bytes", expected=f"a multiple of {1 + _IMAGE_BYTES}")
    rows = rows.reshape(-1, 1 + _IMAGE_BYTES)
    return _channels_last(rows[:, 1:]), rows[:, 0].astype(np.int32)


def _read_python(path: Path) -> Part:
    batch = load_arrays(path)
    if not isinstance(batch, dict):
        raise _damaged(path, got=type(batch).__name__, expected="a dict")
    fields = {(key.decode("latin1") if isinstance(key, bytes) else str(key)): batch[key] for key in batch}
    data, labels = fields.get("data"), fields.get("labels")
    is_whole = (
        isinstance(data, np.ndarray)
        and data.dtype == np.uint8
        and data.shape[1:] == (_IMAGE_BYTES,)
        and isinstance(labels, list)
        and len(labels) == len(data)
    )
    if data is None or not is_whole:
        raise _damaged(path, got=f"entries {sorted(fields)}", expected=f"data (N, {_IMAGE_BYTES}) and as many labels")
    return _channels_last(data), np.array(labels, dtype=np.int32)


def _channels_last(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(rows.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1))


def _read_sheets(paths: list[Path], labels_path: Path) -> Part:
    images = np.concatenate([_read_sheet(path) for path in paths])
    try:
        labels = np.array(json.loads(labels_path.read_text(encoding="utf-8")), dtype=np.int32)
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(labels_path, got=error, expected="a list of labels") from None
    if labels.shape != (len(images),):
        raise _damaged(labels_path, got=f"labels {labels.shape}", expected=f"{len(images)} labels")
    return images, labels


def _read_sheet(path: Path) -> npt.NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(path) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise _damaged(path, got=error, expected="a PNG image") from None
    if pixels.shape[1:] != (_SIDE * _SIDE, 3):
        raise _damaged(path, got=f"{pixels.shape[1]} pixels wide", expected=f"{_SIDE * _SIDE}")
    return pixels.reshape(-1, _SIDE, _SIDE, 3)


def _damaged(path: Path, *, got: object, expected: str) -> DataError:
    return DataError(f"the CIFAR-10 file {path} is damaged", got=got, expected=expected, fix="Fetch or unpack it again")

"""The files of an image folder, listed once and kept: 1.28 million of them are not walked at every start.

Legend: N files, C classes.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.data.files import CacheError, cache_root, locked
from convmesh.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")

_FORMAT = 1


@dataclass(frozen=True)
class FolderIndex:
    """The images of one split, class by class, in the order of their names.

    Args:
        folder: Holds one folder per class.
        class_names: Names of the class folders, sorted.
        labels_N: Class of every file.
        file_bytes_N: Size of every file.
        names: All file names, one after the other, as bytes.
        name_ends_N: Where each name ends in ``names``.
    """

    folder: Path
    class_names: tuple[str, ...]
    labels_N: npt.NDArray[np.int32]
    file_bytes_N: npt.NDArray[np.int64]
    names: npt.NDArray[np.uint8]
    name_ends_N: npt.NDArray[np.int64]

    def path(self, index: int) -> Path:
        """The file of an index."""
        start = int(self.name_ends_N[index - 1]) if index else 0
        name = os.fsdecode(self.names[start : int(self.name_ends_N[index])].tobytes())
        return self.folder / self.class_names[int(self.labels_N[index])] / name


def load_index(folder: Path) -> FolderIndex:
    """Lists a folder of class folders, or takes the list from the cache if no class folder has changed.

    Args:
        folder: Holds one folder per class.

    Returns:
        The index.

    Raises:
        DataError: If there is no class folder, or one holds no image.
    """
    classes = sorted((entry for entry in os.scandir(folder) if _is_class(entry)), key=lambda entry: entry.name)
    if not classes:
        raise DataError(
            f"there are no class folders in {folder}", expected="one folder of images per class", fix=_LAYOUT
        )
    path = _cache_path(folder, classes)
    try:
        with locked(path.with_suffix(".lock")):
            return _read(path, folder) or _keep(path, _scan(folder, classes))
    except CacheError:
        return _scan(folder, classes)  # A cache that can't be written costs time, not the run.


_LAYOUT = "Lay the folder out as train/<class>/*.jpg and val/<class>/*.jpg"


def _is_class(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _cache_path(folder: Path, classes: list[os.DirEntry[str]]) -> Path:
    """Adding, removing or renaming a file changes the time of its folder, and so the name of the index."""
    state = hashlib.sha256(f"{_FORMAT} {folder.resolve()}".encode())
    for entry in classes:
        state.update(f"\0{entry.name}\0{entry.stat().st_mtime_ns}".encode(errors="surrogateescape"))
    return cache_root() / "indexes" / f"{state.hexdigest()[:32]}.npz"


def _images_of(entry: os.DirEntry[str]) -> Iterator[tuple[bytes, int]]:
    with os.scandir(entry.path) as files:
        for file in files:
            if file.name.lower().endswith(SUFFIXES) and not file.name.startswith("."):
                yield os.fsencode(file.name), file.stat().st_size


def _scan(folder: Path, classes: list[os.DirEntry[str]]) -> FolderIndex:
    names: list[bytes] = []
    sizes: list[int] = []
    counts: list[int] = []
    for entry in classes:
        found = sorted(_images_of(entry))
        names += [name for name, _ in found]
        sizes += [size for _, size in found]
        counts.append(len(found))
    empty = [entry.name for entry, count in zip(classes, counts, strict=True) if not count]
    if empty:
        raise DataError(
            f"class folders in {folder} hold no image", got=", ".join(empty[:10]), fix="Fill or remove them"
        )
    return FolderIndex(
        folder=folder,
        class_names=tuple(entry.name for entry in classes),
        labels_N=np.repeat(np.arange(len(classes), dtype=np.int32), counts),
        file_bytes_N=np.array(sizes, dtype=np.int64),
        names=np.frombuffer(b"".join(names), dtype=np.uint8),
        name_ends_N=np.cumsum([len(name) for name in names], dtype=np.int64),
    )


def _read(path: Path, folder: Path) -> FolderIndex | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays: dict[str, npt.NDArray[Any]] = dict(stored)
        return FolderIndex(folder=folder, class_names=tuple(arrays.pop("class_names").tolist()), **arrays)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None


def _keep(path: Path, index: FolderIndex) -> FolderIndex:
    """Writes the index whole or not at all; a full disk is no reason to stop."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(
                file,
                class_names=np.array(index.class_names),
                labels_N=index.labels_N,
                file_bytes_N=index.file_bytes_N,
                names=index.names,
                name_ends_N=index.name_ends_N,
            )
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
    return index

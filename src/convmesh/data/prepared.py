"""Prepared data sets: a folder of ``.npy`` files that are mapped into memory, and a manifest that is written last.

A folder without a whole manifest, or with a file of another size than the manifest says, is not a data set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.data.sources.base import ArraySource
from convmesh.errors import DataError

MANIFEST = "manifest.json"
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Prepared:
    """A whole prepared folder.

    Args:
        folder: Where it is.
        class_names: Names of the classes.
        digests: SHA-256 of the bytes of each array.
    """

    folder: Path
    class_names: tuple[str, ...]
    digests: Mapping[str, str]

    def source(self, split: str) -> ArraySource:
        """The images and labels of a split, ``"train"`` or ``"test"``, mapped into memory when first read."""
        images, labels = (self.folder / f"{split}_{kind}.npy" for kind in ("images", "labels"))
        return ArraySource(
            partial(load_mapped, str(images)),
            labels_N=np.load(labels),
            class_names=self.class_names,
            name=f"{self.folder.name} {split}",
        )

    def is_intact(self) -> bool:
        """Whether every array still has its digest; reads all of it."""
        return all(digest_of(np.load(self.folder / f"{name}.npy")) == self.digests[name] for name in ARRAYS)


def digest_of(array: npt.NDArray[Any]) -> str:
    """SHA-256 of the bytes of an array, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def load_mapped(path: str) -> npt.NDArray[np.uint8]:
    """Maps a ``.npy`` file into memory, read-only."""
    images: npt.NDArray[np.uint8] = np.load(path, mmap_mode="r")
    return images


def write_prepared(folder: Path, arrays: Arrays, *, class_names: Sequence[str], origin: str) -> None:
    """Writes arrays, then the manifest.

    Args:
        folder: A folder that doesn't exist yet.
        arrays: The arrays named in ``ARRAYS``: images uint8 NHWC, labels int32.
        class_names: Names of the classes.
        origin: Where the data came from, for people.
    """
    folder.mkdir()
    entries = {}
    for name in ARRAYS:
        path = folder / f"{name}.npy"
        np.save(path, arrays[name], allow_pickle=False)
        entries[name] = {
            "shape": list(arrays[name].shape),
            "dtype": str(arrays[name].dtype),
            "num_bytes": path.stat().st_size,
            "sha256": digest_of(arrays[name]),
        }
    manifest = {"format": 1, "origin": origin, "class_names": list(class_names), "arrays": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def open_prepared(folder: Path, *, fetch: str) -> Prepared:
    """Opens a prepared folder.

    Args:
        folder: Where it should be.
        fetch: The command that makes it.

    Returns:
        The data set; every file has the size that the manifest says.

    Raises:
        DataError: If the folder is missing, half fetched or damaged.
    """
    if not folder.is_dir():
        raise DataError(f"there is no data in {folder}", fix=f"Run: {fetch}")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        entries = {name: manifest["arrays"][name] for name in ARRAYS}
        class_names = tuple(map(str, manifest["class_names"]))
        digests = {name: str(entry["sha256"]) for name, entry in entries.items()}
    except FileNotFoundError:
        raise DataError(f"the data in {folder} is half fetched", got=f"no {MANIFEST}", fix=f"Run: {fetch}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / MANIFEST} can't be read", got=repr(error), fix=f"Run: {fetch}") from None
    for name, entry in entries.items():
        path = folder / f"{name}.npy"
        num_bytes = path.stat().st_size if path.exists() else 0
        if num_bytes != entry["num_bytes"]:
            raise DataError(
                f"the file {path} is damaged",
                got=f"{num_bytes} bytes",
                expected=f"{entry['num_bytes']} bytes",
                fix=f"Run: {fetch}",
            )
    return Prepared(folder, class_names, digests)

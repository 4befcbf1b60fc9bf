"""Folders of images in ImageNet's layout: ``train/<class>/*.jpg`` and ``val/<class>/*.jpg``.

Files are opened only when their images are needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from convmesh.data.sources.base import CorruptImageError, Ids, Source
from convmesh.data.sources.folder_index import SUFFIXES, FolderIndex, load_index
from convmesh.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

_EVAL_NAMES = ("val", "valid", "validation", "test")


class FolderSource(Source):
    """Images in files, decoded to RGB.

    Args:
        index: The files.
        class_names: Names of the classes that labels count.
        labels_N: Class of every sample.
        ids: Which files of the index are samples. Default: all.

    Raises:
        DataError: If there are no samples.
    """

    cost_unit = "bytes"

    def __init__(
        self,
        index: FolderIndex,
        *,
        class_names: tuple[str, ...],
        labels_N: npt.NDArray[np.int32],
        ids: Ids | None = None,
    ) -> None:
        super().__init__(labels_N, class_names=class_names, name=str(index.folder), num_channels=3)
        self._index = index
        self._ids = ids

    @contextlib.contextmanager
    def opened(self, sample_id: int) -> Iterator[Image]:
        """Opens an image file.

        Raises:
            CorruptImageError: If it can't be opened or decoded; names the file.
        """
        from PIL import Image

        path = self._path(sample_id)
        try:
            with Image.open(path) as image:
                yield image
        except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
            raise CorruptImageError(
                f"the image {path} can't be read",
                got=str(error).replace(f" {str(path)!r}", "") or type(error).__name__,
                fix="Replace or remove the file, or set 'data.on_error: skip'",
            ) from error

    def name_of(self, sample_id: int) -> str:
        """The path of the file."""
        return str(self._path(sample_id))

    def costs(self, ids: Ids) -> npt.NDArray[np.float64]:
        """Bytes of each file."""
        return self._index.file_bytes_N[self._files(ids)].astype(np.float64)

    def subset(self, ids: Ids) -> Self:
        """A source of some of the files."""
        return type(self)(self._index, class_names=self.class_names, labels_N=self.labels_N[ids], ids=self._files(ids))

    def _files(self, ids: Ids) -> Ids:
        return ids if self._ids is None else self._ids[ids]

    def _path(self, sample_id: int) -> Path:
        return self._index.path(int(sample_id if self._ids is None else self._ids[sample_id]))


def folder_sources(folder: Path) -> tuple[FolderSource, FolderSource]:
    """Opens the training and evaluation images of a folder.

    Args:
        folder: Holds ``train`` and ``val`` (or ``valid``, ``validation``, ``test``), each with one folder per class.

    Returns:
        Training and evaluation images; a class may be missing from the latter.

    Raises:
        DataError: If a part is missing, or evaluation has a class that training hasn't.
    """
    try:
        return _open_parts(folder)
    except OSError as error:
        raise DataError(f"{error.filename or folder} can't be read", got=error.strerror) from None


def _open_parts(folder: Path) -> tuple[FolderSource, FolderSource]:
    evaluation_folder = next((folder / name for name in _EVAL_NAMES if (folder / name).is_dir()), None)
    if not (folder / "train").is_dir() or evaluation_folder is None:
        raise _wrong_layout(folder, has_train=(folder / "train").is_dir())
    train_index, evaluation_index = load_index(folder / "train"), load_index(evaluation_folder)
    names = train_index.class_names
    unknown = sorted(set(evaluation_index.class_names) - set(names))
    if unknown:
        raise DataError(
            f"classes in {evaluation_folder} are not among those of {folder / 'train'}",
            got=", ".join(unknown[:10]),
            fix="Add them to the training images, or remove them",
        )
    number_of = {name: number for number, name in enumerate(names)}
    numbers = np.array([number_of[name] for name in evaluation_index.class_names], dtype=np.int32)
    return (
        FolderSource(train_index, class_names=names, labels_N=train_index.labels_N),
        FolderSource(evaluation_index, class_names=names, labels_N=numbers[evaluation_index.labels_N]),
    )


def _wrong_layout(folder: Path, *, has_train: bool) -> DataError:
    if has_train:
        return DataError(
            f"there are no evaluation images in {folder}",
            expected="a folder val/<class>/*.jpg",
            fix=f"Move some images of every class from {folder / 'train'} to {folder / 'val'}",
        )
    below = (file for entry in folder.iterdir() if entry.is_dir() for file in entry.iterdir())
    holds_classes = any(file.suffix.lower() in SUFFIXES for file in below)
    if holds_classes:
        return DataError(
            f"{folder} holds class folders, but not which images are for training",
            expected="train/<class>/*.jpg and val/<class>/*.jpg",
            fix=f"Move the class folders to {folder / 'train'}, and some images of every class to {folder / 'val'}",
        )
    return DataError(
        f"there are no images in {folder}",
        expected="train/<class>/*.jpg and val/<class>/*.jpg",
        fix="Set 'data.path' to a folder laid out like that",
    )

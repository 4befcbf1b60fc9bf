"""What a source of samples is, and the one for images that are arrays already.

Legend: N samples, H rows, W columns, C channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from convmesh.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

Images = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


class CorruptImageError(DataError):
    """One image can't be read or decoded."""


class Source(ABC):
    """Labelled images, by sample id from 0.

    Args:
        labels_N: Class of every sample.
        class_names: Names of the classes.
        name: What the data is, for messages.
        num_channels: Channels of every image.

    Raises:
        DataError: If there is no sample, or a label lies outside the classes.
    """

    def __init__(
        self, labels_N: npt.NDArray[Any], *, class_names: tuple[str, ...], name: str, num_channels: int
    ) -> None:
        self.labels_N = np.ascontiguousarray(labels_N, dtype=np.int32)
        self.class_names = class_names
        self.name = name
        self.num_channels = num_channels
        if labels_N.ndim != 1 or len(labels_N) == 0:
            raise DataError(f"{name} holds no samples", got=f"labels of shape {labels_N.shape}")
        outside = np.flatnonzero((labels_N < 0) | (labels_N >= len(class_names)))
        if len(outside):
            raise DataError(
                f"a label of {name} lies outside the classes",
                got=f"{labels_N[outside[0]]} at sample {outside[0]}, {len(outside)} in all",
                expected=f"0 to {len(class_names) - 1}",
                fix="Mend the labels, or name all classes",
            )

    cost_unit = "samples"
    """What ``costs`` are counted in."""

    @property
    def num_samples(self) -> int:
        """Number of samples N."""
        return len(self.labels_N)

    @abstractmethod
    def opened(self, sample_id: int) -> AbstractContextManager[Image]:
        """Opens one image for Pillow, decoded when first used.

        Raises:
            CorruptImageError: On entering or inside, if the image can't be decoded; names it.
        """

    @abstractmethod
    def name_of(self, sample_id: int) -> str:
        """What a sample is called, for messages."""

    @abstractmethod
    def costs(self, ids: Ids) -> npt.NDArray[np.float64]:
        """Expected cost of reading each sample: the bytes of its file, or 1 where all cost the same."""

    @abstractmethod
    def subset(self, ids: Ids) -> Self:
        """A source of some of the samples, renumbered from 0."""


class LoadOnce:
    """Calls a function once and keeps its result; a pickled copy calls it again.

    Args:
        load: Gives uint8 images; picklable.
        images: The images, if they are there already.
    """

    def __init__(self, load: Callable[[], Images], images: Images | None = None) -> None:
        self._load = load
        self._images = images

    def __call__(self) -> Images:
        """The images."""
        if self._images is None:
            self._images = self._load()
        return self._images

    def __getstate__(self) -> dict[str, Any]:
        return {"_load": self._load, "_images": None}


class ArraySource(Source):
    """Images of one size in an array.

    Args:
        load: Gives the uint8 images, shape (N, H, W, C). Called once in every process that reads; must be picklable.
        labels_N: Class of every sample.
        class_names: Names of the classes.
        name: What the data is, for messages.
        ids: Which rows of the array are samples. Default: all.

    Raises:
        DataError: If the images are not such an array, or labels don't fit.
    """

    def __init__(
        self,
        load: Callable[[], Images],
        *,
        labels_N: npt.NDArray[Any],
        class_names: tuple[str, ...],
        name: str,
        ids: Ids | None = None,
    ) -> None:
        self._load = load if isinstance(load, LoadOnce) else LoadOnce(load)
        self._ids = ids
        images = self._load()
        shape = images.shape
        if images.dtype != np.uint8 or len(shape) != 4:
            raise DataError(
                f"the images of {name} have a wrong shape or type",
                got=f"{images.dtype} {shape}",
                expected="uint8 (N, H, W, C)",
            )
        num_rows = len(images) if ids is None else len(ids)
        if num_rows != len(labels_N):
            raise DataError(f"{name} has not one label per image", got=f"{num_rows} images, {len(labels_N)} labels")
        self.shape_HWC: tuple[int, int, int] = (shape[1], shape[2], shape[3])
        super().__init__(labels_N, class_names=class_names, name=name, num_channels=shape[3])

    @property
    def images(self) -> Images:
        """The whole array that samples are rows of."""
        return self._load()

    def read(self, ids: Ids) -> Images:
        """Copies images.

        Args:
            ids: Sample ids.

        Returns:
            uint8 of shape (len(ids), H, W, C).
        """
        rows = ids if self._ids is None else self._ids[ids]
        return np.asarray(self.images[rows])

    def opened(self, sample_id: int) -> AbstractContextManager[Image]:
        """One image for Pillow; grey images have no channel dim there."""
        from PIL import Image

        array_HWC = self.read(np.array([sample_id]))[0]
        return nullcontext(Image.fromarray(array_HWC[:, :, 0] if self.num_channels == 1 else array_HWC))

    def name_of(self, sample_id: int) -> str:
        """Data set and row."""
        return f"{self.name}, sample {sample_id if self._ids is None else self._ids[sample_id]}"

    def costs(self, ids: Ids) -> npt.NDArray[np.float64]:
        """Always 1."""
        return np.ones(len(ids))

    def subset(self, ids: Ids) -> Self:
        """A source of some rows of the same array."""
        rows = ids if self._ids is None else self._ids[ids]
        return type(self)(
            self._load, labels_N=self.labels_N[ids], class_names=self.class_names, name=self.name, ids=rows
        )

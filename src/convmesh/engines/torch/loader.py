"""Micro-batches through PyTorch's ``DataLoader``, ahead of their use, onto the device.

Legend: N samples, H rows, W columns, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from convmesh.engines.contract import Batch, Reader
from convmesh.engines.reading_ahead import micro_batches_ahead

Key = tuple[int, int, int]
Array = npt.NDArray[Any]

SHARED_BYTES = 512 * 1024
"""Images of so many bytes come through shared memory, smaller ones through a pipe, whichever is quicker."""

_DTYPES = {np.int64: torch.int64, np.float32: torch.float32}


@dataclass(frozen=True)
class TorchBatch(Batch):
    """A micro-batch of tensors: uint8 (N, H, W, C), int64 (N,), float32 (N,).

    Args:
        num_real: Samples that count, known without asking the device.
    """

    num_real: float = 0.0


@dataclass(frozen=True)
class _Failure:
    """An error of a reader on its way out of a worker process: all of its fields, without pickling its type's rules."""

    kind: type[Exception]
    arguments: tuple[Any, ...]
    fields: dict[str, Any]

    def rebuild(self) -> Exception:
        error = self.kind.__new__(self.kind)
        error.args = self.arguments
        error.__dict__.update(self.fields)
        return error


@dataclass(frozen=True)
class _Item:
    """A micro-batch on its way out of a worker process.

    What is an array goes through a pipe. A tensor goes through shared memory, for whose handle the two processes first
    open a connection: that takes both some 0.5 ms of a core each time, and pays for large images alone.
    """

    images_NHWC: Array | Tensor
    labels_N: Array | Tensor
    weights_N: Array | Tensor
    num_skipped: int

    @classmethod
    def of(cls, batch: Batch) -> _Item:
        images_NHWC = _typed(batch.images_NHWC)
        if images_NHWC.nbytes >= SHARED_BYTES:
            images_NHWC = _tensor(images_NHWC)
        labels_N, weights_N = _typed(batch.labels_N, np.int64), _typed(batch.weights_N, np.float32)
        return cls(images_NHWC, labels_N, weights_N, batch.num_skipped)

    def pin_memory(self) -> _Item:
        """The same as tensors from which a GPU copies by itself; ``DataLoader`` looks for this name."""
        images_NHWC, labels_N, weights_N = (
            _tensor(part).pin_memory() for part in (self.images_NHWC, self.labels_N, self.weights_N)
        )
        return _Item(images_NHWC, labels_N, weights_N, self.num_skipped)


class _ReadByKey(Dataset[Any]):
    def __init__(self, reader: Reader, keys: Sequence[Key]) -> None:
        self._reader = reader
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> _Item | _Failure:
        try:
            return _Item.of(self._reader.read(self._keys[index]))
        except Exception as error:
            return _Failure(type(error), error.args, dict(error.__dict__))


def load(reader: Reader, keys: Sequence[Key], *, num_workers: int, device: torch.device) -> Iterator[TorchBatch]:
    """Reads micro-batches in order.

    Args:
        reader: Gives NumPy arrays; copied into worker processes if there are any.
        keys: Which micro-batches.
        num_workers: Worker processes, together two updates ahead; 0 reads in this process.
        device: Where the micro-batches shall lie; copied from pinned memory, without waiting, to a GPU.

    Yields:
        One micro-batch per key.

    Raises:
        ConvMeshError: What the reader raised, as it raised it.
    """
    num_workers = min(num_workers, len(keys))
    items: Iterator[_Item | _Failure] = iter(
        DataLoader(
            _ReadByKey(reader, keys),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            prefetch_factor=max(2, math.ceil(micro_batches_ahead(keys) / num_workers)) if num_workers else None,
            pin_memory=device.type == "cuda",
        )
    )
    for item in items:
        if isinstance(item, _Failure):
            raise item.rebuild()
        yield _on_device(item, device)


def to_device(batch: Batch, device: torch.device) -> TorchBatch:
    """A micro-batch as tensors on the device, from NumPy arrays or tensors; one from ``load`` is returned as it is."""
    return batch if isinstance(batch, TorchBatch) else _on_device(_Item.of(batch), device)


def _typed(array: Any, dtype: type[np.generic] | None = None) -> Array | Tensor:
    if isinstance(array, Tensor):
        return array if dtype is None else array.to(_DTYPES[dtype])
    return np.ascontiguousarray(array, dtype)


def _tensor(array: Array | Tensor) -> Tensor:
    if isinstance(array, Tensor):
        return array
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _on_device(item: _Item, device: torch.device) -> TorchBatch:
    weights_N = _tensor(item.weights_N)
    return TorchBatch(
        images_NHWC=_tensor(item.images_NHWC).to(device, non_blocking=True),
        labels_N=_tensor(item.labels_N).to(device, non_blocking=True),
        weights_N=weights_N.to(device, non_blocking=True),
        num_skipped=item.num_skipped,
        num_real=float(weights_N.sum()),
    )


def _unchanged(item: Any) -> Any:
    return item

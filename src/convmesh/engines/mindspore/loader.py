"""Micro-batches through ``mindspore.dataset``, ahead of their use.

Legend: N samples, H rows, W columns, C channels.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Tensor, dataset

from convmesh.engines.contract import Batch, Reader
from convmesh.engines.reading_ahead import micro_batches_ahead

Key = tuple[int, int, int]

_COLUMNS = ["images_NHWC", "labels_N", "weights_N", "num_skipped", "failure"]

_PREFETCH_LOCK = threading.Lock()


@dataclass(frozen=True)
class MindSporeBatch(Batch):
    """A micro-batch of tensors: uint8 (N, H, W, C), int32 (N,), float32 (N,).

    Args:
        num_real: Samples that count, known without asking the device.
    """

    num_real: float = 0.0


class _ReadByKey:
    """A random-access source; MindSpore tells errors of a source as text only, so that they travel as bytes."""

    def __init__(self, reader: Reader, keys: Sequence[Key]) -> None:
        self._reader = reader
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        nothing = np.zeros(1, np.uint8)
        try:
            batch = self._reader.read(self._keys[int(index)])
        except Exception as error:
            failure = np.frombuffer(_pack(error), np.uint8)
            return nothing.reshape(1, 1, 1, 1), nothing.astype(np.int32), nothing.astype(np.float32), nothing, failure
        images_NHWC, labels_N, weights_N = _as_arrays(batch)
        return images_NHWC, labels_N, weights_N, np.array([batch.num_skipped], np.int64), np.zeros(0, np.uint8)


def load(reader: Reader, keys: Sequence[Key], *, num_workers: int) -> Iterator[MindSporeBatch]:
    """Reads micro-batches in order.

    Args:
        reader: Gives NumPy arrays; called from several threads if there are several workers.
        keys: Which micro-batches.
        num_workers: Threads that read; 0 is one. Not processes: MindSpore forks them from a process that is full of
            threads, and a child then waits for ever for a lock that one of those held (it hung in our tests). Decoding
            and NumPy release the interpreter's lock.

    Yields:
        One micro-batch per key.

    Raises:
        ConvMeshError: What the reader raised, as it raised it.
    """
    if not keys:
        return
    num_workers = min(num_workers, len(keys))
    with _prefetching(micro_batches_ahead(keys)):
        source = dataset.GeneratorDataset(
            _ReadByKey(reader, keys),
            _COLUMNS,
            shuffle=False,
            num_parallel_workers=max(1, num_workers),
            python_multiprocessing=False,
        )
        rows = source.create_tuple_iterator(num_epochs=1, output_numpy=True, do_copy=False)
    for images_NHWC, labels_N, weights_N, num_skipped, failure in rows:
        if failure.size:
            raise _unpack(failure.tobytes())
        yield _as_tensors(images_NHWC, labels_N, weights_N, int(num_skipped[0]))


def to_device(batch: Batch) -> MindSporeBatch:
    """A micro-batch as tensors, from NumPy arrays or tensors; one from ``load`` is returned as it is."""
    if isinstance(batch, MindSporeBatch):
        return batch
    return _as_tensors(*_as_arrays(batch), batch.num_skipped)


def _as_arrays(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.ascontiguousarray(_numpy(batch.images_NHWC)),
        np.ascontiguousarray(_numpy(batch.labels_N), np.int32),
        np.ascontiguousarray(_numpy(batch.weights_N), np.float32),
    )


def _as_tensors(
    images_NHWC: np.ndarray, labels_N: np.ndarray, weights_N: np.ndarray, num_skipped: int
) -> MindSporeBatch:
    return MindSporeBatch(
        images_NHWC=Tensor(images_NHWC),
        labels_N=Tensor(labels_N),
        weights_N=Tensor(weights_N),
        num_skipped=num_skipped,
        num_real=float(weights_N.sum()),
    )


def _numpy(array: Any) -> np.ndarray:
    return array.asnumpy() if isinstance(array, Tensor) else np.asarray(array)


def _pack(error: Exception) -> bytes:
    # All fields, without the rules of pickling exceptions: ours take keyword arguments.
    try:
        return pickle.dumps((type(error), error.args, dict(error.__dict__)))
    except Exception:
        return pickle.dumps((RuntimeError, (f"{type(error).__name__}: {error}",), {}))


def _unpack(content: bytes) -> Exception:
    kind, arguments, fields = pickle.loads(content)  # noqa: S301 (written by _pack in a process of ours)
    error: Exception = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(fields)
    return error


@contextlib.contextmanager
def _prefetching(size: int) -> Iterator[None]:
    with _PREFETCH_LOCK:
        earlier = dataset.config.get_prefetch_size()
        dataset.config.set_prefetch_size(size)
        try:
            yield
        finally:
            dataset.config.set_prefetch_size(earlier)

"""Channels exchanged through memory that ranks of one machine share; for the CPU, on both engines.

Gloo and MCCL go through TCP, whose processor time the computation lacks. Here every rank writes what others need into
its own two slots, tells them through pipes, and reads theirs straight to where it belongs. Large tensors go in pieces
of the size of a slot, so that no buffer of a whole tensor is needed.

Why two slots are enough: a rank writes a piece, tells it, waits until all others have told theirs, and reads. It comes
back to the same slot two pieces later; it then has waited for the piece in between, which the others told after they
had read the one before. Calls to pipes order memory on every processor.

All ranks must make the same calls in the same order, as with any collective; a tag that goes through the pipes shows
when they don't.

Legend: O outer dims, C channels, I inner dims, as they lie in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import select
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.errors import EngineError

FOLDER = Path("/dev/shm")
SWITCH = "CONVMESH_SHARED_MEMORY"
"""Environment variable; 0 sends everything through the engine's own collectives. Equal on all ranks."""

SLOT_BYTES = 2**21
"""A slot and what is read from it stay in the processor's cache."""

Lists = Sequence[Sequence[int]]
Array = npt.NDArray[Any]
Total = Callable[[Sequence[Array], Array], None]
"""Writes the sum of arrays, added up in order, into one; it may be one of them."""


def is_wanted() -> bool:
    """Whether ranks of one machine may exchange tensors through shared memory."""
    return os.environ.get(SWITCH, "1") != "0" and FOLDER.is_dir()


def add_up(parts: Sequence[Array], total: Array) -> None:
    """The sum of arrays in order, half types in float32."""
    with np.errstate(all="ignore"):  # An overflow is for the optimizer to find.
        if total.dtype == np.float16:
            total[...] = sum((part.astype(np.float32) for part in parts[1:]), parts[0].astype(np.float32))
            return
        np.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            np.add(total, part, out=total)


class SharedExchange:
    """Gathers, scatters and sums arrays among the ranks of one machine; made by ``connect``.

    Args:
        position: Of this rank.
        memory: Two slots of every rank.
        pipes: Of each other rank, the pipe that it is told through and the one that it tells through.
        timeout_seconds: How long to wait for another rank.
    """

    def __init__(
        self, position: int, memory: mmap.mmap, pipes: dict[int, tuple[int, int]], *, timeout_seconds: float
    ) -> None:
        self._position = position
        self._size = len(pipes) + 1
        self._pipes = pipes
        self._timeout_seconds = timeout_seconds
        slots = np.frombuffer(memory, np.uint8).reshape(2, self._size, SLOT_BYTES)
        self._turns = itertools.cycle(slots)
        self._tags = itertools.count(1)
        self._finalizer = weakref.finalize(self, _close, pipes)

    @classmethod
    def connect(
        cls, *, position: int, size: int, gather: Callable[[Any], list[Any]], timeout_seconds: float
    ) -> SharedExchange | None:
        """Makes the memory and the pipes; all ranks must call it.

        Args:
            position: Of this rank.
            size: Number of ranks.
            gather: Gathers a small value of every rank, in rank order.
            timeout_seconds: How long to wait for another rank later.

        Returns:
            None, on all ranks, if one does not want it, is on another machine, or there is too little memory.
        """
        wanted = all(gather(is_wanted()))
        path = gather(_make_folder(size) if wanted and position == 0 else None)[0]
        try:
            memory, told = _open(path, position, size)
            failed = any(gather(memory is None))
            pipes = {} if failed else {rank: (pipe, _open_to_tell(path, position, rank)) for rank, pipe in told.items()}
            # Once every rank has all of it open the names are not needed, and nothing is left behind.
            gather(None)
        finally:
            if position == 0 and path is not None:
                shutil.rmtree(path, ignore_errors=True)
        if failed or memory is None:
            _close({rank: (pipe,) for rank, pipe in told.items()})
            return None
        return cls(position, memory, pipes, timeout_seconds=timeout_seconds)

    def new_tag(self) -> int:
        """A name for calls of one kind; the same on all ranks that ask for theirs in the same order."""
        return next(self._tags)

    def fits(self, num_channels: int, element_bytes: int) -> bool:
        """Whether the channels of one pixel fit into a slot."""
        return num_channels * element_bytes <= SLOT_BYTES

    def gather(self, part_OCI: Array, lists: Lists, whole_OCI: Array, *, tag: int = 0) -> None:
        """Fills a whole array with the parts of all ranks.

        Args:
            part_OCI: This rank's part.
            lists: Channels of each rank.
            whole_OCI: Is filled.
            tag: What all ranks name this call.
        """
        places = [as_index(own) for own in lists]
        most = max(map(len, lists))
        for outer, inner in _pieces(whole_OCI.shape, most, whole_OCI.itemsize):
            own = part_OCI[outer, :, inner]
            slots = self._tell(own, tag)
            target = whole_OCI[outer, :, inner]
            for rank, place in enumerate(places):
                shape = (own.shape[0], len(lists[rank]), own.shape[2])
                target[:, place] = own if rank == self._position else _view(slots[rank], shape, own.dtype)

    def reduce_scatter(
        self, partial_OCI: Array, lists: Lists, own_OCI: Array, total: Total = add_up, *, tag: int = 0
    ) -> None:
        """Fills this rank's part of the sum of all ranks' arrays, added up in the order of the ranks.

        Args:
            partial_OCI: This rank's summand of the whole.
            lists: Channels of each rank.
            own_OCI: Is filled.
            total: Adds up.
            tag: What all ranks name this call.
        """
        place = as_index(lists[self._position])
        for outer, inner in _pieces(partial_OCI.shape, partial_OCI.shape[1], partial_OCI.itemsize):
            piece = partial_OCI[outer, :, inner]
            slots = self._tell(piece, tag)
            parts = [
                (piece if rank == self._position else _view(slot, piece.shape, piece.dtype))[:, place]
                for rank, slot in enumerate(slots)
            ]
            total(parts, own_OCI[outer, :, inner])

    def all_reduce(self, own: Array, result: Array, total: Total = add_up, *, tag: int = 0) -> None:
        """Fills an array with the sum of all ranks' arrays; all ranks get the same bits.

        Args:
            own: This rank's, 1-D.
            result: Is filled; may be the same.
            total: Adds up.
            tag: What all ranks name this call.
        """
        step = SLOT_BYTES // own.itemsize
        for start in range(0, own.size, step):
            piece = own[start : start + step]
            slots = self._tell(piece, tag)
            total([_view(slot, piece.shape, piece.dtype) for slot in slots], result[start : start + step])

    def _tell(self, piece: Array, tag: int) -> Array:
        """Writes a piece into this rank's slot and waits for those of all others."""
        slots: Array = next(self._turns)
        np.copyto(_view(slots[self._position], piece.shape, piece.dtype), piece)
        told = bytes([tag % 256])
        for _, pipe in self._pipes.values():
            self._write(pipe, told)
        for pipe, _ in self._pipes.values():
            if self._wait(pipe) != told:
                raise EngineError("the ranks of an axis exchange other tensors, or in another order")
        return slots

    def _write(self, pipe: int, told: bytes) -> None:
        try:
            os.write(pipe, told)
        except BrokenPipeError as error:
            raise EngineError("another rank of the axis is gone") from error

    def _wait(self, pipe: int) -> bytes:
        while True:
            try:
                if told := os.read(pipe, 1):
                    return told
                raise EngineError("another rank of the axis is gone")
            except BlockingIOError:
                self._poll(pipe)

    def _poll(self, pipe: int) -> None:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        if not poll.poll(1000 * self._timeout_seconds):
            raise EngineError(f"another rank of the axis has not come within {self._timeout_seconds:g} s")


def as_index(own: Sequence[int]) -> Any:
    """Something to index with: a slice where the channels follow each other."""
    if list(own) == list(range(own[0], own[0] + len(own))):
        return slice(own[0], own[0] + len(own))
    return np.asarray(own)


def _pieces(shape: Sequence[int], num_channels: int, element_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of outer and inner dims of which the channels fit into a slot; as many on all ranks."""
    num_outer, _, num_inner = shape
    if not num_inner:
        return
    pixel_bytes = num_channels * element_bytes
    rows = max(1, SLOT_BYTES // (pixel_bytes * num_inner))
    columns = min(num_inner, SLOT_BYTES // pixel_bytes)
    for outer in range(0, num_outer, rows):
        for inner in range(0, num_inner, columns):
            yield slice(outer, outer + rows), slice(inner, inner + columns)


def _view(slot: Array, shape: Sequence[int], dtype: Any) -> Array:
    flat: Array = slot[: math.prod(shape) * np.dtype(dtype).itemsize].view(dtype)
    return flat.reshape(shape)


def _pipe(folder: str | Path, teller: int, told: int) -> Path:
    return Path(folder) / f"{teller}-{told}"


def _make_folder(size: int) -> str | None:
    folder = tempfile.mkdtemp(prefix="convmesh-", dir=FOLDER)
    try:
        for teller, told in itertools.permutations(range(size), 2):
            os.mkfifo(_pipe(folder, teller, told))
        with (Path(folder) / "memory").open("wb") as file:
            # Without this a full /dev/shm, which has 64 MB in many containers, would kill the rank at its first write.
            os.posix_fallocate(file.fileno(), 0, 2 * size * SLOT_BYTES)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return folder


def _open(folder: str | None, position: int, size: int) -> tuple[mmap.mmap | None, dict[int, int]]:
    told: dict[int, int] = {}
    if folder is None:
        return None, told
    try:
        for rank in range(size):
            if rank != position:
                told[rank] = os.open(_pipe(folder, rank, position), os.O_RDONLY | os.O_NONBLOCK)
        with (Path(folder) / "memory").open("r+b") as file:
            return mmap.mmap(file.fileno(), 0), told
    except OSError:
        return None, told


def _open_to_tell(folder: str, position: int, rank: int) -> int:
    return os.open(_pipe(folder, position, rank), os.O_WRONLY)


def _close(pipes: Mapping[int, tuple[int, ...]]) -> None:
    for pipe in itertools.chain.from_iterable(pipes.values()):
        with contextlib.suppress(OSError):
            os.close(pipe)

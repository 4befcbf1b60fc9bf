"""Do all ranks hold equal tensors? Checksums are compared, not tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.errors import SyncError


def checksums(tensors: Mapping[str, npt.NDArray[Any]]) -> dict[str, int]:
    """The CRC-32 of the bytes of each tensor, in C order."""
    return {name: zlib.crc32(np.ascontiguousarray(tensor).tobytes()) for name, tensor in tensors.items()}


def check_sync(
    tensors: Mapping[str, npt.NDArray[Any]], *, all_gather: Callable[[Any], list[Any]], when: str = "now"
) -> None:
    """Checks that every rank holds the same tensors.

    Args:
        tensors: This rank's parameters and buffers by name.
        all_gather: Gathers a small value of every rank, in rank order; all ranks must call.
        when: Where in the run this is, for the message ("after update 40").

    Raises:
        SyncError: On every rank alike, naming the first differing tensor, the ranks and the time.
    """
    of_rank: list[dict[str, int]] = all_gather(checksums(tensors))
    for name in of_rank[0]:
        values = [sums.get(name) for sums in of_rank]
        if any(value != values[0] for value in values):
            apart = [str(rank) for rank, value in enumerate(values) if value != values[0]]
            raise SyncError(
                f"ranks hold different values of '{name}' {when}: rank {', '.join(apart)} differs from rank 0",
                fix="Look for randomness or state in the network that differs between ranks",
            )

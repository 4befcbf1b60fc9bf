"""Do all ranks hold equal tensors? Checksums are compared, not tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.errors import SyncError


def checksums(tensors: Mapping[str, npt.NDArray[Any]]) -> dict[str, int]:
    """The CRC-32 of the bytes of each tensor, in C order."""
    return {name: zlib.crc32(np.ascontiguousarray(tensor).tobytes()) for name, tensor in tensors.items()}


def check_sync(
    tensors: Mapping[str, npt.NDArray[Any]],
    *,
    all_gather: Callable[[Any], list[Any]],
    when: str = "now",
    groups: Sequence[Sequence[int]] | None = None,
) -> None:
    """Checks that every rank holds the same tensors.

    Args:
        tensors: This rank's parameters and buffers by name.
        all_gather: Gathers a small value of every rank, in rank order; all ranks must call.
        when: Where in the run this is, for the message ("after update 40").
        groups: Ranks that hold the same tensors; by default all.

    Raises:
        SyncError: On every rank alike, naming the first differing tensor, the ranks and the time.
    """
    of_rank: list[dict[str, int]] = all_gather(checksums(tensors))
    for group in groups if groups is not None else [range(len(of_rank))]:
        for name in of_rank[group[0]]:
            values = {rank: of_rank[rank].get(name) for rank in group}
            apart = [str(rank) for rank, value in values.items() if value != values[group[0]]]
            if apart:
                raise SyncError(
                    f"ranks hold different values of '{name}' {when}: rank {', '.join(apart)} differs from rank "
                    f"{group[0]}",
                    fix="Look for randomness or state in the network that differs between ranks",
                )

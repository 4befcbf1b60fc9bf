"""How the samples of an epoch are cut: global batches, shards of the data axis, micro-batches.

Legend: N samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from convmesh.errors import ConfigError, ConvMeshError, raise_all

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batching:
    """Sizes of global batches and of their parts.

    Args:
        global_batch: Samples per update over all shards and micro-batches.
        num_shards: Size of the data axis.
        accumulation: Micro-batches per update on every shard.
        last_batch: ``"keep"`` ends an epoch with a smaller global batch, ``"drop"`` leaves its samples out.

    Raises:
        ConfigError: If the global batch doesn't divide over shards and micro-batches.
    """

    global_batch: int
    num_shards: int = 1
    accumulation: int = 1
    last_batch: Literal["keep", "drop"] = "keep"

    def __post_init__(self) -> None:
        errors: list[ConvMeshError] = [
            ConfigError(f"{name} must be a whole number from 1", got=value)
            for name, value in (
                ("the global batch", self.global_batch),
                ("the number of shards", self.num_shards),
                ("accumulation", self.accumulation),
            )
            if value < 1
        ]
        if self.last_batch not in ("keep", "drop"):
            errors.append(ConfigError("last_batch is unknown", got=repr(self.last_batch), expected="keep or drop"))
        if not errors and self.global_batch % (self.num_shards * self.accumulation):
            errors.append(self._indivisible())
        raise_all(errors)

    def _indivisible(self) -> ConfigError:
        parts = self.num_shards * self.accumulation
        below, above = self.global_batch // parts * parts, -(-self.global_batch // parts) * parts
        nearest = f"{below} or {above}" if below else str(above)
        return ConfigError(
            "train.global_batch is not divisible into micro-batches",
            got=f"{self.global_batch} samples over {self.num_shards} ranks x {self.accumulation} micro-batches",
            fix=f"Set 'train.global_batch: {nearest}'",
        )

    @property
    def shard_batch(self) -> int:
        """Samples per update of one shard."""
        return self.global_batch // self.num_shards

    @property
    def micro_batch(self) -> int:
        """Samples per micro-batch of one shard."""
        return self.shard_batch // self.accumulation


def even_bounds(total: int, *, num_parts: int, part: int) -> tuple[int, int]:
    """Where one of several contiguous parts lies, sizes within one of each other.

    Args:
        total: Items to split.
        num_parts: Number of parts.
        part: Which part, from 0.

    Returns:
        First index, and the index after the last.
    """
    return part * total // num_parts, (part + 1) * total // num_parts


def spread_positions(total: int, *, num_taken: int, offset: int = 0) -> Ids:
    """Evenly spaced positions: a systematic sample.

    Every interval of n of the ``total`` positions holds floor or ceil of n x ``num_taken`` / ``total`` of them.

    Args:
        total: Positions to choose from.
        num_taken: How many are taken, at most ``total``.
        offset: Shifts the sample; from 0 to ``total - 1``.

    Returns:
        ``num_taken`` rising positions.
    """
    return (np.arange(num_taken, dtype=np.int64) * total + offset) // max(num_taken, 1)


def eval_ids(num_samples: int, *, num_shards: int, shard: int, batch: int) -> tuple[Ids, ...]:
    """The evaluation batches of one shard; over all shards every sample comes exactly once.

    Args:
        num_samples: Samples of the evaluation set.
        num_shards: Size of the data axis.
        shard: Position on the data axis.
        batch: Samples per batch; the last one may be smaller.

    Returns:
        Sample ids per batch; empty if the shard has no sample. Shards differ by at most one sample.
    """
    first, end = even_bounds(num_samples, num_parts=num_shards, part=shard)
    return tuple(np.arange(start, min(start + batch, end), dtype=np.int64) for start in range(first, end, batch))

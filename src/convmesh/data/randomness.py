"""Random numbers as a pure function of seed, epoch and sample: the same on every rank, in every order, on any engine.

Legend: N samples, K numbers per sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_MASK = 2**64 - 1


def mixed_bits(numbers: npt.NDArray[Any], *, seed: Sequence[int]) -> Bits:
    """64 random bits for each number.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), used as a hash.

    Args:
        numbers: Whole numbers from 0, any shape.
        seed: Whole numbers from 0; another seed gives unrelated bits.

    Returns:
        uint64 of the shape of ``numbers``.
    """
    key = np.zeros(1, dtype=np.uint64)
    for word in seed:
        key = _mix(key ^ np.uint64(word & _MASK))
    return _mix(_mix(numbers.astype(np.uint64) ^ key) ^ key)


def sample_uniforms(ids_N: npt.NDArray[Any], *, num_each: int, seed: int, epoch: int) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) for samples of one epoch.

    Args:
        ids_N: Sample ids.
        num_each: Numbers K per sample.
        seed: Seed of the run.
        epoch: Epoch, from 0.

    Returns:
        Float64 of shape (N, K).
    """
    streams_K = mixed_bits(np.arange(num_each), seed=(seed, epoch))
    bits_NK = _mix(mixed_bits(ids_N, seed=(seed, epoch))[:, None] ^ streams_K[None, :])
    return (bits_NK >> np.uint64(11)) * 2.0**-53


def _mix(bits: Bits) -> Bits:
    bits = bits + _GOLDEN
    bits = (bits ^ (bits >> _SHIFTS[0])) * _MULTIPLIERS[0]
    bits = (bits ^ (bits >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return bits ^ (bits >> _SHIFTS[2])

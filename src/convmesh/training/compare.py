"""Comparing two ways of training a network: every tensor, the worst of each kind, and whether that is good enough.

The difference of two tensors is the norm of their difference over the norm of what is expected. What is allowed is the
tolerance of the data type, or ten times the difference between two one-device runs whose sums are ordered differently,
where that is larger: some tensors, like the gradient of a shift before a batch norm, are nothing but rounding.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from convmesh.engines.contract import Arrays, Observation

TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "float32": {"loss": 1e-5, "output": 1e-5, "gradient": 1e-4, "parameter": 1e-4, "buffer": 1e-4},
    "float64": dict.fromkeys(("loss", "output", "gradient", "parameter", "buffer"), 1e-9),
}
"""Data type and kind of tensor to the relative difference that is always allowed.

Loss and output are those of the first forward, gradients those of the first update; parameters and buffers are compared
after the last. Later losses and outputs are allowed what parameters are.
"""

_FLOOR_FACTOR = 10.0
_SMALLEST = 1e-6
"""Tensors smaller than this share of the largest of their kind are measured by that share."""


@dataclass(frozen=True)
class Worst:
    """The tensor of a kind that differs most, in proportion to what is allowed.

    Args:
        kind: ``"loss"``, ``"output"``, ``"gradient"``, ``"parameter"`` or ``"buffer"``.
        name: Its name.
        difference: Its relative difference.
        allowed: What is allowed for it.
        num_tensors: How many of the kind were compared.
        is_rounding: Whether more is allowed than the tolerance of the data type, since rounding alone differs so much.
    """

    kind: str
    name: str
    difference: float
    allowed: float
    num_tensors: int
    is_rounding: bool = False

    @property
    def passed(self) -> bool:
        """Whether it, and so all of its kind, is as near as is allowed."""
        return math.isfinite(self.difference) and self.difference <= self.allowed


def compare(
    got: Mapping[str, Arrays], expected: Mapping[str, Arrays], reordered: Mapping[str, Arrays] | None, *, dtype: str
) -> tuple[Worst, ...]:
    """Compares the tensors of two ways of training.

    Args:
        got: Kind to tensors by name, on ranks.
        expected: The same on one device.
        reordered: The same on one device with sums in another order, or None.
        dtype: ``"float32"`` or ``"float64"``.

    Returns:
        The worst tensor of each kind.
    """
    return tuple(
        _worst(kind, got[kind], expected[kind], (reordered or {}).get(kind, {}), dtype)
        for kind in TOLERANCES[dtype]
        if expected[kind]
    )


def by_kind(observation: Observation, outputs: Sequence[Arrays], *, losses: Sequence[float]) -> dict[str, Arrays]:
    """The tensors of an observation by kind.

    Args:
        observation: With whole gradients, parameters and buffers.
        outputs: Per update the outputs by name.
        losses: Per update the loss.

    Returns:
        Kind to tensors by name.
    """
    return {
        "loss": {f"update {index}": np.asarray(loss) for index, loss in enumerate(losses)},
        "output": {
            f"update {index}, {name}": array for index, arrays in enumerate(outputs) for name, array in arrays.items()
        },
        "gradient": dict(observation.gradients),
        "parameter": dict(observation.parameters),
        "buffer": dict(observation.buffers),
    }


def _worst(kind: str, got: Arrays, expected: Arrays, reordered: Arrays, dtype: str) -> Worst:
    missing = sorted(got.keys() ^ expected.keys())
    if missing:
        return Worst(kind, missing[0], float("inf"), 0.0, len(expected))
    smallest = _SMALLEST * max(float(np.linalg.norm(array.astype(np.float64))) for array in expected.values())
    found = []
    for name, array in expected.items():
        first = kind not in ("loss", "output") or name.startswith("update 0")
        tolerance = TOLERANCES[dtype][kind if first else "parameter"]
        rounding = _FLOOR_FACTOR * _difference(reordered[name], array, smallest) if name in reordered else 0.0
        found.append(
            Worst(
                kind,
                name,
                _difference(got[name], array, smallest),
                max(tolerance, rounding),
                len(expected),
                rounding > tolerance,
            )
        )
    return max(found, key=_share)


def _share(entry: Worst) -> float:
    return entry.difference / entry.allowed if math.isfinite(entry.difference) else math.inf


def _difference(got: np.ndarray, expected: np.ndarray, smallest: float) -> float:  # type: ignore[type-arg]
    if got.shape != expected.shape:
        return float("inf")
    exact = expected.astype(np.float64)
    difference = float(np.linalg.norm(got.astype(np.float64) - exact))
    if not np.isfinite(difference):
        return float("inf")
    return difference / max(float(np.linalg.norm(exact)), smallest, sys.float_info.min)

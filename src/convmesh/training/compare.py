"""Comparing two ways of training a network: every tensor, the worst of each kind, and whether that is good enough.

The difference of two tensors is the norm of their difference over the norm of what is expected. What is allowed is the
tolerance of the data type, or ten times what rounding alone changes where that is larger: the most that one-device runs
differ whose sums are ordered differently. But rounding excuses only so much: a difference above ``LARGEST_LIMITS`` is
never taken for agreement. Where rounding alone could explain it, the comparison proves nothing, and says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convmesh.engines.contract import Arrays, Observation

TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "float32": {"loss": 1e-5, "output": 1e-5, "gradient": 1e-4, "parameter": 1e-4, "change": 1e-3, "buffer": 1e-4},
    "float64": dict.fromkeys(("loss", "output", "gradient", "parameter", "change", "buffer"), 1e-9),
}
"""Data type and kind of tensor to the relative difference that is always allowed.

Loss and output are those of the first forward, gradients those of the first update; parameters and buffers are compared
after the last. Later losses and outputs are allowed what parameters are. The change of a parameter is what all updates
together made of it: small beside the parameter itself, where a wrong update would hide.
"""

LARGEST_LIMITS: Mapping[str, float] = {"float32": 1e-3, "float64": 1e-6}
"""Data type to the largest difference that rounding may excuse.

A gradient that is wrong by a hundredth on one of eight ranks is off by a thousandth.
"""
_LARGEST_CHANGE = 3.0
"""Changes are allowed so much more: their parameters are rounded in each update."""

_ROUNDING_FACTOR = 10.0
_SMALLEST = 1e-6
"""Tensors smaller than this share of the largest of their kind are measured by that share."""
_NOTHING_BUT_ROUNDING = 1e-3
"""Tensors that rounding alone changes wholly are no more than rounding below this share of the largest of their kind.

The gradient of a shift before a batch norm is one: exactly, it is 0.
"""


@dataclass(frozen=True)
class Worst:
    """The tensor of a kind that differs most, in proportion to what is allowed.

    Args:
        kind: ``"loss"``, ``"output"``, ``"gradient"``, ``"parameter"``, ``"change"`` (of a parameter) or ``"buffer"``.
        name: Its name.
        difference: Its relative difference.
        allowed: What is allowed for it.
        rounding: The largest relative difference of one-device runs, where that was measured.
        num_tensors: How many of the kind were compared.
        num_inconclusive: For how many of them nothing was proved.
    """

    kind: str
    name: str
    difference: float
    allowed: float
    rounding: float = 0.0
    num_tensors: int = 1
    num_inconclusive: int = 0

    @property
    def passed(self) -> bool:
        """Whether it is as near as is allowed."""
        return math.isfinite(self.difference) and self.difference <= self.allowed

    @property
    def inconclusive(self) -> bool:
        """Whether it is not, but by no more than rounding alone may change."""
        within = self.difference <= _ROUNDING_FACTOR * self.rounding
        return math.isfinite(self.difference) and within and not self.passed

    @property
    def verdict(self) -> str:
        """``"ok"``, ``"inconclusive"`` or ``"too large"``."""
        return "ok" if self.passed else "inconclusive" if self.inconclusive else "too large"


def compare(
    got: Mapping[str, Arrays],
    expected: Mapping[str, Arrays],
    others: Sequence[Mapping[str, Arrays]] = (),
    *,
    dtype: str,
    smallest: Mapping[str, float] | None = None,
) -> tuple[Worst, ...]:
    """Compares the tensors of two ways of training.

    Args:
        got: Kind to tensors by name, on ranks.
        expected: The same on one device.
        others: The same on one device with sums in other orders.
        dtype: ``"float32"`` or ``"float64"``.
        smallest: The least by which the change of a parameter is measured, by its name.

    Returns:
        The worst tensor of each kind: one that is too far off, else one that proves nothing, else one that passed.
    """
    return tuple(
        _worst(
            kind,
            got[kind],
            expected[kind],
            [other[kind] for other in others],
            dtype=dtype,
            smallest=smallest if kind == "change" and smallest is not None else {},
        )
        for kind in TOLERANCES[dtype]
        if expected.get(kind)
    )


def by_kind(
    observation: Observation, outputs: Sequence[Arrays], *, losses: Sequence[float], start: Arrays
) -> dict[str, Arrays]:
    """The tensors of an observation by kind.

    Args:
        observation: With whole gradients, parameters and buffers.
        outputs: Per update the outputs by name.
        losses: Per update the loss.
        start: Parameters before the first update.

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
        "change": {
            name: array.astype(np.float64) - start[name]
            for name, array in observation.parameters.items()
            if name in start and start[name].shape == array.shape
        },
        "buffer": dict(observation.buffers),
    }


def smallest_changes(start: Arrays, *, dtype: str) -> dict[str, float]:
    """Below which norm the change of a parameter is lost in the rounding of the parameter itself.

    Args:
        start: Parameters before the first update.
        dtype: ``"float32"`` or ``"float64"``.

    Returns:
        By name: a change of this norm is known to the tolerance of its kind, a smaller one is not.
    """
    unit = float(np.finfo(dtype).eps) / TOLERANCES[dtype]["change"]
    return {name: unit * _norm(array) for name, array in start.items()}


def _worst(
    kind: str,
    got: Arrays,
    expected: Arrays,
    others: Sequence[Arrays],
    *,
    dtype: str,
    smallest: Mapping[str, float],
) -> Worst:
    missing = sorted(got.keys() ^ expected.keys())
    if missing:
        return Worst(kind, missing[0], float("inf"), 0.0, num_tensors=len(expected))
    largest = max(_norm(array) for array in expected.values())
    found = []
    for name, array in expected.items():
        norm = _norm(array)
        scale = max(norm, _SMALLEST * largest, smallest.get(name, 0.0), sys.float_info.min)
        rounding = max((_distance(other[name], array) / scale for other in others if name in other), default=0.0)
        hides = _ROUNDING_FACTOR * rounding * scale >= norm and norm <= _NOTHING_BUT_ROUNDING * largest
        limit = _limit(kind, name, rounding, dtype=dtype, is_capped=not hides)
        found.append(Worst(kind, name, _distance(got[name], array) / scale, limit, rounding))
    num_inconclusive = sum(entry.inconclusive for entry in found)
    return replace(max(found, key=_badness), num_tensors=len(expected), num_inconclusive=num_inconclusive)


def _limit(kind: str, name: str, rounding: float, *, dtype: str, is_capped: bool) -> float:
    is_first = kind not in ("loss", "output") or name.startswith("update 0")
    tolerance = TOLERANCES[dtype][kind if is_first else "parameter"]
    largest = LARGEST_LIMITS[dtype] * (_LARGEST_CHANGE if kind == "change" else 1.0)
    excused = _ROUNDING_FACTOR * rounding
    return max(tolerance, min(excused, largest) if is_capped else excused)


def _badness(entry: Worst) -> tuple[int, float]:
    share = entry.difference / entry.allowed if math.isfinite(entry.difference) else math.inf
    return (0 if entry.passed else 1 if entry.inconclusive else 2), share


def _norm(array: np.ndarray) -> float:  # type: ignore[type-arg]
    return float(np.linalg.norm(array.astype(np.float64)))


def _distance(got: np.ndarray, expected: np.ndarray) -> float:  # type: ignore[type-arg]
    if got.shape != expected.shape:
        return float("inf")
    distance = float(np.linalg.norm(got.astype(np.float64) - expected.astype(np.float64)))
    return distance if np.isfinite(distance) else float("inf")

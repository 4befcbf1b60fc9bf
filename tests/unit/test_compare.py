"""What is near enough: by data type, by rounding, and never another shape or a missing tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convmesh.training.compare import TOLERANCES, compare


def tensors(**changes: Any) -> dict[str, dict[str, Any]]:
    """A set of each kind in which some parameters are changed."""
    kinds: dict[str, dict[str, Any]] = {kind: {"update 0": np.ones(4)} for kind in TOLERANCES["float32"]}
    kinds["parameter"] = {"large": np.ones(100), "zero": np.zeros(4), **changes}
    return kinds


@pytest.mark.parametrize(("dtype", "off", "passed"), [
    ("float32", 5e-5, True), ("float32", 2e-4, False), ("float64", 5e-10, True), ("float64", 2e-9, False),
])  # fmt: skip
def test_the_tolerance_is_that_of_the_data_type(dtype: str, off: float, passed: bool) -> None:
    found = {entry.kind: entry for entry in compare(tensors(large=np.full(100, 1 + off)), tensors(), None, dtype=dtype)}
    assert found["parameter"].passed is passed
    assert (found["parameter"].name, found["parameter"].num_tensors) == ("large", 2)
    assert found["parameter"].difference == pytest.approx(off, rel=1e-6)
    assert all(entry.passed for kind, entry in found.items() if kind != "parameter")


def test_what_rounding_alone_changes_is_allowed_ten_times() -> None:
    def worst(off: float) -> Any:
        got, reordered = tensors(large=np.full(100, 1 + off)), tensors(large=np.full(100, 1 + 1e-3))
        return next(e for e in compare(got, tensors(), reordered, dtype="float32") if e.kind == "parameter")

    assert worst(9e-3).passed
    assert worst(9e-3).is_rounding
    assert not worst(1.1e-2).passed


def test_a_tensor_of_nothing_but_rounding_is_measured_by_the_largest() -> None:
    found = compare(tensors(zero=np.full(4, 1e-12)), tensors(), None, dtype="float32")
    assert all(entry.passed for entry in found)


@pytest.mark.parametrize("value", [np.ones(99), np.full(100, np.nan), np.full(100, np.inf)])
def test_another_shape_or_what_is_not_finite_never_passes(value: Any) -> None:
    found = compare(tensors(large=value), tensors(), tensors(large=value), dtype="float32")
    assert not all(entry.passed for entry in found)


def test_a_missing_tensor_never_passes() -> None:
    got = tensors()
    del got["parameter"]["zero"]
    (worst,) = [entry for entry in compare(got, tensors(), None, dtype="float32") if not entry.passed]
    assert (worst.kind, worst.name) == ("parameter", "zero")

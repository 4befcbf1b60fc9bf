"""What is near enough: by data type, by rounding, and never another shape or a missing tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convmesh.engines.observing import jittered
from convmesh.training.compare import TOLERANCES, Worst, compare, smallest_changes


def tensors(**changes: Any) -> dict[str, dict[str, Any]]:
    """A set of each kind in which some parameters are changed."""
    kinds: dict[str, dict[str, Any]] = {kind: {"update 0": np.ones(4)} for kind in TOLERANCES["float32"]}
    kinds["parameter"] = {"large": np.ones(100), "zero": np.zeros(4), **changes}
    return kinds


def worst_parameter(off: float, rounding: float, **others: Any) -> Worst:
    """The worst parameter where all elements of one are off, and where rounding alone changes them by so much."""
    got, other = tensors(large=np.full(100, 1 + off)), tensors(large=np.full(100, 1 + rounding))
    found = compare(got, tensors(), [tensors(), other], dtype="float32", **others)
    return next(entry for entry in found if entry.kind == "parameter")


@pytest.mark.parametrize(("dtype", "off", "passed"), [
    ("float32", 5e-5, True), ("float32", 2e-4, False), ("float64", 5e-10, True), ("float64", 2e-9, False),
])  # fmt: skip
def test_the_tolerance_is_that_of_the_data_type(dtype: str, off: float, passed: bool) -> None:
    found = {entry.kind: entry for entry in compare(tensors(large=np.full(100, 1 + off)), tensors(), dtype=dtype)}
    assert found["parameter"].passed is passed
    assert (found["parameter"].name, found["parameter"].num_tensors) == ("large", 2)
    assert found["parameter"].difference == pytest.approx(off, rel=1e-6)
    assert all(entry.passed for kind, entry in found.items() if kind != "parameter")


def test_what_rounding_alone_changes_is_allowed_ten_times() -> None:
    assert worst_parameter(4e-4, 5e-5).verdict == "ok"
    assert worst_parameter(6e-4, 5e-5).verdict == "too large"


def test_rounding_excuses_no_difference_that_a_mistake_would_make() -> None:
    assert worst_parameter(9e-4, 1e-3).verdict == "ok"
    found = worst_parameter(2e-3, 1e-3)
    assert (found.verdict, found.passed, found.num_inconclusive) == ("inconclusive", False, 1)
    assert worst_parameter(2e-2, 1e-3).verdict == "too large"


def test_a_wrong_tensor_counts_more_than_an_inconclusive_one() -> None:
    got = tensors(large=np.full(100, 1 + 9e-2), small=np.full(4, 1 + 2e-3))
    expected, other = tensors(small=np.ones(4)), tensors(large=np.full(100, 1 + 1e-2), small=np.ones(4))
    found = next(e for e in compare(got, expected, [other], dtype="float32") if e.kind == "parameter")
    assert (found.name, found.verdict, found.num_inconclusive) == ("small", "too large", 1)


def test_a_tensor_of_nothing_but_rounding_may_be_any_rounding() -> None:
    noise = np.array([1.0, -2.0, 1.0, 0.5]) * 1e-6
    found = compare(tensors(zero=noise[::-1]), tensors(zero=noise), [tensors(zero=-noise)], dtype="float32")
    assert all(entry.passed for entry in found)
    found = compare(tensors(zero=1e3 * noise), tensors(zero=noise), [tensors(zero=-noise)], dtype="float32")
    assert [entry.verdict for entry in found if not entry.passed] == ["too large"]
    found = compare(tensors(zero=np.full(4, 1e-12)), tensors(), dtype="float32")
    assert all(entry.passed for entry in found)


def test_a_change_is_measured_by_itself_unless_rounding_hides_it() -> None:
    start = {"weight": np.full(100, 10.0, np.float32)}
    smallest = smallest_changes(start, dtype="float32")
    for change, verdict in ((1.0, "too large"), (1e-5, "ok")):
        got, expected = tensors(), tensors()
        got["change"], expected["change"] = {"weight": np.full(100, 1.01 * change)}, {"weight": np.full(100, change)}
        found = compare(got, expected, dtype="float32", smallest=smallest)
        assert next(entry for entry in found if entry.kind == "change").verdict == verdict


@pytest.mark.parametrize("value", [np.ones(99), np.full(100, np.nan), np.full(100, np.inf)])
def test_another_shape_or_what_is_not_finite_never_passes(value: Any) -> None:
    for others in ([], [tensors(large=value)]):
        found = compare(tensors(large=value), tensors(), others, dtype="float32")
        assert [entry.verdict for entry in found if not entry.passed] == ["too large"]


def test_a_missing_tensor_never_passes() -> None:
    got = tensors()
    del got["parameter"]["zero"]
    (worst,) = [entry for entry in compare(got, tensors(), dtype="float32") if not entry.passed]
    assert (worst.kind, worst.name, worst.verdict) == ("parameter", "zero", "too large")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_jitter_changes_last_bits_only(dtype: type) -> None:
    arrays = {"w": np.random.default_rng(0).standard_normal(1000).astype(dtype), "n": np.arange(3)}
    changed = jittered(arrays, seed=1)
    apart = np.abs(changed["w"] - arrays["w"])
    assert changed["w"].dtype == dtype
    assert 0.1 < np.mean(apart > 0) < 0.5
    assert np.all(apart <= np.spacing(np.abs(arrays["w"])))
    np.testing.assert_array_equal(changed["n"], arrays["n"])
    np.testing.assert_array_equal(jittered(arrays, seed=1)["w"], changed["w"])

"""Geometry of charts, class balance and its picture."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from convmesh.errors import DataError
from convmesh.report.balance import balance_grid, deviations, worst_classes
from convmesh.report.charts import HEIGHT, WIDTH, Series, column_chart, line_chart, smooth, thin
from convmesh.report.figures import StepTimes, slow_rank_sentence
from convmesh.report.plots import save_class_balance
from convmesh.report.profile_text import texts
from convmesh.report.scales import fit_scale, format_number, log_ticks, nice_ticks

WORDS = texts("en", "report")
numbers = st.floats(min_value=-1e9, max_value=1e9)
anything = st.floats(allow_nan=True, allow_infinity=True)


@given(low=numbers, span=st.floats(min_value=1e-3, max_value=1e9), count=st.integers(1, 12))
def test_ticks_are_round_inside_and_not_too_many(low: float, span: float, count: int) -> None:
    ticks = nice_ticks(low, low + span, count)
    assert 1 <= len(ticks) <= count + 2
    if len(ticks) > 1:
        steps = np.diff(ticks)
        assert steps.min() > 0
        mantissa = steps[0] / 10.0 ** math.floor(math.log10(steps[0]) + 1e-9)
        assert min(abs(mantissa - good) for good in (1, 2, 5, 10)) < 1e-3 + 1e-6 * abs(low) / span
        assert ticks[0] >= low - 1e-6 * span
        assert ticks[-1] <= low + span + 1e-6 * span


def test_log_ticks_are_powers() -> None:
    assert log_ticks(2**18, 2**24, 4, 2) == [2**18, 2**20, 2**22, 2**24]
    assert log_ticks(3, 5, 4, 10) == []


@given(st.lists(anything, max_size=30))
def test_every_value_has_a_place_on_the_scale(values: list[float]) -> None:
    for log_base in (None, 0, 2, 10):
        scale = fit_scale(values, start=246, end=14, log_base=log_base)
        assert all(14 <= scale.position(value) <= 246 for value in values if math.isfinite(value))
        assert scale.ticks(5)


def test_a_diverging_loss_gets_a_logarithmic_axis() -> None:
    assert fit_scale([2.0, 1e6], start=0, end=1).log_base == 10
    assert fit_scale([2.0, 1.0], start=0, end=1).log_base == 0
    assert fit_scale([0.0, 1e6], start=0, end=1).log_base == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0125, "0.0125"), (1.23456, "1.235"), (12_400, "12,400"), (2.0**24, "2^24"), (3.2e-7, "3.2e-07"),
     (704.21, "704.2"), (-0.5, "-0.5"), (math.nan, "not a number"), (math.inf, "infinite")],
)  # fmt: skip
def test_numbers_for_people(value: float, text: str) -> None:
    assert format_number(value) == text


@given(st.lists(anything, min_size=1, max_size=50))
def test_a_line_chart_draws_only_finite_points_inside(values: list[float]) -> None:
    chart = line_chart("loss", [Series("loss", [(float(x), y) for x, y in enumerate(values, start=1)])])
    assert chart is not None
    assert "nan" not in chart.lines[0].path
    assert "inf" not in chart.lines[0].path
    assert len(chart.hover) == sum(map(math.isfinite, values))
    assert len(chart.not_finite) == len({x for x, y in enumerate(values) if not math.isfinite(y)})
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y, _ in chart.hover)


def test_a_gap_splits_a_line_and_a_lone_point_is_a_dot() -> None:
    points = [(1.0, 1.0), (2.0, 2.0), (3.0, math.nan), (4.0, 1.5), (5.0, math.nan)]
    chart = line_chart("loss", [Series("loss", points)])
    assert chart is not None
    assert chart.lines[0].path.count("M") == 2
    assert len(chart.lines[0].dots) == 1


def test_charts_without_points_are_left_out() -> None:
    assert line_chart("loss", [Series("loss", [])]) is None
    assert column_chart("time", [], legend=["a"], texts=[]) is None
    assert column_chart("time", [[0.0]], legend=["a"], texts=["x"]) is None


@given(st.lists(anything, min_size=1, max_size=40), st.integers(101, 3000))
def test_thinning_keeps_ends_extremes_and_gaps(pattern: list[float], length: int) -> None:
    values = [pattern[index * index % len(pattern)] for index in range(length)]
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = thin(points, 100)
    assert len(kept) <= 160
    finite = [y for y in values if math.isfinite(y)]
    left = [y for _, y in kept if math.isfinite(y)]
    if finite:
        assert (min(left), max(left)) == (min(finite), max(finite))
    assert any(not math.isfinite(y) for y in values) == any(not math.isfinite(y) for _, y in kept)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})


def test_smoothing_keeps_a_constant_and_leaves_out_gaps() -> None:
    points = [(float(x), 3.0 if x % 5 else math.nan) for x in range(50)]
    assert [y for _, y in smooth(points)] == pytest.approx([3.0] * 40)
    assert smooth(points[:5]) == []


def test_a_chart_may_begin_at_its_first_point() -> None:
    points = [(40.0, 1.0), (60.0, 2.0)]
    whole, part = (line_chart("time", [Series("a", points)], from_first=first) for first in (False, True))
    assert whole is not None
    assert part is not None
    assert (whole.x_ticks[0][1], part.x_ticks[0][1]) == ("0", "40")
    assert part.x_ticks[0][0] == whole.x_ticks[0][0]


def test_many_columns_stand_without_gaps() -> None:
    few, many = (column_chart("c", [[1.0]] * n, legend=["x"], texts=["t"] * n) for n in (8, 256))
    assert few is not None
    assert many is not None
    assert few.columns[0].x + few.columns[0].width < few.columns[1].x
    assert many.columns[0].x + many.columns[0].width >= many.columns[1].x


def test_stacked_columns_add_up() -> None:
    chart = column_chart("time", [[80.0, 10.0], [80.0, math.nan]], legend=["work", "wait"], texts=["a", "b"])
    assert chart is not None
    (work, wait), (_, nothing) = (column.parts for column in chart.columns)
    assert wait[0] + wait[1] == pytest.approx(work[0], abs=0.11)
    assert work[1] == pytest.approx(8 * wait[1], rel=0.02)
    assert nothing[1] == 0


def test_only_waiting_for_data_names_a_rank() -> None:
    assert "Rank 1 waits longest" in slow_rank_sentence([StepTimes(0.1, 0.0, 0.0), StepTimes(0.08, 0.0, 0.02)], WORDS)
    assert "No rank stands out" in slow_rank_sentence([StepTimes(0.1, 0.0, 0.001), StepTimes(0.2, 0.0, 0.001)], WORDS)
    assert "Rank 0 works longest" in slow_rank_sentence([StepTimes(0.1, 0.01, 0.0), StepTimes(0.05, 0.06, 0.0)], WORDS)
    assert slow_rank_sentence([StepTimes(0.1, 0.0, 0.5)], WORDS) == ""


@given(st.integers(1, 70), st.integers(1, 150), st.integers(0, 2**31))
def test_grouped_cells_show_the_worst_of_what_they_hold(num_ranks: int, num_classes: int, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 50, size=(num_ranks, num_classes))
    grid = balance_grid(counts, [f"c{index}" for index in range(num_classes)])
    assert grid.deviation_RC.shape == (min(num_ranks, 32), min(num_classes, 60))
    assert len(grid.row_labels), len(grid.column_labels) == grid.deviation_RC.shape
    assert np.abs(grid.deviation_RC).max() == pytest.approx(np.abs(deviations(counts)).max())


def test_deviations_are_from_the_proportional_share() -> None:
    np.testing.assert_allclose(deviations([[3, 5], [5, 3]]), [[-1, 1], [1, -1]])
    np.testing.assert_allclose(deviations([[2, 4], [1, 2]]), 0, atol=1e-12)
    assert worst_classes([[3, 50], [5, 30]], ["cat", "dog"])[0] == ("dog", 0, 50, pytest.approx(53 * 80 / 88))
    assert worst_classes([[3, 4], [3, 4]], ["cat", "dog"]) == []


@pytest.mark.parametrize(("num_ranks", "num_classes"), [(1, 1), (2, 10), (64, 1000)])
def test_the_picture_has_a_size_that_can_be_read(tmp_path: Path, num_ranks: int, num_classes: int) -> None:
    counts = np.random.default_rng(0).integers(0, 50, size=(num_ranks, num_classes))
    path = save_class_balance(
        counts, [f"${index}_{{" for index in range(num_classes)], tmp_path / "new" / "balance.png"
    )
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert 700 <= picture.width <= 2000
        assert 300 <= picture.height <= 1600
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24) or ()) > 20


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ranks and classes"):
        save_class_balance(np.zeros((0, 3)), ["a", "b", "c"], tmp_path / "x.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="can't be written"):
        save_class_balance([[1, 2]], ["a", "b"], tmp_path / "file" / "x.png")

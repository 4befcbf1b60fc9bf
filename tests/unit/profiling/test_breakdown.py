"""Where time goes: exact on events with known answers."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.contenders.generated_profile import Recipe, generate
from hypothesis import given
from hypothesis import strategies as st

from convmesh.errors import ProfileError
from convmesh.profiling.breakdown import break_down
from convmesh.profiling.events import KINDS, EventBuilder, RankEvents, Trace
from convmesh.profiling.intervals import Cover
from convmesh.profiling.steps import spread_of, steady_steps
from convmesh.profiling.tables import layer_table

END = 30
STRETCHES = st.lists(st.tuples(st.integers(0, END), st.integers(0, 8)), max_size=12)


def _cells(stretches: list[tuple[int, int]]) -> set[int]:
    return {cell for start, length in stretches for cell in range(start, start + length)}


@given(STRETCHES, st.lists(st.integers(0, END + 10), min_size=1, max_size=5))
def test_a_cover_counts_each_moment_once(stretches: list[tuple[int, int]], moments: list[int]) -> None:
    start_E = np.array([start for start, _ in stretches], float)
    cover = Cover(start_E, start_E + np.array([length for _, length in stretches], float))

    found = cover.before(np.array(moments, float))

    cells = _cells(stretches)
    assert found.tolist() == [sum(cell < moment for cell in cells) for moment in moments]


@given(st.dictionaries(st.sampled_from(KINDS), STRETCHES), st.sampled_from([(0, 10, 10, 40), (3, 9, 12, 20)]))
def test_parts_of_a_step_are_exact_and_add_up(
    stretches: dict[str, list[tuple[int, int]]], bounds: tuple[int, int, int, int]
) -> None:
    builder = EventBuilder(0)
    for kind, some in stretches.items():
        for start, length in some:
            builder.add(kind, kind, start=start, end=start + length)  # type: ignore[arg-type]
    builder.add_step(0, start=bounds[0], end=bounds[1])
    builder.add_step(1, start=bounds[2], end=bounds[3])

    parts = break_down(Trace(ranks=(builder.build(),), source=""))

    busy = {kind: _cells(stretches.get(kind, [])) for kind in KINDS}
    computing = busy["compute"] | busy["optimizer"]
    for step, inside in enumerate((set(range(*bounds[:2])), set(range(*bounds[2:])))):
        assert parts.compute_RS[0, step] == len(computing & inside)
        assert parts.optimizer_RS[0, step] == len(busy["optimizer"] & inside)
        assert parts.exposed_RS[0, step] == len((busy["communication"] - computing) & inside)
        assert parts.hidden_RS[0, step] == len(busy["communication"] & computing & inside)
        assert parts.data_RS[0, step] == len((busy["data"] - computing - busy["communication"]) & inside)
    whole = parts.compute_RS + parts.exposed_RS + parts.data_RS + parts.idle_RS
    assert whole.tolist() == parts.step_RS.tolist()


def test_exposed_communication_is_told_apart_by_axis() -> None:
    builder = EventBuilder(0)
    builder.add("compute", "layer", start=0, end=4)
    builder.add("communication", "sum", start=3, end=6, axis="channel")
    builder.add("communication", "sum", start=5, end=9, axis="data")
    builder.add("communication", "sum", start=9, end=10)
    builder.add_step(0, start=0, end=12)

    parts = break_down(Trace(ranks=(builder.build(),), source=""))

    assert parts.axes == ("", "channel", "data")
    assert parts.exposed_ARS[:, 0, 0].tolist() == [1, 2, 3]
    assert parts.exposed_ARS.sum() == parts.exposed_RS.sum()
    assert parts.communication_share == 6 / 12


def test_a_generated_run_gives_back_its_recipe() -> None:
    recipe = Recipe(mesh={"data": 2, "channel": 2}, num_layers=3, compute=0.3, data=0.02, transfer=0.01, update=0.05)

    parts = break_down(generate(recipe))

    assert parts.compute_RS == pytest.approx(np.full((4, 8), 0.35))
    assert parts.data_RS == pytest.approx(np.full((4, 8), 0.02))
    assert parts.exposed_ARS == pytest.approx(np.full((2, 4, 8), 0.03))
    assert parts.idle_RS == pytest.approx(np.zeros((4, 8)), abs=1e-9)


def test_a_layer_table_is_per_rank_and_step() -> None:
    rows = {(row.name, row.kind): row for row in layer_table(generate(Recipe(num_layers=2)), np.arange(4))}

    assert rows["layer0", "compute"].seconds == pytest.approx(0.2)
    assert rows["layer0", "communication"].seconds == pytest.approx(0.01)
    assert rows["layer0", "communication"].num_bytes == 4_000_000
    assert rows["layer0", "communication"].num_events == 1
    assert rows["update", "optimizer"].seconds == pytest.approx(0.03)


def test_only_steps_of_all_ranks_are_counted() -> None:
    parts = break_down(Trace(ranks=(_with_steps(0, [1, 2, 3]), _with_steps(1, [2, 3, 4])), source=""))

    assert parts.step_S.tolist() == [2, 3]
    with pytest.raises(ProfileError, match="no step in common"):
        break_down(Trace(ranks=(_with_steps(0, [1]), _with_steps(1, [2])), source=""))


def test_first_slow_steps_are_set_apart() -> None:
    step_RS = np.array([[9.0, 4.0, 1.0, 1.1, 1.0, 1.0, 5.0]])

    assert steady_steps(step_RS).tolist() == [False, False, True, True, True, True, True]
    assert steady_steps(np.array([[3.0, 3.0, 3.0, 1.0]])).all()


def test_spread_tells_drift_and_difference_between_ranks() -> None:
    step_RS = np.array([[1.0, 1.0, 1.0, 1.0, 2.0, 2.0], [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]])

    spread = spread_of(step_RS)

    assert spread.drift == pytest.approx(1.0)
    assert spread.between_ranks == pytest.approx(0.5)
    assert spread.median_seconds == 1.0


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("end_E", [-1.0], "ends before it starts"),
        ("start_E", [np.nan], "has no time"),
        ("name_E", [7], "names a text"),
        ("kind_E", [9], "unknown kind"),
        ("kind_E", [0, 0], "differ in length"),
    ],
)
def test_events_that_contradict_themselves_are_refused(column: str, values: list[float], says: str) -> None:
    builder = EventBuilder(3)
    builder.add("compute", "layer", start=0, end=1)
    events = builder.build()

    with pytest.raises(ProfileError, match=says) as error:
        events.replaced(**{column: np.array(values, getattr(events, column).dtype)})
    assert "rank 3" in str(error.value)


def _with_steps(rank: int, numbers: list[int]) -> RankEvents:
    builder = EventBuilder(rank)
    for number in numbers:
        builder.add_step(number, start=number, end=number + 1)
    return builder.build()

"""Many small collectives are told from few large ones, and what of their time is for being many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convmesh.profiling.analysis import Analysis, analyse
from convmesh.profiling.events import EventBuilder, RankEvents, Trace
from convmesh.profiling.traffic import fixed_seconds
from convmesh.report.profile_facts import findings
from convmesh.report.profile_text import texts

FIXED, RATE = 1e-3, 1e9


def _rank(rank: int, sizes: list[int], *, compute: float, overlapped: bool, queued: bool) -> RankEvents:
    """Steps of computing, and then collectives one after the other, sent off as they come or all at once."""
    builder, time = EventBuilder(rank), 0.0
    for step in range(6):
        begun = time
        builder.add("compute", "backward", start=time, end=time + compute, lane="main")
        time, sent = time + (0.0 if overlapped else compute), time + (0.0 if overlapped else compute)
        for size in sizes:
            end = time + FIXED + size / RATE
            builder.add(
                "communication", "all-reduce gradients", start=sent if queued else time, end=end, axis="data",
                lane="buckets", num_bytes=size,
            )  # fmt: skip
            time = end
        time = max(time, begun + compute)
        builder.add_step(step, start=begun, end=time)
    return builder.build()


def _analysis(sizes: list[int], *, compute: float = 0.01, overlapped: bool = False, queued: bool = False) -> Analysis:
    ranks = tuple(_rank(rank, sizes, compute=compute, overlapped=overlapped, queued=queued) for rank in range(2))
    return analyse(Trace(ranks=ranks, source="", mesh={"data": 2}), one_clock=True)


@pytest.mark.parametrize("queued", [False, True])
def test_tiny_buckets_are_named_with_their_number_size_and_fixed_cost(queued: bool) -> None:
    sizes = [100, 400, 1_000, 4_000, 20_000, 50_000]

    (row,) = _analysis(sizes, queued=queued).traffic

    assert (row.axis, row.num_ranks, row.num_per_step) == ("data", 2, 6)
    assert (row.median_bytes, row.bytes_per_step) == (2_500, sum(sizes))
    assert row.busy_seconds == pytest.approx(6 * FIXED + sum(sizes) / RATE)
    assert row.fixed_seconds == pytest.approx(FIXED)
    assert row.latency_share == pytest.approx(6 * FIXED / row.busy_seconds)
    assert row.is_latency_bound


def test_large_buckets_few_buckets_and_hidden_ones_are_not() -> None:
    large = _analysis([10**6, 5 * 10**6, 10**7, 2 * 10**7]).traffic[0]
    few = _analysis([100, 4_000]).traffic[0]
    hidden = _analysis([100, 400, 1_000, 4_000], compute=0.1, overlapped=True).traffic[0]

    assert large.latency_share < 0.2
    assert few.latency_share > 0.9
    assert hidden.exposed_share == pytest.approx(0, abs=1e-9)
    assert not any(row.is_latency_bound for row in (large, few, hidden))


def test_sizes_that_are_alike_tell_nothing() -> None:
    (row,) = _analysis([1_000] * 8).traffic

    assert row.fixed_seconds is None
    assert not row.is_latency_bound


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_report_says_so(language: str) -> None:
    words = texts(language)
    tiny, large = (findings(_analysis(sizes), words) for sizes in ([100, 400, 1_000, 4_000, 20_000], [10**7] * 2))

    said = [sentence for sentence in tiny if all(part in sentence for part in (" data", "1000 B", "99 %", " 1 ms"))]
    assert len(said) == 1, tiny
    assert not any(sentence.startswith(words["latency"][:4]) for sentence in large)


@given(
    st.floats(1e-6, 1e-2),
    st.floats(1e7, 1e11),
    st.lists(st.integers(1, 10**8), min_size=2, max_size=30, unique=True),
)
def test_a_straight_line_gives_its_own_fixed_part(fixed: float, rate: float, sizes: list[int]) -> None:
    bytes_C = np.array(sizes, float)
    found = fixed_seconds(bytes_C, fixed + bytes_C / rate)

    if bytes_C.max() < 4 * bytes_C.min():
        assert found is None
    else:
        assert found == pytest.approx(fixed, rel=1e-3, abs=1e-6 * bytes_C.max() / rate)


def test_the_fixed_part_is_never_below_zero_nor_above_the_mean() -> None:
    sizes = np.array([1.0, 10.0, 100.0])
    assert fixed_seconds(sizes, np.array([1.0, 10.0, 110.0])) == 0.0
    falling = fixed_seconds(sizes, np.array([3.0, 2.0, 1.0]))
    assert falling is not None
    assert 1.0 <= falling <= 2.0
    assert fixed_seconds(sizes, np.array([0.0, 1.0, 2.0])) is None

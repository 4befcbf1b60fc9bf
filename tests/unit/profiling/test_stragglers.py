"""Slow ranks are named by what they do on their own, whoever waits for them."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.contenders.generated_profile import Recipe, generate

from convmesh.profiling.analysis import Analysis, analyse
from convmesh.profiling.events import EventBuilder, Trace
from convmesh.profiling.matching import align, match


def _named(analysis: Analysis) -> list[tuple[tuple[int, ...], str]]:
    return [(straggler.ranks, straggler.phase) for straggler in analysis.stragglers]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_rank_that_computes_longer_is_named_and_its_excess_told(num_ranks: int) -> None:
    analysis = analyse(generate(Recipe(mesh={"data": num_ranks}, extra_compute={1: 0.2}, jitter=0.01)))

    assert _named(analysis) == [((1,), "compute")]
    assert analysis.stragglers[0].excess_seconds == pytest.approx(0.2, abs=0.03)
    assert analysis.steady.step_RS[0] == pytest.approx(analysis.steady.step_RS[1])
    waiting = analysis.waiting_RS.mean(axis=1)
    assert waiting[1] == pytest.approx(0, abs=0.02)
    assert waiting[0] == pytest.approx(0.2, abs=0.03)


def test_a_rank_that_waits_for_data_is_named_with_that_phase() -> None:
    analysis = analyse(generate(Recipe(mesh={"data": 4}, extra_data={2: 0.1}, jitter=0.01)))

    assert _named(analysis) == [((2,), "data")]


def test_ranks_that_are_alike_are_not_named() -> None:
    assert _named(analyse(generate(Recipe(mesh={"data": 4}, jitter=0.05, num_steps=40)))) == []
    assert _named(analyse(generate(Recipe(mesh={"data": 1})))) == []


def test_a_rank_that_is_slow_now_and_then_is_named_with_how_often() -> None:
    recipe = Recipe(mesh={"data": 4}, extra_compute={3: 0.8}, slow_every=5, num_steps=40, jitter=0.01)

    analysis = analyse(generate(recipe))

    assert _named(analysis) == [((3,), "compute")]
    assert analysis.stragglers[0].share_of_steps == pytest.approx(0.2, abs=0.03)
    assert analysis.stragglers[0].excess_seconds == pytest.approx(0.8, abs=0.05)


def test_a_larger_shard_is_the_cause_where_a_sample_takes_no_longer() -> None:
    samples = {0: 10, 1: 15}
    larger = Recipe(mesh={"data": 2}, extra_compute={1: 0.215}, num_samples=samples)
    slower = Recipe(mesh={"data": 2}, extra_compute={1: 0.215}, num_samples={0: 10, 1: 10})

    assert "15 samples" in analyse(generate(larger)).stragglers[0].cause
    assert analyse(generate(slower)).stragglers[0].cause == ""


def test_samples_that_cost_more_are_told_from_a_rank_that_is_slow_alike_in_each_step() -> None:
    samples = {0: 8, 1: 8, 2: 8}
    uneven = Recipe(mesh={"data": 3}, extra_compute={1: 0.6}, slow_every=2, num_samples=samples, num_steps=24)
    alike = Recipe(mesh={"data": 3}, extra_compute={1: 0.3}, num_samples=samples, num_steps=24, jitter=0.005)

    (costly,), (slow,) = (analyse(generate(recipe)).stragglers for recipe in (uneven, alike))

    assert (costly.ranks, costly.phase) == (slow.ranks, slow.phase) == ((1,), "compute")
    assert "its samples cost more" in costly.cause
    assert slow.cause == ""


def test_a_rank_that_idles_where_its_waiting_was_not_recorded_is_not_called_slow() -> None:
    ranks = []
    for rank, busy in enumerate((0.5, 0.9)):
        builder = EventBuilder(rank)
        for step in range(6):
            builder.add("compute", "layer", start=step, end=step + busy)
            builder.add_step(step, start=step, end=step + 1)
        ranks.append(builder.build())

    assert _named(analyse(Trace(ranks=tuple(ranks), source=""))) == [((1,), "compute")]


def test_a_group_whose_link_is_slow_is_named() -> None:
    trace = _two_groups(transfer=[0.01, 0.2])

    (straggler,) = analyse(trace, one_clock=True).stragglers

    assert (straggler.ranks, straggler.phase) == ((2, 3), "communication")
    assert straggler.excess_seconds == pytest.approx(0.19)


def test_collectives_are_matched_by_order_and_steps_with_other_numbers_counted() -> None:
    trace = generate(Recipe(mesh={"data": 2}, num_layers=2, num_steps=3, extra_compute={1: 0.2}))
    events = trace.ranks[1]
    last = np.flatnonzero(events.of_kind("communication"))[-1]
    keep_E = np.arange(events.num_events) != last
    cut = Trace(ranks=(trace.ranks[0], events.kept(keep_E)), source="", mesh=trace.mesh)

    (whole,), (part,) = match(trace), match(cut)

    assert len(whole.step_C) == 6
    assert whole.transfer_seconds == pytest.approx(np.full(6, 0.01))
    assert whole.waiting_seconds[0] == pytest.approx(np.full(6, 0.1))
    assert part.step_C.tolist() == [0, 0, 1, 1]
    assert part.num_unmatched_steps == 1


def test_collectives_in_a_queue_are_neither_slow_nor_waited_for() -> None:
    # Both ranks hand over two buckets while they compute; rank 1 hands over the second one late.
    ranks = []
    for rank, second in ((0, 1.0), (1, 4.5)):
        builder = EventBuilder(rank)
        builder.add_step(0, start=0.0, end=8.0)
        builder.add("compute", "backward", start=0.0, end=4.0)
        builder.add("communication", "all-reduce", start=1.0, end=3.0, axis="data", lane="beside", num_bytes=2)
        builder.add("communication", "all-reduce", start=second, end=6.5, axis="data", lane="beside", num_bytes=2)
        ranks.append(builder.build())

    analysis = analyse(Trace(ranks=tuple(ranks), source="", mesh={"data": 2}), one_clock=True)

    (row,) = analysis.collectives
    assert row.transfer_seconds == pytest.approx(2.0)
    assert row.bytes_per_second == pytest.approx(1.0)
    # Rank 0 could begin the second one at 3.0 and waits until 4.5, of which it computes until 4.0.
    assert row.waiting_seconds == pytest.approx(1.5 / 4)
    assert analysis.waiting_RS.tolist() == [[pytest.approx(0.5)], [0.0]]


def test_clocks_are_brought_together_over_all_axes() -> None:
    offset = {0: 0.0, 1: 5.0, 2: -300.0, 3: 0.25}
    recipe = Recipe(mesh={"data": 2, "channel": 2}, extra_compute={2: 0.1}, offset=offset)

    aligned = align(generate(recipe))

    starts = [events.step_start_S[0] for events in aligned.ranks]
    assert starts == pytest.approx([0.0] * 4, abs=1e-6)
    assert _named(analyse(generate(recipe))) == [((2,), "compute")]


def test_ranks_that_never_meet_are_left_on_their_clocks_with_a_remark() -> None:
    ranks = []
    for rank in range(2):
        builder = EventBuilder(rank)
        builder.add("compute", "layer", start=100 * rank, end=100 * rank + 1)
        builder.add_step(0, start=100 * rank, end=100 * rank + 1)
        ranks.append(builder.build())

    aligned = align(Trace(ranks=tuple(ranks), source=""))

    assert aligned.ranks[1].start_E[0] == 100
    assert "clocks" in aligned.remarks[0]


def test_a_summary_holds_plain_values_that_add_up() -> None:
    summary = analyse(generate(Recipe(warmup=3.0, num_steps=10))).summary()

    seconds = summary["seconds_per_step"]
    assert summary["num_warmup_steps"] == 1
    assert seconds["compute"] + seconds["exposed"] + seconds["data"] + seconds["idle"] == pytest.approx(seconds["step"])
    assert summary["communication_share"] == pytest.approx(0.04 / seconds["step"])
    assert summary["collectives"][0]["bytes_per_second"] == pytest.approx(4e8)


def _two_groups(transfer: list[float]) -> Trace:
    ranks = []
    for rank in range(4):
        builder = EventBuilder(rank)
        for step in range(6):
            builder.add("compute", "layer", start=step, end=step + 0.5)
            builder.add("communication", "sum", start=step + 0.5, end=step + 0.5 + transfer[rank // 2], axis="channel")
            builder.add_step(step, start=step, end=step + 0.5 + transfer[rank // 2])
        ranks.append(builder.build())
    return Trace(ranks=tuple(ranks), source="", mesh={"data": 2, "channel": 2})

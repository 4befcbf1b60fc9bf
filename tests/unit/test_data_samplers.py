from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.data.coloring import Layout, balanced_colours
from convmesh.data.samplers import (
    Batching,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StratifiedSampler,
    eval_ids,
    make_sampler,
)
from convmesh.errors import ConfigError, MistakeList

Array = np.ndarray[Any, Any]

KINDS = ("sequential", "random", "stratified", "balanced")


def _labels(sizes: Sequence[int]) -> Array:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    np.random.default_rng(7).shuffle(labels)
    return labels.astype(np.int32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Array, Batching, int]:
    num_shards = draw(st.integers(1, 8))
    accumulation = draw(st.integers(1, 4))
    micro_batch = draw(st.integers(1, 6))
    skewed = st.one_of(st.integers(0, 3), st.integers(0, 60), st.sampled_from([num_shards, 2 * num_shards, 120]))
    sizes = draw(st.lists(skewed, min_size=1, max_size=12).filter(lambda sizes: sum(sizes) >= num_shards))
    batch = num_shards * accumulation * micro_batch
    can_drop = sum(sizes) >= batch
    last_batch: Any = draw(st.sampled_from(["keep", "drop"] if can_drop else ["keep"]))
    return _labels(sizes), Batching(batch, num_shards, accumulation, last_batch), draw(st.integers(0, 3))


def _is_share(count: Array | int, share: Array | float) -> bool:
    """Floor or ceil, with room for the rounding of the share itself."""
    return bool(np.all((count >= np.floor(share + 1e-9)) & (count <= np.ceil(share - 1e-9))))


def _counts(ids: Array, labels: Array) -> Array:
    return np.bincount(labels[ids], minlength=int(labels.max()) + 1)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_every_sample_comes_once_and_shards_agree(kind: Any, case: tuple[Array, Batching, int]) -> None:
    labels, batching, epoch = case
    sampler = make_sampler(kind, labels, batching=batching, seed=5)
    num_tail = len(labels) % batching.global_batch
    assert sampler.num_dropped == (num_tail if batching.last_batch == "drop" else 0)
    seen: list[int] = []
    for update in range(sampler.num_updates):
        of_shards = [sampler.micro_batches(epoch, update, shard) for shard in range(batching.num_shards)]
        together = sorted(int(i) for parts in of_shards for part in parts for i in part)
        ids = sampler.global_ids(epoch, update)
        assert ids.dtype == np.int64
        assert together == sorted(ids.tolist())
        assert len(ids) == sampler.global_count(update)
        _check_sizes(of_shards, batching, is_full=len(ids) == batching.global_batch)
        seen += together
    assert len(seen) == len(set(seen)) == len(labels) - sampler.num_dropped


def _check_sizes(of_shards: list[tuple[Array, ...]], batching: Batching, *, is_full: bool) -> None:
    sizes = [[len(part) for part in parts] for parts in of_shards]
    if is_full:
        assert sizes == [[batching.micro_batch] * batching.accumulation] * batching.num_shards
        return
    totals = [sum(parts) for parts in sizes]
    assert max(totals) - min(totals) <= 1
    for parts, total in zip(sizes, totals, strict=True):
        assert len(parts) == -(-total // batching.micro_batch)
        assert all(size == batching.micro_batch for size in parts[:-1])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_a_whole_epoch_is_its_micro_batches(kind: Any, case: tuple[Array, Batching, int]) -> None:
    labels, batching, epoch = case
    sampler = make_sampler(kind, labels, batching=batching, seed=3)
    for shard in range(batching.num_shards):
        parts = [part for update in range(sampler.num_updates) for part in sampler.micro_batches(epoch, update, shard)]
        ids, sizes = sampler.epoch_parts(epoch, shard)
        assert ids.tolist() == sampler.epoch_ids(epoch, shard).tolist() == [i for part in parts for i in part]
        assert sizes.tolist() == [len(part) for part in parts]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_global_batches_depend_on_neither_shards_nor_accumulation(kind: Any, case: tuple[Array, Batching, int]) -> None:
    labels, batching, epoch = case
    alone = Batching(batching.global_batch, last_batch=batching.last_batch)
    many = make_sampler(kind, labels, batching=batching, seed=3)
    one = make_sampler(kind, labels, batching=alone, seed=3)
    assert many.num_updates == one.num_updates
    for update in range(one.num_updates):
        np.testing.assert_array_equal(many.global_ids(epoch, update), one.global_ids(epoch, update))


@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_stratified_is_exact(case: tuple[Array, Batching, int]) -> None:
    labels, batching, epoch = case
    sampler = StratifiedSampler(labels, batching, seed=11)
    class_sizes = _counts(np.arange(len(labels)), labels)
    kept = np.zeros_like(class_sizes)
    of_shard = np.zeros((batching.num_shards, len(class_sizes)), dtype=np.int64)
    for update in range(sampler.num_updates):
        in_row = _counts(sampler.global_ids(epoch, update), labels)
        assert _is_share(in_row, class_sizes * sampler.global_count(update) / len(labels))
        kept += in_row
        for shard in range(batching.num_shards):
            parts = [_counts(part, labels) for part in sampler.micro_batches(epoch, update, shard)]
            held = sum(parts, np.zeros_like(in_row))
            assert _is_share(held, in_row / batching.num_shards)
            of_shard[shard] += held
            is_full = sampler.global_count(update) == batching.global_batch
            for part in parts:
                if is_full:
                    assert _is_share(part, in_row / (batching.num_shards * batching.accumulation))
                assert _is_share(part, held * part.sum() / held.sum())
    assert _is_share(of_shard, np.broadcast_to(kept / batching.num_shards, of_shard.shape))
    assert _is_share(kept, class_sizes * kept.sum() / len(labels))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_colouring_is_balanced_everywhere(data: st.DataObject) -> None:
    num_colours = data.draw(st.integers(1, 12))
    num_rows = data.draw(st.integers(0, 12))
    row_size = num_colours * data.draw(st.integers(1, 6))
    num_classes = data.draw(st.integers(1, 9))
    cuts = st.lists(st.integers(0, num_rows * row_size), min_size=num_classes - 1, max_size=num_classes - 1)
    starts = np.array([0, *sorted(data.draw(cuts)), num_rows * row_size])
    tail = np.array(data.draw(st.lists(st.integers(0, 15), min_size=num_classes, max_size=num_classes)))
    tail_starts = np.concatenate([[0], np.cumsum(tail)])
    kept, of_tail = balanced_colours(
        Layout(num_rows, row_size, starts, tail_starts), num_colours=num_colours, rng=np.random.default_rng(1)
    )
    classes = np.concatenate(
        [np.repeat(np.arange(num_classes), np.diff(starts)), np.repeat(np.arange(num_classes), tail)]
    )
    rows = np.concatenate([np.arange(len(kept)) % max(num_rows, 1), np.full(len(of_tail), num_rows)])
    cells = (rows * num_classes + classes) * num_colours + np.concatenate([kept, of_tail])
    shape = (num_rows + 1, num_classes, num_colours)
    counts = np.bincount(cells.astype(int), minlength=np.prod(shape)).reshape(shape)
    for name, balance in (("pair", counts), ("row", counts.sum(1)), ("class", counts.sum(0))):
        assert np.ptp(balance, axis=-1).max() <= 1, name


@pytest.mark.parametrize("num_colours", [2, 4, 8])
def test_classes_that_all_need_repair(num_colours: int) -> None:
    """Every class but two crosses a multiple of lcm(rows, colours), and none has a colour to spare."""
    starts = np.array([0, *range(num_colours // 2, num_colours**2 * 6, num_colours), num_colours**2 * 6])
    layout = Layout(num_colours, num_colours * 6, starts, np.zeros_like(starts))
    kept, _ = balanced_colours(layout, num_colours=num_colours, rng=np.random.default_rng(0))
    for first, end in itertools.pairwise(starts[1:-1]):
        assert sorted(kept[first:end].tolist()) == list(range(num_colours))
    assert all(np.ptp(np.bincount(kept[row::num_colours])) == 0 for row in range(num_colours))


@pytest.mark.parametrize("kind", ["random", "stratified"])
def test_order_depends_on_seed_and_epoch_alone(kind: Any) -> None:
    labels = _labels([30, 20, 14])
    batching = Batching(16, 4)
    sampler = make_sampler(kind, labels, batching=batching, seed=1)
    first = [sampler.micro_batches(0, 1, 2)[0].tolist(), sampler.micro_batches(1, 1, 2)[0].tolist()]
    again = make_sampler(kind, labels, batching=batching, seed=1)
    assert [again.micro_batches(epoch, 1, 2)[0].tolist() for epoch in (1, 0)] == first[::-1]
    assert first[0] != first[1]
    assert make_sampler(kind, labels, batching=batching, seed=2).micro_batches(0, 1, 2)[0].tolist() != first[0]


def test_sequential_keeps_the_order() -> None:
    sampler = SequentialSampler(10, Batching(4, 2))
    assert sampler.global_ids(3, 2).tolist() == [8, 9]
    assert sampler.micro_batches(0, 0, 1)[0].tolist() == [2, 3]


def test_stratified_order_within_a_micro_batch_is_mixed() -> None:
    labels = _labels([200, 200])
    part = StratifiedSampler(labels, Batching(40)).micro_batches(0, 0, 0)[0]
    assert np.count_nonzero(np.diff(labels[part])) > 1, "classes come one after the other"


def test_stratified_mixes_which_samples_meet() -> None:
    labels = _labels([64, 64])
    sampler = StratifiedSampler(labels, Batching(16))
    meets = {frozenset(sampler.global_ids(epoch, 0).tolist()) for epoch in range(20)}
    assert len(meets) == 20


def test_labels_need_not_be_small() -> None:
    labels = np.array([-5, 10**12] * 8)
    sampler = StratifiedSampler(labels, Batching(4, 2))
    for update in range(4):
        assert sorted(labels[sampler.global_ids(0, update)].tolist()) == [-5, -5, 10**12, 10**12]


def test_pickle_leaves_the_plan_behind() -> None:
    sampler = RandomSampler(5000, Batching(50))
    fresh = len(pickle.dumps(sampler))
    ids = sampler.global_ids(0, 0)
    assert len(pickle.dumps(sampler)) == fresh
    copy = pickle.loads(pickle.dumps(sampler))  # noqa: S301
    np.testing.assert_array_equal(copy.global_ids(0, 0), ids)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 40))
def test_evaluation_sees_every_sample_once(num_samples: int, num_shards: int, batch: int) -> None:
    shards = [eval_ids(num_samples, num_shards=num_shards, shard=s, batch=batch) for s in range(num_shards)]
    assert sorted(int(i) for parts in shards for part in parts for i in part) == list(range(num_samples))
    totals = [sum(map(len, parts)) for parts in shards]
    assert max(totals) - min(totals) <= 1
    assert all(0 < len(part) <= batch for parts in shards for part in parts)


def test_indivisible_batch_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"100 samples over 4 ranks x 2 micro-batches.*'train.global_batch: 96 or 104'"
    ):
        Batching(100, 4, 2)
    with pytest.raises(ConfigError, match=r"Set 'train\.global_batch: 8'"):
        Batching(3, 4, 2)


def test_bad_sizes_are_listed_together() -> None:
    with pytest.raises(MistakeList, match=r"(?s)the global batch must.*accumulation must"):
        Batching(0, 1, -1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SequentialSampler(3, Batching(8, 4)), "fewer training samples than ranks.*Use at most 3 ranks"),
        (lambda: RandomSampler(7, Batching(8, last_batch="drop")), "an epoch has no update.*to at most 7"),
        (lambda: StratifiedSampler(np.zeros((4, 1), np.int32), Batching(1)), "labels are not one whole number"),
        (lambda: StratifiedSampler(np.zeros(4), Batching(1)), "labels are not one whole number"),  # type: ignore[arg-type]
        (lambda: make_sampler("best", np.zeros(4, np.int32), batching=Batching(1)), "a sampler is unknown"),  # type: ignore[arg-type]
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_positions_outside_are_refused() -> None:
    sampler: Sampler[Any] = SequentialSampler(10, Batching(4, 2))
    with pytest.raises(ConfigError, match=r"no such update \(got 3, expected 0 to 2\)"):
        sampler.global_ids(0, 3)
    with pytest.raises(ConfigError, match=r"no such shard \(got 2"):
        sampler.micro_batches(0, 0, 2)


@pytest.mark.parametrize(("kind", "expected"), [("random", [11, 8]), ("stratified", [2, 10])])
def test_orders_stay_as_they_are(kind: Any, expected: list[int]) -> None:
    """A run that an older version started goes on with the same samples."""
    sampler = make_sampler(kind, np.arange(12) % 3, batching=Batching(4, 2), seed=1)
    assert sampler.micro_batches(2, 1, 1)[0].tolist() == expected

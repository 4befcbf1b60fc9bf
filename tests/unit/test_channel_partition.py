"""Channel partitions against NumPy: what each rank holds is what it would hold of the whole tensor's result."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from convmesh.errors import ConfigError, MistakeList
from convmesh.geometry import ChannelPartition

Array = npt.NDArray[np.int64]


@st.composite
def partitions(draw: st.DrawFn, num_channels: int | None = None, num_ranks: int | None = None) -> ChannelPartition:
    count = draw(st.integers(0, 24)) if num_channels is None else num_channels
    ranks = draw(st.integers(1, 5)) if num_ranks is None else num_ranks
    owner = draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count))
    order = draw(st.permutations(range(count)))
    return ChannelPartition(tuple(tuple(c for c in order if owner[c] == rank) for rank in range(ranks)))


def parts_of(whole_C: Array, partition: ChannelPartition) -> list[Array]:
    return [whole_C[list(channels)] for channels in partition.owned]


def same(parts: list[Array], others: list[Array]) -> bool:
    return all(np.array_equal(part, other) for part, other in zip(parts, others, strict=True))


def test_even_and_uneven_contiguous_partitions() -> None:
    assert ChannelPartition.contiguous(10, 4).owned == ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
    assert ChannelPartition.contiguous(8, 4).is_even
    assert ChannelPartition.contiguous(2, 3).sizes == (1, 1, 0)
    assert ChannelPartition.of_sizes([1, 4]).owned == ((0,), (1, 2, 3, 4))


def test_round_robin_deals_channels_out() -> None:
    assert ChannelPartition.round_robin(5, 2).owned == ((0, 2, 4), (1, 3))
    assert not ChannelPartition.round_robin(5, 2).is_in_order


@given(st.integers(0, 50), st.integers(1, 9))
def test_sizes_differ_by_one_at_most(num_channels: int, num_ranks: int) -> None:
    for make in (ChannelPartition.contiguous, ChannelPartition.round_robin):
        partition = make(num_channels, num_ranks)
        assert partition.num_channels == num_channels
        assert partition.num_ranks == num_ranks
        assert max(partition.sizes) - min(partition.sizes) <= 1
    assert ChannelPartition.contiguous(num_channels, num_ranks).is_in_order


@given(partitions())
def test_local_and_global_are_inverse(partition: ChannelPartition) -> None:
    for channel in range(partition.num_channels):
        assert partition.to_global(*partition.to_local(channel)) == channel
    gathered_C = np.concatenate(parts_of(np.arange(partition.num_channels), partition))
    assert gathered_C.tolist() == list(partition.gathered_order)
    assert gathered_C[list(partition.restoring_order)].tolist() == list(range(partition.num_channels))


@given(st.data(), st.integers(1, 4))
def test_concat_is_what_each_rank_concatenates(data: st.DataObject, num_ranks: int) -> None:
    first, second, third = (data.draw(partitions(num_ranks=num_ranks)) for _ in range(3))
    wholes = [np.arange(part.num_channels) + 100 * index for index, part in enumerate((first, second, third))]
    local = [np.concatenate(parts) for parts in zip(*map(parts_of, wholes, (first, second, third)), strict=True)]
    assert same(local, parts_of(np.concatenate(wholes), first.concat(second, third)))


@given(st.data(), st.integers(1, 6), st.integers(1, 5))
def test_shuffle_is_numpys_reshape_and_transpose(data: st.DataObject, groups: int, width: int) -> None:
    partition = data.draw(partitions(num_channels=groups * width))
    whole_C = np.arange(groups * width)
    shuffled_C = whole_C.reshape(groups, width).T.reshape(-1)
    local = [
        part[list(order)]
        for part, order in zip(parts_of(whole_C, partition), partition.shuffle_order(groups), strict=True)
    ]
    assert same(local, parts_of(shuffled_C, partition.shuffle(groups)))


@given(st.data())
def test_split_is_what_each_rank_splits(data: st.DataObject) -> None:
    partition = data.draw(partitions())
    bounds = sorted(data.draw(st.lists(st.integers(0, partition.num_channels), max_size=3)))
    sizes = [stop - start for start, stop in pairwise([0, *bounds, partition.num_channels])]
    whole_C = np.arange(partition.num_channels)
    pieces = np.split(whole_C, np.cumsum(sizes)[:-1])
    places = partition.split_places(sizes)
    for piece_C, part, taken in zip(pieces, partition.split(sizes), places, strict=True):
        local = [own[list(place)] for own, place in zip(parts_of(whole_C, partition), taken, strict=True)]
        assert same(local, parts_of(piece_C, part))


@given(partitions(), st.integers(1, 6))
def test_flatten_is_what_each_rank_flattens(partition: ChannelPartition, num_pixels: int) -> None:
    whole_CP = np.arange(partition.num_channels * num_pixels).reshape(-1, num_pixels)
    local = [whole_CP[list(channels)].reshape(-1) for channels in partition.owned]
    assert same(local, parts_of(whole_CP.reshape(-1), partition.flatten(num_pixels)))


@given(st.data(), st.integers(1, 6), st.integers(1, 4))
def test_groups_and_their_channels(data: st.DataObject, groups: int, width: int) -> None:
    of_groups = data.draw(partitions(num_channels=groups))
    channels = of_groups.to_channels(width)
    assert channels.split_groups(groups) == ()
    assert channels.of_groups(groups) == of_groups


@given(st.data(), st.integers(1, 5), st.integers(2, 4))
def test_torn_groups_are_found(data: st.DataObject, groups: int, width: int) -> None:
    partition = data.draw(partitions(num_channels=groups * width))
    torn = set(partition.split_groups(groups))
    for group in range(groups):
        members = list(range(group * width, (group + 1) * width))
        places = [partition.to_local(member) for member in members]
        together = all(rank == places[0][0] for rank, _ in places)
        runs = together and [place for _, place in places] == list(range(places[0][1], places[0][1] + width))
        aligned = runs and places[0][1] % width == 0
        assert (group in torn) == (not aligned)
    if torn:
        with pytest.raises(ConfigError, match="whole groups"):
            partition.of_groups(groups)


def test_partitions_that_are_none_are_refused_with_all_that_is_wrong() -> None:
    with pytest.raises(MistakeList) as found:
        ChannelPartition(((0, 1), (1, 3)))
    assert "channel 1 is owned more than once" in str(found.value)
    assert "channels 2 are owned by no rank" in str(found.value)
    with pytest.raises(ConfigError, match="no channels -1"):
        ChannelPartition(((0, -1),))
    with pytest.raises(ConfigError, match="no ranks"):
        ChannelPartition(())


def test_an_explicit_partition_is_checked_against_the_tensor() -> None:
    assert ChannelPartition.explicit([[2, 0], [1]], num_channels=3).owned == ((2, 0), (1,))
    with pytest.raises(ConfigError, match="channels 3 are owned by no rank"):
        ChannelPartition.explicit([[2, 0], [1]], num_channels=4)
    with pytest.raises(ConfigError, match="no channels 2"):
        ChannelPartition.explicit([[2, 0], [1]], num_channels=2)


@given(partitions(), partitions())
def test_tensors_over_different_ranks_are_not_concatenated(first: ChannelPartition, second: ChannelPartition) -> None:
    assume(first.num_ranks != second.num_ranks)
    with pytest.raises(ConfigError, match="different numbers of ranks"):
        first.concat(second)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ChannelPartition.contiguous(4, 0), "no ranks"),
        (lambda: ChannelPartition.contiguous(-1, 2), "negative"),
        (lambda: ChannelPartition.contiguous(6, 2).shuffle(4), "don't divide"),
        (lambda: ChannelPartition.contiguous(6, 2).split([2, 2]), "not all channels"),
        (lambda: ChannelPartition.contiguous(6, 2).to_local(6), "no such channel"),
        (lambda: ChannelPartition.contiguous(6, 2).to_global(0, 3), "no such channel"),
        (lambda: ChannelPartition.contiguous(6, 2).to_global(2, 0), "no such rank"),
        (lambda: ChannelPartition.contiguous(6, 2).flatten(0), "no pixels"),
    ],
)
def test_mistakes_are_told(call: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()  # type: ignore[operator]

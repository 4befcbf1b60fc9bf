"""The pools themselves: results in order, errors as text, no hanging test."""

from __future__ import annotations

import pytest

from tests.multiprocess.ranks import RanksFailedError

pytestmark = [pytest.mark.torch, pytest.mark.multiprocess]


def test_every_rank_answers_in_order(rank_pool) -> None:
    answers = rank_pool("torch", 2).run("tests.multiprocess.probe_cases:whoami", greeting="hello")
    gathered = [(0, 0.0), (1, 0.1)]
    assert answers == [("hello", 0, 2, gathered), ("hello", 1, 2, gathered)]


def test_an_exception_on_one_rank_is_shown(rank_pool) -> None:
    with pytest.raises(RanksFailedError, match="as asked"):
        rank_pool("torch", 2).run("tests.multiprocess.probe_cases:fail_on", rank=1)


def test_a_hanging_rank_is_named(rank_pool) -> None:
    with pytest.raises(RanksFailedError, match=r"not done after 1 s on ranks \[1\]"):
        rank_pool("torch", 2).run("tests.multiprocess.probe_cases:hang_on", rank=1, timeout_seconds=1.0)


def test_a_dying_rank_is_named(rank_pool) -> None:
    with pytest.raises(RanksFailedError, match="the rank died"):
        rank_pool("torch", 2).run("tests.multiprocess.probe_cases:die_on", rank=0)

"""Threads of MindSpore's kernels on CPU: oneDNN plans for a rank's own, not for all cores of the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("mindspore")

from convmesh.engines.mindspore import threads

pytestmark = pytest.mark.mindspore


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = threads.planned_threads()
    if before is None:
        pytest.skip("this MindSpore has no oneDNN that can be told")
    yield
    threads.plan_convolutions_for(before)


def test_onednn_is_told() -> None:
    for number in (1, 3):
        threads.plan_convolutions_for(number)
        assert threads.planned_threads() == number


def test_a_rank_that_starts_tells_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    # MindSpore takes its own number once per process, which is not for this test to give.
    monkeypatch.setattr(threads.ms.device_context.cpu.op_tuning, "threads_num", lambda _: None)
    threads.plan_convolutions_for(4)
    threads.compute_with(1)
    assert threads.planned_threads() == 1

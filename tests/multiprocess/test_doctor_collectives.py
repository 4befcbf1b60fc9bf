"""The doctor's trial of collectives, with real ranks of each engine."""

from __future__ import annotations

import pytest

from convmesh.report.engine_probe import try_collectives

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(280)]


@pytest.mark.torch
def test_pytorch_has_all_collectives() -> None:
    states, problem = try_collectives("torch")
    assert problem == ""
    assert [state.name for state in states if state.works] == [
        "all-reduce", "all-gather", "broadcast", "reduce-scatter", "all-to-all", "send/receive",
    ]  # fmt: skip
    assert all(state.small_seconds and state.large_seconds for state in states)


@pytest.mark.mindspore
def test_mindspore_has_what_data_parallel_needs() -> None:
    states, problem = try_collectives("mindspore")
    assert problem == ""
    assert len(states) == 5
    assert {"all-reduce", "all-gather", "broadcast"} <= {state.name for state in states if state.works}

"""What the recorder says of real ranks is true: its parts add up, and its communication is what raw timers measure."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convmesh.plan.load import dump_plan
from convmesh.profiling.analysis import analyse
from convmesh.profiling.breakdown import break_down
from convmesh.profiling.events import Trace
from tests.multiprocess.profile_cases import MODULES
from tests.multiprocess.ranks import RankPool

pytestmark = [pytest.mark.multiprocess]

Pools = Callable[[str, int], RankPool]
ENGINES = [
    pytest.param("torch", marks=pytest.mark.torch),
    pytest.param("mindspore", marks=pytest.mark.mindspore),
]


@pytest.fixture
def profiled(rank_pool: Pools, tmp_path: Path) -> Callable[..., Any]:
    """What two ranks of an engine note on a mesh, what raw timers say, and the seconds of all updates."""

    def run(engine: str, sizes: Mapping[str, int], **rest: Any) -> Any:
        pool = rank_pool(engine, 2)
        settings = dict(rest.pop("strategy", {}))
        if sizes.get("channel", 1) > 1:
            cases = importlib.import_module(f"tests.multiprocess.{MODULES[engine]}")
            (tmp_path / "plan.yaml").write_text(dump_plan(cases.plan_for("cnn-small", sizes)))
            settings["plan"] = str(tmp_path / "plan.yaml")
        said = pool.run(
            "tests.multiprocess.profile_cases:profiled", timeout_seconds=110, sizes=sizes, strategy=settings, **rest
        )
        trace = Trace(ranks=tuple(events for events, _, _ in said), source="", engine=engine, mesh=sizes)
        return trace, [raw for _, raw, _ in said], [seconds for _, _, seconds in said]

    return run


@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 1, "channel": 2}], ids=["data", "channel"])
@pytest.mark.parametrize("engine", ENGINES)
def test_communication_is_what_timers_round_the_raw_collectives_say(
    engine: str, sizes: Mapping[str, int], profiled: Callable[..., Any]
) -> None:
    trace, raw_RS, seconds_RS = profiled(engine, sizes)

    whole = break_down(trace)
    parts_RS = whole.compute_RS + whole.exposed_RS + whole.data_RS + whole.idle_RS
    assert np.allclose(parts_RS, whole.step_RS, rtol=0.02)
    assert (whole.idle_RS.sum() / whole.step_RS.sum()) < 0.25
    share_RS = whole.exposed_RS / whole.step_RS
    raw_share_RS = np.array(raw_RS) / np.array(seconds_RS)
    assert (raw_share_RS.mean(axis=1) > 0.02).all(), "nothing was timed"
    # The median of the updates: whoever loses its core between the two timers is not to decide.
    assert np.median(share_RS - raw_share_RS, axis=1) == pytest.approx(0.0, abs=0.03)


@pytest.mark.parametrize("engine", ENGINES)
def test_tiny_buckets_are_named(engine: str, profiled: Callable[..., Any]) -> None:
    # Through shared memory MindSpore sums all buckets at once.
    trace, _, _ = profiled(engine, {"data": 2}, strategy={"bucket_bytes": 1}, shared_memory=False)

    (row,) = analyse(trace, one_clock=True).traffic
    assert row.num_per_step >= 8
    assert row.median_bytes < 2**14
    assert row.is_latency_bound, row

"""What the benchmarks of the planner make of measurements, and which plans they compare."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.advice import CONFIG, Variant
from benchmarks.advice import page_of as advice_page
from benchmarks.contenders.planner_ranks import Job, Seen
from benchmarks.memory_budget import images_per_second, report
from benchmarks.planner import SIZES, jobs_of, key_of, num_ranks_of
from benchmarks.planner_report import Row

from convmesh.config import parse_config
from convmesh.planner.prediction import MemoryUse, Prediction, Seconds

JOB = Job(engine="torch", network="resnet18", image_size=64, global_batch=16, mesh={"data": 2})


def entry(title: str, seconds: float, *, peak_bytes: int = 90, global_batch: int = 16) -> dict[str, Any]:
    job = {**asdict(JOB), "global_batch": global_batch}
    return {
        "engine": "torch",
        "story": "a story",
        "title": title,
        "limit_bytes": 100,
        "predicted_bytes": 80,
        "job": job,
        "seconds": [seconds, seconds, 9 * seconds],
        "peak_bytes": peak_bytes,
    }


def test_a_plan_that_held_more_than_the_limit_does_not_count() -> None:
    assert images_per_second(entry("the plan", 2.0)) == 8.0
    assert images_per_second(entry("the plan", 2.0, peak_bytes=101)) is None
    assert images_per_second({**entry("the plan", 2.0), "job": None}) is None


def test_the_gain_is_told_against_both_ways_of_data_parallel() -> None:
    entries = [
        entry("data parallel, 2 a rank", 1.0, global_batch=8),
        entry("data parallel, accumulated", 1.6),
        entry("the plan", 1.0),
    ]
    text = "\n".join(report({str(place): found for place, found in enumerate(entries)}))
    assert "over plain data parallel: 2.00; goal 1.54: reached" in text
    assert "over data parallel with accumulation: 1.60" in text
    entries[0] = {**entries[0], "job": None}
    assert "can't run this" in "\n".join(report({str(place): found for place, found in enumerate(entries)}))


def test_errors_are_relative_to_what_was_measured() -> None:
    predicted: Any = Prediction(candidate=None, seconds=Seconds(forward=1.1), memory=MemoryUse(fixed=75))  # type: ignore[arg-type]
    ranks = [
        Seen(seconds=(0.9, 1.0, 1.0), peak_bytes=100, built_bytes=50),
        Seen(seconds=(1.0, 0.8, 1.2), peak_bytes=90, built_bytes=50),
    ]
    row = Row.of(JOB, [ranks], predicted)
    assert row.seconds == (1.0, 1.0, 1.2)
    assert row.time_error == 1.1 / 1.0 - 1
    assert row.memory_error == -0.25


def test_every_mesh_is_trained_with_and_without_accumulation_and_recomputation() -> None:
    jobs = list(jobs_of("torch", SIZES[1]))
    assert len({key_of(job) for job in jobs}) == len(jobs)
    assert {num_ranks_of(job) for job in jobs} == {1, 2, 4}
    for num_ranks in (1, 2, 4):
        own = [job for job in jobs if num_ranks_of(job) == num_ranks]
        assert {job.accumulation for job in own} == {1, 2}
        assert {job.recompute for job in own} == {"none", "blocks"}


def test_the_advice_loop_tells_each_gain_beside_what_was_predicted() -> None:
    run = parse_config(CONFIG)
    variants = [
        Variant("as it was", run, "none", foretold=[0.2, 0.2], seconds=[0.2, 0.22]),
        Variant("buckets: `x`", run, "buckets", foretold=[0.15, 0.15], seconds=[0.14, 0.14]),
        Variant("together: `x`", run, "all together", foretold=[0.1, 0.1], seconds=[0.105, 0.105]),
    ]
    text = advice_page(variants, "two cores")
    assert "| buckets: `x` | 150 | 140 | 140 to 140 | 25.0% | 33.2% | 0.75 |" in text
    assert "2.00 times its images per second" in text
    assert "2 rounds" in text
    assert "reached by buckets, all together; missed by none." in text

"""The report of `benchmarks.planner`: predictions against measurements, and the choice among plans."""

from __future__ import annotations

import importlib.metadata
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders.planner_ranks import Job, Seen

from convmesh.mesh import Mesh
from convmesh.planner.prediction import MIB, Prediction

RESULTS = Path(__file__).parent / "results" / "planner.md"
MEDIAN_GOAL, WORST_GOAL, CHOICE_GOAL = 0.10, 0.25, 0.05


@dataclass(frozen=True)
class Row:
    """One plan.

    Args:
        job: The plan.
        seconds: Measured, of each update of the slowest rank.
        peak_bytes: Measured, of the rank with the most.
        predicted: What the planner says.
    """

    job: Job
    seconds: tuple[float, ...]
    peak_bytes: int
    predicted: Prediction

    @classmethod
    def of(cls, job: Job, rounds: Sequence[Sequence[Seen]], predicted: Prediction) -> Row:
        """From the rounds of a plan."""
        seconds = [max(times) for ranks in rounds for times in zip(*(rank.seconds for rank in ranks), strict=True)]
        peaks = [max(rank.peak_bytes for rank in ranks) for ranks in rounds]
        return cls(job, tuple(seconds), int(statistics.median(peaks)), predicted)

    @property
    def measured_seconds(self) -> float:
        """Median over all updates."""
        return statistics.median(self.seconds)

    @property
    def time_error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.seconds.total / self.measured_seconds - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.memory.total / self.peak_bytes - 1

    @property
    def group(self) -> str:
        """Plans among which the planner chooses: one network at one size on as many ranks."""
        job = self.job
        num_ranks = Mesh(job.mesh).num_ranks
        return f"{job.engine}, {job.network}, {job.image_size} px, batch {job.global_batch}, {num_ranks} rank(s)"


def write_report(found: Sequence[tuple[Job, list[list[Seen]], Prediction]]) -> None:
    """Writes the report, and prints it."""
    rows = [Row.of(*entry) for entry in found]
    lines = [*_header(), *_summary(rows)]
    for engine in dict.fromkeys(row.job.engine for row in rows):
        lines += ["", f"## {engine}", "", *_table([row for row in rows if row.job.engine == engine])]
    lines += ["", "## The choice", "", *_choices(rows), ""]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines))
    print("\n".join(lines))


def _header() -> list[str]:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "mindspore", "convmesh"))
    return [
        "# Predictions of the planner",
        "",
        "For each engine, network, size and number of ranks, `convmesh calibrate` measured the machine; then each plan "
        "was trained in fresh ranks on random images held in memory, and predicted from that calibration. Plans of the "
        "channel axis are by rule. Seconds: per update of the slowest rank, the median of all updates. Memory: the "
        "largest resident memory of a rank's process, with the framework itself. Errors: predicted over measured, less "
        "one. Made by `python -m benchmarks.planner`, then the same with `--report`.",
        "",
        f"Ran on: {os.cpu_count()} cores, CPU, Gloo and MCCL over loopback; {versions}. Four ranks share two cores.",
        "",
    ]


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    yield "| engine | plans | time: median error | worst | memory: median error | worst |"
    yield "|---|---|---|---|---|---|"
    for engine in dict.fromkeys(row.job.engine for row in rows):
        own = [row for row in rows if row.job.engine == engine]
        times = [abs(row.time_error) for row in own]
        memories = [abs(row.memory_error) for row in own]
        cells = [f"{share:.1%}" for found in (times, memories) for share in (statistics.median(found), max(found))]
        yield f"| {engine} | {len(own)} | {' | '.join(cells)} |"
    yield ""
    yield (
        f"Goals: median error at most {MEDIAN_GOAL:.0%}, worst at most {WORST_GOAL:.0%}. Worse than that are "
        f"{sum(abs(row.time_error) > WORST_GOAL for row in rows)} of {len(rows)} plans in time and "
        f"{sum(abs(row.memory_error) > WORST_GOAL for row in rows)} in memory."
    )


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "| network | mesh, data x channel | accumulation | recompute | measured s | range | predicted s | error "
        "| measured MiB | predicted MiB | error |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        job, mesh = row.job, Mesh(row.job.mesh)
        cells = [
            f"{job.network} {job.image_size} px, batch {job.global_batch}",
            f"{mesh.size('data')} x {mesh.size('channel')}",
            str(job.accumulation),
            job.recompute,
            f"{row.measured_seconds:.3f}",
            f"{min(row.seconds):.3f} to {max(row.seconds):.3f}",
            f"{row.predicted.seconds.total:.3f}",
            f"{row.time_error:+.0%}",
            f"{row.peak_bytes / MIB:.0f}",
            f"{row.predicted.memory.total / MIB:.0f}",
            f"{row.memory_error:+.0%}",
        ]
        yield f"| {' | '.join(cells)} |"


def _choices(rows: Sequence[Row]) -> Iterator[str]:
    """Of the plans for as many ranks: the one with the fewest predicted seconds against the fastest one."""
    yield "| plans | chosen | measured s | fastest | measured s | chosen over fastest |"
    yield "|---|---|---|---|---|---|"
    worst = 0.0
    for group in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == group]
        if len(own) < 2:
            continue
        chosen = min(own, key=lambda row: row.predicted.seconds.total)
        fastest = min(own, key=lambda row: row.measured_seconds)
        loss = chosen.measured_seconds / fastest.measured_seconds - 1
        worst = max(worst, loss)
        names = [
            f"{Mesh(row.job.mesh)}, accumulation {row.job.accumulation}, recompute {row.job.recompute}"
            for row in (chosen, fastest)
        ]
        yield (
            f"| {group} | {names[0]} | {chosen.measured_seconds:.3f} | {names[1]} | {fastest.measured_seconds:.3f} "
            f"| {loss:+.1%} |"
        )
    yield ""
    yield f"Goal: within {CHOICE_GOAL:.0%} of the fastest; the worst choice is {worst:.1%} slower."

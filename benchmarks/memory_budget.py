"""Images per second of four ranks under one limit of memory per rank: the planner's plan against data parallel.

Data parallel stands there twice: as users start with it, with the largest batch that fits and one reduction per batch,
and with that batch accumulated to the global batch of the plan. Every contender is measured in fresh ranks; one whose
ranks really held more than the limit does not count. Run from the repository: ``python -m benchmarks.memory_budget``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders.planner_ranks import Job
from benchmarks.planner import graph_of, run_job

from convmesh.graph import Graph
from convmesh.mesh import Mesh
from convmesh.plan import Plan
from convmesh.plan.network import network_facts
from convmesh.planner.cluster import Cluster
from convmesh.planner.cluster_file import dump_cluster, load_cluster
from convmesh.planner.prediction import MIB, Training
from convmesh.planner.pricing import Pricer
from convmesh.planner.search import search
from convmesh.planner.seconds import CostModel
from convmesh.training.calibration import Subject, calibrate

RESULTS = Path(__file__).parent / "results" / "memory_budget.md"
WORK = Path("runs/benchmark-memory")
NUM_RANKS = 4
GOAL = 1.54
"""The published step from 120 to 185 images per second."""

_MARGIN = 0.12
"""Share of the limit that a plan is made to leave free, since predictions err by as much."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """A network under a limit.

    Args:
        title: Its name.
        job: Network, size and the global batch that is planned for.
        limit_bytes: What each rank may hold, the framework included.
    """

    title: str
    job: Job
    limit_bytes: int


def stories(engine: str) -> tuple[Story, ...]:
    """The stories of an engine, whose own memory differs."""
    base = {"torch": 0, "mindspore": 350}[engine]
    deep = Job(engine=engine, network="resnet152", image_size=96, global_batch=32, mesh={"data": NUM_RANKS})
    scans = dataclasses.replace(
        deep,
        network=f"benchmarks.contenders.ct_network:for_{engine}",
        image_size=512,
        global_batch=8,
        num_channels=1,
    )
    return (
        Story(title="ResNet-152", job=deep, limit_bytes=(1450 + base) * MIB),
        Story(title="ResNet-152, few images a rank fit", job=deep, limit_bytes=(1150 + base) * MIB),
        Story(title="ResNet-152, less memory", job=deep, limit_bytes=(1100 + base) * MIB),
        Story(title="CT network", job=scans, limit_bytes=(1100 + base) * MIB),
        Story(title="CT network, less memory", job=scans, limit_bytes=(600 + base) * MIB),
    )


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to train under the limit.

    Args:
        title: Its name.
        job: What ranks train; None if nothing fits.
        plan: Its plan, if not by rule.
        predicted_bytes: What the planner says that it holds.
    """

    title: str
    job: Job | None
    plan: Plan | None = None
    predicted_bytes: int = 0


def plain(story: Story, *, per_rank: int) -> Contender:
    """Data parallel with so many samples per rank and one reduction for each batch, whatever is told of it."""
    job = dataclasses.replace(story.job, global_batch=per_rank * NUM_RANKS)
    return Contender(title=f"data parallel, {per_rank} a rank", job=job)


def others(story: Story, graph: Graph, cluster: Cluster, *, per_rank: int) -> Iterator[Contender]:
    """Data parallel with accumulation, given the largest batch that really fits (0: none), and the planner's plan."""
    limit = int(story.limit_bytes * (1 - _MARGIN))
    times = max(1, story.job.global_batch // (max(1, per_rank) * NUM_RANKS))
    job = dataclasses.replace(story.job, global_batch=per_rank * NUM_RANKS * times, accumulation=times)
    yield Contender(title="data parallel, accumulated", job=job if per_rank else None)
    yield _planned(story, graph, cluster, limit)


def _planned(story: Story, graph: Graph, cluster: Cluster, limit: int) -> Contender:
    run = story.job.run()
    pricer = Pricer(graph, Training.of(run), CostModel(cluster), bucket_bytes=run.strategy.bucket_bytes)
    chosen = search(pricer, num_ranks=NUM_RANKS, memory_bytes=limit).chosen
    if chosen is None or chosen.prediction is None:
        return Contender(title="the plan", job=None)
    candidate = chosen.prediction.candidate
    job = dataclasses.replace(
        story.job,
        mesh=dict(candidate.resolved.plan.mesh.sizes),
        accumulation=candidate.accumulation,
        recompute="blocks" if candidate.recompute else "none",
    )
    return Contender(
        title="the plan",
        job=job,
        plan=dataclasses.replace(candidate.resolved.plan, network=network_facts(graph)),
        predicted_bytes=chosen.prediction.memory.total,
    )


class Bench:
    """What is measured, and where it is kept.

    Args:
        work: Folder of what was measured so far.
        seconds: After so long nothing new is started.
    """

    def __init__(self, work: Path, *, seconds: float) -> None:
        self._work = work
        self._deadline = time.monotonic() + seconds
        work.mkdir(parents=True, exist_ok=True)
        self._results = work / "results.json"

    def measure(self, story: Story, *, num_updates: int) -> bool:
        """Does what is left of a story and fits the time; tells whether it is done."""
        graph = graph_of(story.job)
        cluster = self._cluster(story, graph)
        if cluster is None:
            return False
        per_rank = 0
        while per_rank < story.job.global_batch // NUM_RANKS:
            entry = self._seen(story, plain(story, per_rank=per_rank + 1), num_updates)
            if entry is None:
                return False
            if images_per_second(entry) is None:
                break
            per_rank += 1
        for contender in others(story, graph, cluster, per_rank=per_rank):
            if self._seen(story, contender, num_updates) is None:
                return False
        return True

    def _seen(self, story: Story, contender: Contender, num_updates: int) -> dict[str, Any] | None:
        """What a contender showed, now or in an earlier call; None if time is up."""
        name = f"{story.job.engine}: {story.title}, {story.limit_bytes // MIB} MiB: {contender.title}"
        if name not in self.found():
            if time.monotonic() > self._deadline:
                return None
            self._note(name, story, contender, num_updates)
        entry: dict[str, Any] = self.found()[name]
        return entry

    def found(self) -> dict[str, Any]:
        """What was measured so far, by name."""
        content: dict[str, Any] = json.loads(self._results.read_text()) if self._results.exists() else {}
        return content

    def _cluster(self, story: Story, graph: Graph) -> Cluster | None:
        path = self._work / f"{story.job.engine} {story.title.partition(',')[0]}.yaml"
        if not path.exists():
            if time.monotonic() > self._deadline:
                return None
            subject = Subject(
                run=story.job.run(), num_ranks=NUM_RANKS, device="cpu", graph=graph, seconds=80.0, num_rounds=3
            )
            path.write_text(dump_cluster(calibrate(subject)))
        return load_cluster(path)

    def _note(self, name: str, story: Story, contender: Contender, num_updates: int) -> None:
        entry: dict[str, Any] = {
            "engine": story.job.engine,
            "story": f"{story.title}, {story.job.image_size} px",
            "title": contender.title,
            "limit_bytes": story.limit_bytes,
            "predicted_bytes": contender.predicted_bytes,
            "job": asdict(contender.job) if contender.job else None,
        }
        if contender.job is not None:
            seen = run_job(
                contender.job, num_updates=num_updates, work=self._work, plan=contender.plan, most_seconds=40.0
            )
            seconds = [max(times) for times in zip(*(rank.seconds for rank in seen), strict=True)]
            entry |= {"seconds": seconds, "peak_bytes": max(rank.peak_bytes for rank in seen)}
        found = {**self.found(), name: entry}
        self._results.write_text(json.dumps(found, indent=1))
        print(f"{name}: {entry.get('seconds')}, {entry.get('peak_bytes', 0) // MIB} MiB", flush=True)


def images_per_second(entry: dict[str, Any]) -> float | None:
    """Of a contender that was measured and stayed below the limit."""
    if entry["job"] is None or entry["peak_bytes"] > entry["limit_bytes"]:
        return None
    return float(entry["job"]["global_batch"] / statistics.median(entry["seconds"]))


def report(found: dict[str, Any]) -> Iterator[str]:
    """Markdown of all that was measured."""
    yield from _header()
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for entry in found.values():
        groups.setdefault((entry["engine"], entry["story"], entry["limit_bytes"]), []).append(entry)
    for (engine, story, limit), entries in groups.items():
        yield from ("", f"## {story} on {engine}, {limit / MIB:.0f} MiB per rank", "")
        yield "| | mesh | global batch | accumulation | recompute | images/s | memory MiB | predicted MiB |"
        yield "|---|---|---|---|---|---|---|---|"
        for entry in entries:
            yield _line(entry)
        yield ""
        yield from _verdict(entries)


def _line(entry: dict[str, Any]) -> str:
    predicted = f"{entry['predicted_bytes'] / MIB:.0f}" if entry["predicted_bytes"] else ""
    if entry["job"] is None:
        return f"| {entry['title']} | does not fit | | | | | | {predicted} |"
    job, rate = entry["job"], images_per_second(entry)
    seconds = entry["seconds"]
    cells = [
        entry["title"],
        str(Mesh(job["mesh"])),
        str(job["global_batch"]),
        str(job["accumulation"]),
        job["recompute"],
        "held more than the limit"
        if rate is None
        else f"{rate:.2f} ({job['global_batch'] / max(seconds):.2f} to {job['global_batch'] / min(seconds):.2f})",
        f"{entry['peak_bytes'] / MIB:.0f}",
        predicted,
    ]
    return f"| {' | '.join(cells)} |"


def _verdict(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    rates = {entry["title"]: images_per_second(entry) for entry in entries}
    plan = rates.get("the plan")
    if plan is None:
        return
    accumulated = rates.get("data parallel, accumulated")
    fitting = [rate for title, rate in rates.items() if title.endswith("a rank") and rate is not None]
    if not fitting:
        yield "Plain data parallel can't run this within the limit; the plan does."
        return
    largest = fitting[-1]
    verdict = "reached" if plan / largest >= GOAL else "missed"
    yield f"- The plan over plain data parallel: {plan / largest:.2f}; goal {GOAL}: {verdict}."
    if accumulated is not None:
        yield f"- The plan over data parallel with accumulation: {plan / accumulated:.2f}."


def _header() -> list[str]:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "mindspore", "convmesh"))
    return [
        "# A limit of memory",
        "",
        f"{NUM_RANKS} ranks with one thread each and one limit of resident memory per rank, framework included. Plain "
        "data parallel reduces once per batch and is given one sample more until a rank holds more than the limit; "
        "accumulated, its largest batch is reduced once per global batch of the plan. The plan is what the planner "
        "chooses within "
        f"{1 - _MARGIN:.0%} of the limit, from `convmesh calibrate` on this machine. Random images held in memory, "
        "float32, SGD with momentum. Images/s: median over the updates, with the range in brackets. Memory: the most "
        "that a rank's process held. Made by `python -m benchmarks.memory_budget`.",
        "",
        f"Ran on: {os.cpu_count()} cores, CPU, Gloo and MCCL over loopback; {versions}. Four ranks share two cores, so "
        "whatever is communicated takes processor time from the computation.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="*", default=["torch", "mindspore"], choices=["torch", "mindspore"])
    parser.add_argument("--stories", type=int, nargs="*", default=[0, 1, 2, 3, 4], help="places in the list of stories")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after so long")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of what was measured so far")
    parser.add_argument("--report", action="store_true", help="measure nothing, report what there is")
    options = parser.parse_args()
    bench = Bench(options.work, seconds=options.seconds)
    chosen = [stories(engine)[place] for engine in options.engines for place in options.stories]
    done = options.report or all(bench.measure(story, num_updates=options.updates) for story in chosen)
    if not done:
        print("Not all is measured yet: call it again.")
        return
    print("All is measured.")
    text = "\n".join([*report(bench.found()), ""])
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()

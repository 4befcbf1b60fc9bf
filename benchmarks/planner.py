"""Seconds and memory that the planner predicts, against what ranks really take; on this machine.

For each engine, network and number of ranks the machine is calibrated, then every plan is trained in ranks of its own.
What was measured is kept in a work folder: each call does what is left and fits its time, and writes the report once
nothing is left, or of what there is with ``--report``. Run from the repository: ``python -m benchmarks.planner``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders.planner_ranks import Job, Seen
from benchmarks.planner_report import write_report
from tests.multiprocess.ranks import RankPool, RanksFailedError

from convmesh.engines import load_engine
from convmesh.engines.tracing import trace
from convmesh.graph import Graph
from convmesh.graph.resize import with_samples
from convmesh.mesh import Mesh
from convmesh.plan import Execution, Plan, resolve
from convmesh.plan.beside import beside
from convmesh.plan.by_rule import plan_by_rule
from convmesh.plan.load import dump_plan
from convmesh.planner.cluster import Cluster
from convmesh.planner.cluster_file import dump_cluster, load_cluster
from convmesh.planner.predict import predict
from convmesh.planner.prediction import Candidate, Prediction, Training
from convmesh.training.calibration import Subject, calibrate
from convmesh.training.launch import threads_per_rank

WORK = Path("runs/benchmark-planner")
MESHES = ({"data": 1}, {"data": 2}, {"data": 1, "channel": 2}, {"data": 4}, {"data": 2, "channel": 2},
          {"data": 1, "channel": 4})  # fmt: skip
RECOMPUTE = ("none", "blocks")
NUM_RANKS = (1, 2, 4)
_CALIBRATION_SECONDS = 60.0
_CASE_SECONDS = {"torch": 8.0, "mindspore": 40.0}


@dataclass(frozen=True)
class Size:
    """A network at one size.

    Args:
        network: One of our networks.
        image_size: Side in pixels.
        global_batch: Samples per update.
    """

    network: str
    image_size: int
    global_batch: int

    @property
    def name(self) -> str:
        """Its name in files and tables."""
        return f"{self.network} {self.image_size} px, batch {self.global_batch}"


SIZES = (
    Size("cnn-small", 32, 64),
    Size("resnet18", 64, 16),
    Size("resnet50", 96, 8),
    Size("cnn-small", 64, 128),
    Size("resnet18", 96, 32),
    Size("resnet50", 64, 16),
)


def jobs_of(engine: str, size: Size) -> Iterator[Job]:
    """All plans that are trained: every mesh, and accumulation and recomputation on some of them."""
    for mesh in MESHES:
        most = size.global_batch // mesh["data"]
        for accumulation, recompute in ((1, "none"), (2, "none"), (1, "blocks")):
            if accumulation > most or (size.network == "cnn-small" and recompute != "none"):
                continue
            if (accumulation > 1 or recompute != "none") and mesh in ({"data": 4}, {"data": 1, "channel": 2}):
                continue
            yield Job(
                engine=engine,
                network=size.network,
                image_size=size.image_size,
                global_batch=size.global_batch,
                mesh=mesh,
                accumulation=accumulation,
                recompute=recompute,
            )


def num_ranks_of(job: Job) -> int:
    """Ranks of its mesh."""
    return Mesh(job.mesh).num_ranks


def graph_of(job: Job) -> Graph:
    """The network of a job, read by its own engine."""
    run = job.run()
    network = load_engine(job.engine).build_network(
        run.model, num_classes=job.num_classes, num_channels=job.num_channels, seed=0
    )
    side = job.image_size
    return trace(network, (job.global_batch, job.num_channels, side, side))


def plan_of(job: Job, graph: Graph) -> Plan:
    """Its plan: by rule on the channel axis."""
    execution = Execution(accumulation=job.accumulation, recompute=("*",) if job.recompute == "blocks" else ())
    plan = plan_by_rule(graph, Mesh(job.mesh))
    return Plan(mesh=plan.mesh, entries=plan.entries, execution=execution, network=plan.network)


def predict_job(job: Job, graph: Graph, cluster: Cluster) -> Prediction:
    """What the planner says of it."""
    resolved = resolve(graph, plan_of(job, graph))
    candidate = Candidate(resolved=resolved, training=Training.of(job.run()), accumulation=job.accumulation)
    return predict(candidate, cluster)


class Bench:
    """What is measured, and where it is kept.

    Args:
        work: Folder of what was measured so far.
        seconds: After so long nothing new is started.
        recompute: Which jobs are measured, by what they recompute.
        num_ranks: Which jobs are measured, by their ranks.
    """

    def __init__(
        self,
        work: Path,
        *,
        seconds: float,
        recompute: Sequence[str] = RECOMPUTE,
        num_ranks: Sequence[int] = NUM_RANKS,
    ) -> None:
        self._work = work
        self._recompute = recompute
        self._num_ranks = num_ranks
        self._deadline = time.monotonic() + seconds
        work.mkdir(parents=True, exist_ok=True)
        self.results = work / "results.jsonl"

    def measure(self, engine: str, sizes: tuple[Size, ...], *, num_updates: int, num_rounds: int) -> bool:
        """Does what is left and fits the time; tells whether all is done."""
        for size in sizes:
            jobs = [job for job in jobs_of(engine, size) if job.recompute in self._recompute]
            for num_ranks in self._num_ranks:
                left = [
                    (job, number)
                    for number in range(num_rounds)
                    for job in jobs
                    if num_ranks_of(job) == num_ranks and (key_of(job), number) not in self._done()
                ]
                if left and not self._do(engine, size, num_ranks, left, num_updates=num_updates):
                    return False
        return True

    def _do(self, engine: str, size: Size, num_ranks: int, left: list[tuple[Job, int]], *, num_updates: int) -> bool:
        cluster = self._cluster(left[0][0], size, num_ranks)
        if cluster is None:
            return False
        for job, number in left:
            if not self._fits(_CASE_SECONDS[engine]):
                return False
            try:
                seen = run_job(job, num_updates=num_updates, work=self._work)
            except RanksFailedError as error:
                print(f"{key_of(job)} failed: {error}", flush=True)
                seen = []
            self._note(job, number, seen, cluster)
        return True

    def _cluster(self, job: Job, size: Size, num_ranks: int) -> Path | None:
        path = self._work / f"{job.engine} {size.name} {num_ranks}.yaml"
        seconds = _CALIBRATION_SECONDS
        if not path.exists():
            if not self._fits(seconds + 25):
                return None
            run = job.run()
            subject = Subject(run=run, num_ranks=num_ranks, device="cpu", graph=graph_of(job), seconds=seconds)
            path.write_text(dump_cluster(calibrate(subject)))
        return path

    def _fits(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self._deadline

    def _done(self) -> set[tuple[str, int]]:
        return {(entry["key"], entry["round"]) for entry in read_results(self.results)}

    def _note(self, job: Job, number: int, seen: list[Seen], cluster: Path) -> None:
        entry = {
            "key": key_of(job),
            "round": number,
            "job": asdict(job),
            "cluster": str(cluster),
            "seen": [asdict(rank) for rank in seen],
            "load": os.getloadavg()[0],
        }
        with self.results.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if seen:
            slowest = [max(times) for times in zip(*(rank.seconds for rank in seen), strict=True)]
            print(f"{key_of(job)}: {statistics.median(slowest):.3f} s", flush=True)


def run_job(
    job: Job, *, num_updates: int, work: Path, plan: Plan | None = None, most_seconds: float = 20.0
) -> list[Seen]:
    """Trains a job in ranks of its own, so that their memory is its own.

    Args:
        job: The job.
        num_updates: Updates after the first two.
        work: Folder for its plan.
        plan: Its plan; by default the one by rule.
        most_seconds: No update begins after so long.

    Returns:
        What each rank saw.
    """
    num_ranks, path = num_ranks_of(job), None
    if plan is not None or Mesh(job.mesh).size("channel") > 1 or job.recompute != "none":
        path = (work / "plan.yaml").absolute()
        graph = with_samples(graph_of(job), job.global_batch // (Mesh(job.mesh).size("data") * job.accumulation))
        path.write_text(dump_plan(plan or plan_of(job, graph)))
        beside(path).write_text(graph.to_json())
    pool = RankPool(job.engine, num_ranks, num_threads=threads_per_rank(num_ranks))
    try:
        return pool.run(
            "benchmarks.contenders.planner_ranks:train",
            timeout_seconds=600,
            job=job,
            plan=path,
            num_updates=num_updates,
            most_seconds=most_seconds,
        )
    finally:
        pool.close()


def key_of(job: Job) -> str:
    """What tells a job from others."""
    mesh = "x".join(str(Mesh(job.mesh).size(axis)) for axis in ("data", "channel"))
    return (
        f"{job.engine} {job.network} {job.image_size} {job.global_batch} {mesh} "
        f"accumulation {job.accumulation} recompute {job.recompute}"
    )


def read_results(path: Path) -> list[dict[str, Any]]:
    """What was measured so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows_of(results: list[dict[str, Any]]) -> Iterator[tuple[Job, list[list[Seen]], Prediction]]:
    """Each job with what its rounds showed and what is predicted from its calibration."""
    by_key: dict[str, list[dict[str, Any]]] = {}
    for entry in results:
        if not entry["seen"]:
            continue  # It failed, as was told then.
        by_key.setdefault(entry["key"], []).append(entry)
    graphs: dict[str, Graph] = {}
    clusters: dict[str, Cluster] = {}
    for entries in by_key.values():
        job = Job(**entries[0]["job"])
        named = f"{job.engine} {job.network} {job.image_size} {job.global_batch}"
        graphs.setdefault(named, graph_of(job) if named not in graphs else graphs[named])
        path = entries[0]["cluster"]
        if path not in clusters:
            clusters[path] = load_cluster(path)
        seen = [[Seen(**{**rank, "seconds": tuple(rank["seconds"])}) for rank in entry["seen"]] for entry in entries]
        yield job, seen, predict_job(job, graphs[named], clusters[path])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="*", default=["torch", "mindspore"], choices=["torch", "mindspore"])
    parser.add_argument("--sizes", type=int, nargs="*", default=list(range(len(SIZES))), help="places in SIZES")
    parser.add_argument("--recompute", nargs="*", default=list(RECOMPUTE), choices=RECOMPUTE)
    parser.add_argument("--ranks", type=int, nargs="*", default=list(NUM_RANKS), choices=NUM_RANKS)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1, help="how often each plan is trained, in fresh ranks")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after so long")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of what was measured so far")
    parser.add_argument("--report", action="store_true", help="measure nothing, report what there is")
    options = parser.parse_args()
    sizes = tuple(SIZES[place] for place in options.sizes)
    bench = Bench(options.work, seconds=options.seconds, recompute=options.recompute, num_ranks=options.ranks)
    done = options.report or all(
        bench.measure(engine, sizes, num_updates=options.updates, num_rounds=options.rounds)
        for engine in options.engines
    )
    if not done:
        print("Not all is measured yet: call it again.")
        return
    print("All is measured.")
    write_report(list(rows_of(read_results(bench.results))))


if __name__ == "__main__":
    main()

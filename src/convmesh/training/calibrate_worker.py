"""What every rank of a calibration runs: ``python -m convmesh.training.calibrate_worker FOLDER MESH DEVICE THREADS``.

The folder holds ``calibration.json``, which says what to measure. Each rank leaves what it measured there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from convmesh.config import RunConfig
from convmesh.data.open import open_data
from convmesh.data.reader import TrainReader
from convmesh.engines import load_engine
from convmesh.engines.calibrating import (
    Calibrator,
    CollectiveTimes,
    FixedMemory,
    Measurement,
    OperatorTimes,
    Overhead,
    Ranks,
)
from convmesh.engines.contract import Engine, World
from convmesh.errors import ConvMeshError
from convmesh.graph import Graph
from convmesh.graph.graph import Shape
from convmesh.mesh import Mesh
from convmesh.training import worker
from convmesh.training.run_folder import RunFolder, write_json

COLLECTIVE_BYTES = (16 * 2**10, 256 * 2**10, 2 * 2**20, 8 * 2**20)
"""Sizes at which collectives are measured."""

REDUCTION_BYTES = (32 * 2**20,)
"""Sizes at which all-reduces are measured besides: a bucket of gradients is larger than most activations."""

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the ranks measure.

    Args:
        graphs: Operators as JSON, one graph each.
        chunks: Places in ``graphs`` that are measured at once, the most wanted first.
        updates: Shapes of parameters whose update is measured.
        seconds: Time for all of it; chunks that don't fit are left out.
        num_rounds: How often an operator is run.
        reads_data: Whether the run's data is read.
        collective_bytes: Sizes at which collectives are measured.
        reduction_bytes: Sizes at which all-reduces are measured besides.
    """

    graphs: Sequence[str]
    chunks: Sequence[Sequence[int]]
    updates: Sequence[Sequence[Shape]]
    seconds: float
    num_rounds: int = 5
    reads_data: bool = False
    collective_bytes: Sequence[int] = field(default=COLLECTIVE_BYTES)
    reduction_bytes: Sequence[int] = field(default=REDUCTION_BYTES)

    def write(self, folder: Path) -> None:
        """Leaves it in a folder."""
        write_json(folder / "calibration.json", asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Task:
        """Reads it from a folder."""
        return cls(**json.loads((folder / "calibration.json").read_text(encoding="utf-8")))


def run_calibration(run: RunConfig, *, world: World, folder: RunFolder) -> None:
    """Measures on one rank what the folder says.

    Args:
        run: The run whose settings count.
        world: Where this rank stands.
        folder: The folder.
    """
    task = Task.read(folder.root)
    engine = load_engine(run.engine)
    engine.start(world)
    try:
        save_measurement(measure(engine, run, world=world, task=task), folder.root, rank=world.rank)
        engine.all_gather(None)
    finally:
        engine.stop()


def measure(engine: Engine, run: RunConfig, *, world: World, task: Task) -> Measurement:
    """Measures everything; all ranks call it.

    Args:
        engine: Started.
        run: The run whose settings count.
        world: Where this rank stands.
        task: What to measure.

    Returns:
        What this rank measured.
    """
    clock = _Clock(task.seconds)
    module = importlib.import_module(f"convmesh.engines.{run.engine}.calibrate")
    calibrator: Calibrator = module.create_calibrator(engine, world, run)
    with clock.during("memory"):
        memory = calibrator.memory()
    with clock.during("overhead"):
        overhead = calibrator.overhead()
    with clock.during("optimizer"):
        updates = {
            4 * sum(map(_size, shapes)): calibrator.optimizer([tuple(shape) for shape in shapes], repeats=10)
            for shapes in task.updates
        }
    with clock.during("data"):
        data_seconds = _data_seconds(run, world) if task.reads_data else None
    with clock.during("collectives"):
        collectives = list(_collectives(calibrator, world.num_ranks, task))
        whole = Ranks(axis="data", mesh=Mesh({"data": world.num_ranks}))
        overlap = calibrator.overlap(whole) if world.num_ranks > 1 else None
    with clock.during("operators"):
        operators = _operators(calibrator, engine, task, clock)
    return Measurement(
        memory=memory,
        overhead=overhead,
        operators=operators,
        updates=updates,
        collectives=collectives,
        overlap=overlap,
        data_seconds=data_seconds,
        phases=clock.phases,
    )


class _Clock:
    """How long each phase took, and how much time is left."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.phases: dict[str, float] = {}

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.phases[name] = time.monotonic() - begun


def _size(shape: Sequence[int]) -> int:
    size = 1
    for entry in shape:
        size *= entry
    return size


def _operators(calibrator: Calibrator, engine: Engine, task: Task, clock: _Clock) -> dict[int, OperatorTimes | None]:
    """Chunk by chunk, as long as all ranks think that the next one fits the time; the first in any case."""
    found: dict[int, OperatorTimes | None] = {}
    longest = 0.0
    for chunk in task.chunks:
        if found and max(engine.all_gather(time.monotonic() + longest - clock.deadline)) > 0:
            break
        begun = time.monotonic()
        graphs = [Graph.from_json(task.graphs[place]) for place in chunk]
        found |= dict(zip(chunk, calibrator.operators(graphs, num_rounds=task.num_rounds), strict=True))
        longest = max(longest, time.monotonic() - begun)
    return found


def _collectives(
    calibrator: Calibrator, num_ranks: int, task: Task
) -> Iterator[tuple[str, str, Ranks, tuple[CollectiveTimes, ...]]]:
    """Each kind as each axis uses it, for groups of each size."""
    for size in (number for number in range(2, num_ranks + 1) if num_ranks % number == 0):
        meshes = {
            "channel": Mesh({"data": num_ranks // size, "channel": size}),
            "data": Mesh({"data": size, "channel": num_ranks // size}),
        }
        seen: set[tuple[str, str]] = set()
        for axis, mesh in meshes.items():
            ranks = Ranks(axis=axis, mesh=mesh)
            for kind in _KINDS:
                for way in calibrator.ways(kind, axis):
                    if (kind, way) in seen or (way == "shared_memory" and axis == "data" and size < num_ranks):
                        continue
                    seen.add((kind, way))
                    sizes = [*task.collective_bytes, *(task.reduction_bytes if kind == "all-reduce" else ())]
                    times = calibrator.collective(kind, ranks, sizes=sizes, repeats=7)
                    yield kind, way, ranks, tuple(times)


def _data_seconds(run: RunConfig, world: World) -> float | None:
    """Seconds per sample of reading, of the first micro-batches of an epoch; None without data."""
    try:
        datasets = open_data(run.data)
    except ConvMeshError:
        return None
    reader = TrainReader(datasets, run, num_shards=world.num_ranks, shard=world.rank)
    keys = list(reader.keys(0))[:6]
    reader.read(keys[0])
    begun = time.perf_counter()
    num_samples = sum(len(reader.read(key).weights_N) for key in keys[1:] or keys)
    return (time.perf_counter() - begun) / num_samples


def save_measurement(found: Measurement, folder: Path, *, rank: int) -> None:
    """Writes what a rank measured."""
    content = asdict(found)
    content["collectives"] = [
        {
            "kind": kind,
            "way": way,
            "axis": ranks.axis,
            "mesh": dict(ranks.mesh.sizes),
            "times": [asdict(entry) for entry in times],
        }
        for kind, way, ranks, times in found.collectives
    ]
    write_json(folder / f"{rank}.json", content)


def load_measurement(folder: Path, *, rank: int) -> Measurement:
    """Reads what a rank measured."""
    content: Mapping[str, Any] = json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
    return Measurement(
        memory=FixedMemory(**{**content["memory"], "probe_bytes": tuple(content["memory"]["probe_bytes"])}),
        overhead=Overhead(**content["overhead"]),
        operators={
            int(place): None if entry is None else OperatorTimes(tuple(entry["forward"]), tuple(entry["backward"]))
            for place, entry in content["operators"].items()
        },
        updates={int(size): tuple(seconds) for size, seconds in content["updates"].items()},
        collectives=[
            (
                entry["kind"],
                entry["way"],
                Ranks(axis=entry["axis"], mesh=Mesh(entry["mesh"])),
                tuple(CollectiveTimes(times["num_bytes"], tuple(times["seconds"])) for times in entry["times"]),
            )
            for entry in content["collectives"]
        ],
        overlap=content["overlap"],
        data_seconds=content["data_seconds"],
        phases=content["phases"],
    )


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:], run=run_calibration))

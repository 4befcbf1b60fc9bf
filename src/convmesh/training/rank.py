"""One rank of a run, from joining the others to the summary."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.config import RunConfig
from convmesh.data.open import DataSets, open_data
from convmesh.data.reader import EvalReader, TrainReader
from convmesh.engines import load_engine
from convmesh.engines.contract import Engine, TrainStep, World
from convmesh.errors import ProfileError
from convmesh.profiling.analysis import analyse
from convmesh.profiling.store import INDEX_NAME, load_trace
from convmesh.training.agree import agree
from convmesh.training.checkpoint import load_newest
from convmesh.training.loop import Loop
from convmesh.training.metrics import CallbackSink, Fanout, JsonLinesSink, MetricsSink, Record
from convmesh.training.planning import build_network
from convmesh.training.profiling import FOLDER as PROFILE_FOLDER
from convmesh.training.run_folder import RunFolder, write_json
from convmesh.training.sinks import open_sinks
from convmesh.version import __version__


def run_rank(
    run: RunConfig,
    *,
    world: World,
    folder: RunFolder,
    on_record: Callable[[Record], None] | None = None,
    prepare: Callable[[], None] | None = None,
) -> None:
    """Trains on one rank; all ranks of the run call it.

    Args:
        run: The run.
        world: Where this rank stands; its device is resolved.
        folder: The run folder, prepared; if it holds checkpoints, training continues from the newest whole one.
        on_record: Called on rank 0 with every record of ``metrics.jsonl``.
        prepare: Called on rank 0 before anything is written, where no launcher has prepared the folder.

    Raises:
        ConvMeshError: Whatever a user can mend; on all ranks alike where possible.
    """
    begun = time.perf_counter()
    engine = load_engine(run.engine)
    engine.start(world)
    sink = Fanout()
    try:
        if prepare is not None:
            agree(prepare if world.rank == 0 else _nothing, engine.all_gather)
        if world.rank == 0:
            sink.add(JsonLinesSink(folder.metrics), *([CallbackSink(on_record)] if on_record else []))
            write_json(folder.versions, {**_versions(), **engine.versions()})
        datasets, network = agree(lambda: open_run(engine, run), engine.all_gather)
        step = engine.build_step(network, run, pixel_scale=datasets.pixel_scale)
        loop = loop_of(engine, step, datasets, run=run, world=world, folder=folder, sink=sink)
        _restore(loop, engine, folder, sink=sink, rank=world.rank)
        if world.rank == 0:
            sink.write(_start_record(run, loop, world, engine))
            _add_trackers(sink, run, folder=folder, update=loop.progress.update)
        loop.fit()
        summary = _summary(engine, step, loop, run=run, world=world)
        if world.rank == 0:
            balance = json.loads(balance_path(folder).read_text()) if balance_path(folder).exists() else None
            summary = {**summary, "class_balance": balance, "seconds": time.perf_counter() - begun}
            write_json(folder.summary, summary)
            for record in _closing_records(run, summary, folder=folder):
                sink.write(record)
        engine.all_gather(None)  # No rank leaves before the summary is on disk.
    finally:
        try:
            engine.stop()
        finally:
            sink.close()  # Last, since a tracker may keep it waiting, and other ranks with it.


def _add_trackers(sink: Fanout, run: RunConfig, *, folder: RunFolder, update: int) -> None:
    """Adds the sinks that the run file names; what they have to say goes to the others."""
    if run.train.sinks:

        def tell(level: str, text: str) -> None:
            sink.write({"kind": "event", "level": level, "text": text})

        sink.add(*open_sinks(run, run_dir=folder.root, update=update, on_event=tell))


def _closing_records(run: RunConfig, summary: Mapping[str, Any], *, folder: RunFolder) -> Iterator[Record]:
    """What trackers are told of a run that is done: the main figures of its profile, and how it ended."""
    update = summary["num_updates"]
    if run.train.sinks and (folder.root / PROFILE_FOLDER / INDEX_NAME).exists():
        with contextlib.suppress(ProfileError):
            found = analyse(load_trace(folder.root / PROFILE_FOLDER)).summary()
            seconds = {f"{name}_seconds": value for name, value in found["seconds_per_step"].items()}
            yield {"kind": "profile", "update": update, **seconds, "communication_share": found["communication_share"]}
    names = ("accuracy", "loss", "best_accuracy", "images_per_second", "peak_memory_bytes", "seconds")
    yield {"kind": "end", "update": update, **{name: summary[name] for name in names}}


def _nothing() -> None:
    """What other ranks do while rank 0 prepares."""


def balance_path(folder: RunFolder) -> Path:
    """Where the class balance of a run is noted before it starts."""
    return folder.root / "class_balance.json"


def open_run(engine: Engine, run: RunConfig) -> tuple[DataSets, Any]:
    """The data of a run, and its network.

    Args:
        engine: A started engine.
        run: The run.

    Raises:
        ConvMeshError: If data is missing, or the network can't be built.
    """
    datasets = open_data(run.data)
    return datasets, build_network(engine, run, datasets)


def loop_of(
    engine: Engine,
    step: TrainStep,
    datasets: DataSets,
    *,
    run: RunConfig,
    world: World,
    folder: RunFolder,
    sink: MetricsSink,
) -> Loop:
    """The training loop of one rank, with the readers of its shard.

    Args:
        engine: A started engine.
        step: The trainable network.
        datasets: The data.
        run: The run.
        world: Where this rank stands.
        folder: The run folder.
        sink: Takes records on rank 0.
    """
    num_shards = world.mesh.size("data")
    return Loop(
        engine=engine,
        step=step,
        run=run,
        world=world,
        train=TrainReader(datasets, run, num_shards=num_shards, shard=world.shard),
        evaluation=EvalReader(datasets, run, num_shards=num_shards, shard=world.shard),
        folder=folder,
        sink=sink,
    )


def _restore(loop: Loop, engine: Engine, folder: RunFolder, *, sink: MetricsSink, rank: int) -> None:
    checkpoint, problems = agree(lambda: load_newest(folder.checkpoints), engine.all_gather)
    if rank == 0:
        for problem in problems:
            sink.write({"kind": "event", "level": "warning", "text": problem})
    if checkpoint is not None:
        agree(lambda: loop.restore(checkpoint), engine.all_gather)


def _start_record(run: RunConfig, loop: Loop, world: World, engine: Engine) -> Record:
    return {
        "kind": "start",
        "update": loop.progress.update,
        "num_updates": loop.num_updates,
        "epochs": run.train.epochs,
        "num_ranks": world.num_ranks,
        "mesh": dict(world.mesh.sizes),
        "engine": engine.name,
        "device": world.device,
        "compute": run.precision.compute,
        "time": time.time(),
    }


def _summary(engine: Engine, step: TrainStep, loop: Loop, *, run: RunConfig, world: World) -> Mapping[str, Any]:
    of_rank = engine.all_gather(
        {"peak_memory_bytes": engine.peak_memory_bytes(), "optimizer_bytes": step.optimizer_bytes()}
    )
    progress, totals = loop.progress, loop.totals
    return {
        "status": "finished",
        "engine": engine.name,
        "device": world.device,
        "num_ranks": world.num_ranks,
        "mesh": dict(world.mesh.sizes),
        "epochs": run.train.epochs,
        "num_updates": progress.update,
        "accuracy": progress.accuracy,
        "loss": progress.loss,
        "best_accuracy": progress.best_accuracy,
        "best_update": progress.best_update,
        "images_per_second": totals.num_samples / totals.train_seconds if totals.train_seconds else None,
        "peak_memory_bytes": [rank["peak_memory_bytes"] for rank in of_rank],
        "optimizer_bytes": [rank["optimizer_bytes"] for rank in of_rank],
        "skipped_updates": loop.num_skipped_updates,
        "skipped_samples": totals.num_skipped_samples,
        "dropped_samples": loop.num_dropped * run.train.epochs,
        "num_parameters": step.num_parameters(),
        "collectives": loop.collectives(),
        "sync_checks": totals.num_sync_checks,
        "resumed_from": progress.resumed_from,
    }


def _versions() -> dict[str, str]:
    return {
        "convmesh": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cores": str(os.cpu_count()),
    }

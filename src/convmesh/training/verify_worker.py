"""What every rank of a verification runs: ``python -m convmesh.training.verify_worker RUN_FOLDER MESH DEVICE THREADS``.

The run folder holds ``exercise.json``, which says what to do. Each rank leaves its observation there.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from convmesh.config import RunConfig
from convmesh.config.schema import ChannelsConfig
from convmesh.data.open import open_data
from convmesh.data.reader import TrainReader
from convmesh.engines import load_engine
from convmesh.engines.contract import Batch, CollectiveCount, Exercise, Observation, World
from convmesh.training import worker
from convmesh.training.planning import make_network
from convmesh.training.run_folder import RunFolder, write_json
from convmesh.training.sync import check_sync

VARIANTS = ("", "reordered", "jittered")
"""Folders below the run folder in which one device leaves what it saw.

As the run says; with each micro-batch reversed and other kernels where there are some; and with every parameter changed
in its last bit at the start, which stands for other roundings everywhere.
"""

_WHOLE = ("gradients", "parameters", "buffers", "start")


@dataclass(frozen=True)
class Task:
    """What the ranks of one folder do.

    Args:
        num_shards: Size of the data axis of the mesh that is verified.
        num_updates: Updates.
        dtype: Data type of parameters and input.
        norm_shift: What the shifts of norms start at; None leaves them.
        one_device: Whether one rank does the work of all: once as the run says, and twice with sums in other orders, in
            the order of ``VARIANTS``.
        reverses: Whether one of them may reverse the samples of each micro-batch.
    """

    num_shards: int
    num_updates: int
    dtype: str
    norm_shift: float | None = None
    one_device: bool = False
    reverses: bool = False

    def write(self, folder: RunFolder) -> None:
        """Leaves it in a run folder."""
        write_json(folder.root / "exercise.json", asdict(self))

    @classmethod
    def read(cls, folder: RunFolder) -> Task:
        """Reads it from a run folder."""
        return cls(**json.loads((folder.root / "exercise.json").read_text(encoding="utf-8")))


def run_exercise(run: RunConfig, *, world: World, folder: RunFolder) -> None:
    """Does the task of a folder on one rank.

    Args:
        run: The run.
        world: Where this rank stands.
        folder: The run folder.
    """
    task = Task.read(folder)
    engine = load_engine(run.engine)
    engine.start(world)
    try:
        if task.one_device:
            # What is compared with knows nothing of regrouped channels either.
            run = dataclasses.replace(run, data=dataclasses.replace(run.data, channels=ChannelsConfig()))
        datasets = open_data(run.data)
        network = make_network(engine, run, datasets)
        shards = range(task.num_shards) if task.one_device else [world.shard]
        readers = [TrainReader(datasets, run, num_shards=task.num_shards, shard=shard) for shard in shards]
        exercise = Exercise(
            pixel_scale=datasets.pixel_scale,
            updates=[read_updates(reader, task.num_updates) for reader in readers],
            counts=[readers[0].global_count(0, update) for update in range(task.num_updates)],
            dtype=task.dtype,
            norm_shift=task.norm_shift,
        )
        module = importlib.import_module(f"convmesh.engines.{run.engine}.verification")
        if task.one_device:
            seen_alone = module.observe_one_device(engine, network, run, variants(exercise, reverses=task.reverses))
            for name, seen in zip(VARIANTS, seen_alone, strict=True):
                save_observation(seen, folder.root / name, rank=0, whole=True)
        else:
            seen = module.observe_ranks(engine, network, run, exercise)
            # The tensors of an observation are whole: equal on all ranks if the parts of each are.
            check_sync({**seen.parameters, **seen.buffers}, all_gather=engine.all_gather, when="at the end")
            save_observation(seen, folder.root, rank=world.rank, whole=world.rank == 0)
        engine.all_gather(None)
    finally:
        engine.stop()


def read_updates(reader: TrainReader, num_updates: int) -> list[list[Batch]]:
    """The micro-batches of a shard, per update of the first epoch.

    Args:
        reader: Of the shard.
        num_updates: How many updates.

    Returns:
        Per update its micro-batches.
    """
    updates: list[list[Batch]] = [[] for _ in range(num_updates)]
    for key in reader.keys(0):
        if key[1] < num_updates:
            updates[key[1]].append(reader.read(key))
    return updates


def variants(exercise: Exercise, *, reverses: bool) -> list[Exercise]:
    """An exercise, and the same with sums in other orders, in the order of ``VARIANTS``.

    Args:
        exercise: The exercise.
        reverses: Whether the samples of each micro-batch may be reversed.

    Returns:
        The exercises.
    """
    updates = exercise.updates
    if reverses:
        updates = [[[_reversed(batch) for batch in batches] for batches in of_shard] for of_shard in updates]
    return [
        exercise,
        replace(exercise, updates=updates, other_kernels=True),
        replace(exercise, jitter=1),
    ]


def _reversed(batch: Batch) -> Batch:
    return Batch(batch.images_NHWC[::-1].copy(), batch.labels_N[::-1].copy(), batch.weights_N[::-1].copy())


def save_observation(seen: Observation, folder: Path, *, rank: int, whole: bool) -> None:
    """Writes an observation.

    Args:
        seen: The observation.
        folder: Where to.
        rank: Of the rank that made it.
        whole: Whether to write the whole tensors too, which all ranks have alike.
    """
    arrays = {f"output/{index}": output for index, output in enumerate(seen.outputs)}
    for kind in _WHOLE if whole else ():
        arrays |= {f"{kind}/{name}": array for name, array in getattr(seen, kind).items()}
    folder.mkdir(exist_ok=True)
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / f"{rank}.safetensors")
    facts = {
        "losses": seen.losses,
        "saved_bytes": seen.saved_bytes,
        "peak_memory_bytes": seen.peak_memory_bytes,
        "parameter_bytes": seen.parameter_bytes,
        "buffer_bytes": seen.buffer_bytes,
        "collectives": [asdict(count) for count in seen.collectives],
    }
    write_json(folder / f"{rank}.json", facts)


def load_observation(folder: Path, *, rank: int) -> Observation:
    """Reads an observation.

    Args:
        folder: Where it was written.
        rank: Of the rank that made it.

    Returns:
        The observation; without whole tensors if they were not written.
    """
    facts: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
    parts: dict[str, dict[str, Any]] = {"output": {}, **{kind: {} for kind in _WHOLE}}
    for key, array in load_file(folder / f"{rank}.safetensors").items():
        kind, _, name = key.partition("/")
        parts[kind][name] = array
    return Observation(
        losses=tuple(facts["losses"]),
        outputs=tuple(parts["output"][str(index)] for index in range(len(parts["output"]))),
        **{kind: parts[kind] for kind in _WHOLE},
        saved_bytes=facts["saved_bytes"],
        peak_memory_bytes=facts["peak_memory_bytes"],
        parameter_bytes=tuple(facts["parameter_bytes"]),
        buffer_bytes=facts["buffer_bytes"],
        collectives=tuple(CollectiveCount(**count) for count in facts["collectives"]),
    )


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:], run=run_exercise))

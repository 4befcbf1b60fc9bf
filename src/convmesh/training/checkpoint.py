"""Checkpoints: whole tensors in safetensors files beside a JSON, complete or not there at all.

A checkpoint is a folder ``update_00000120``: it is written under a temporary name, flushed to disk, and renamed. Its
``state.json`` holds position, loss scale, versions and the SHA-256 of each tensor file. Tensors are whole and have
engine-neutral names, so that any mesh and, for the network, either engine can load them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from convmesh.engines.contract import Arrays, TrainState
from convmesh.errors import CheckpointError

_SCHEMA_VERSION = 1
_PARTS = ("network", "optimizer", "average")


@dataclass
class Progress:
    """Where a run stands, beside its tensors.

    Args:
        update: Updates done since the start of the run, skipped ones included.
        epoch: The epoch of the next update.
        update_in_epoch: Position of the next update in that epoch.
        loss_scale: The scaler: ``scale``, ``num_quiet``, ``num_skipped``.
        epoch_sums: Over the part of the epoch that is done: ``loss_sum``, ``num_samples``, ``num_skipped_samples``.
        best_accuracy: Best evaluation so far, or None.
        best_update: Its update.
        accuracy: The latest evaluation, or None.
        loss: Its loss.
        resumed_from: Updates from which the run was resumed so far.
    """

    update: int = 0
    epoch: int = 0
    update_in_epoch: int = 0
    loss_scale: dict[str, float] = field(default_factory=dict)
    epoch_sums: dict[str, float] = field(default_factory=dict)
    best_accuracy: float | None = None
    best_update: int | None = None
    accuracy: float | None = None
    loss: float | None = None
    resumed_from: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read back.

    Args:
        path: Its folder.
        state: Tensors.
        progress: Position.
        about: Everything else of ``state.json``, such as versions and mesh.
    """

    path: Path
    state: TrainState
    progress: Progress
    about: Mapping[str, Any]


def save_checkpoint(
    folder: Path, state: TrainState, *, progress: Progress, about: Mapping[str, Any] | None = None
) -> Path:
    """Writes a checkpoint.

    Args:
        folder: The folder of all checkpoints.
        state: Whole tensors.
        progress: Position; its ``update`` names the checkpoint.
        about: More to note, such as versions and mesh.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: If it can't be written; earlier checkpoints stay as they are.
    """
    final = folder / f"update_{progress.update:08d}"
    partial = folder / f".partial-{final.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        files = {f"{part}.safetensors": getattr(state, part) for part in _PARTS if getattr(state, part)}
        for name, arrays in files.items():
            save_file(arrays, partial / name)
        content = {
            "schema_version": _SCHEMA_VERSION,
            "progress": asdict(progress),
            "num_updates": state.num_updates,
            "files": {name: _digest(partial / name) for name in files},
            **(about or {}),
        }
        (partial / "state.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        _flush(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _flush_folder(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint {final} can't be written",
            got=getattr(error, "strerror", None) or str(error),
            fix="Free disk space, then go on with --resume; earlier checkpoints are intact",
        ) from None
    return final


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint and checks its digests.

    Args:
        path: Its folder.

    Returns:
        Tensors and position.

    Raises:
        CheckpointError: If it is missing, damaged or of another version.
    """
    try:
        content = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise CheckpointError(
            f"{path} is not a checkpoint", fix="Give a folder like checkpoints/update_00000120"
        ) from None
    if content.get("schema_version") != _SCHEMA_VERSION:
        raise CheckpointError(
            f"the checkpoint {path} has another format", got=content.get("schema_version"), expected=_SCHEMA_VERSION
        )
    parts: dict[str, Arrays] = {}
    for name, digest in content["files"].items():
        parts[name.removesuffix(".safetensors")] = _read_part(path / name, digest)
    known = {"schema_version", "progress", "num_updates", "files"}
    return Checkpoint(
        path=path,
        state=TrainState(**{"network": {}, **parts}, num_updates=content["num_updates"]),
        progress=Progress(**content["progress"]),
        about={key: value for key, value in content.items() if key not in known},
    )


def find_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, newest first."""
    return sorted((path.parent for path in folder.glob("update_*/state.json")), reverse=True)


def load_newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Reads the newest checkpoint that is whole.

    Args:
        folder: The folder of all checkpoints.

    Returns:
        The checkpoint, or None if there is none yet, and a sentence about each damaged one that was passed over.

    Raises:
        CheckpointError: If there are checkpoints but all are damaged.
    """
    paths = find_checkpoints(folder)
    problems: list[str] = []
    for path in paths:
        try:
            return load_checkpoint(path), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("no checkpoint is whole", got=" ".join(problems), fix="Start the run anew")
    return None, problems


def prune_checkpoints(folder: Path, *, keep: int, best_update: int | None) -> None:
    """Removes all but the newest checkpoints and the best one, and what interrupted writes left.

    Args:
        folder: The folder of all checkpoints.
        keep: How many of the newest stay.
        best_update: Update of the best one, which stays too.
    """
    for partial in folder.glob(".partial-*"):
        shutil.rmtree(partial, ignore_errors=True)
    for path in find_checkpoints(folder)[keep:]:
        if path.name != f"update_{best_update or 0:08d}":
            # Without its state.json a folder is no checkpoint: a crash half way leaves nothing that looks whole.
            (path / "state.json").unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def _read_part(path: Path, digest: str) -> Arrays:
    if not path.exists() or _digest(path) != digest:
        raise CheckpointError(f"{path} is damaged: its digest is not the one that was noted when it was written")
    arrays: Arrays = load_file(path)
    return arrays


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    with _opened(folder) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

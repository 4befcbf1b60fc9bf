"""Checkpoints and the synchronisation check for a training loop of your own; a plain network and optimizer do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convmesh.engines import engine_of
from convmesh.engines.contract import TrainState
from convmesh.errors import CheckpointError
from convmesh.training import checkpoint as files
from convmesh.training import sync


def save_checkpoint(folder: str | Path, network: Any, optimizer: Any = None, *, update: int, keep: int = 3) -> Path:
    """Writes a checkpoint of a network and optimizer; call it on one rank.

    The checkpoint is complete or not there at all, whatever happens while it is written.

    Args:
        folder: The folder of all checkpoints; created if missing.
        network: An ``nn.Cell`` or ``nn.Module``.
        optimizer: Its optimizer, whole on this rank, or None.
        update: Updates done so far; names the checkpoint.
        keep: Newest checkpoints that stay.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: If it can't be written; earlier checkpoints stay as they are.
        EngineError: If this is not a network of a known engine.
    """
    engine = engine_of(network)
    state = _part(engine, "state")
    tensors = TrainState(
        network=state.export_network(network),
        optimizer=state.export_optimizer(optimizer, network) if optimizer is not None else {},
        num_updates=update,
    )
    progress = files.Progress(update=update)
    path = files.save_checkpoint(Path(folder), tensors, progress=progress, about={"engine": engine})
    files.prune_checkpoints(Path(folder), keep=keep, best_update=None)
    return path


def load_checkpoint(path: str | Path, network: Any, optimizer: Any = None) -> int:
    """Reads a checkpoint into a network and optimizer; call it on every rank.

    Args:
        path: A checkpoint, or a folder of checkpoints, of which the newest whole one is taken. Those of
            ``convmesh train`` can be read too, of either engine as far as the network goes.
        network: An ``nn.Cell`` or ``nn.Module``; changed only if all names and shapes fit.
        optimizer: Its optimizer, or None.

    Returns:
        The number of updates that had been done.

    Raises:
        CheckpointError: If there is none, or names or shapes don't fit; all of them are listed.
        EngineError: If this is not a network of a known engine.
    """
    found = _read(Path(path))
    state = _part(engine_of(network), "state")
    if optimizer is not None and not found.state.optimizer:
        raise CheckpointError(f"the checkpoint {found.path} holds no optimizer state", fix="Load it without optimizer")
    state.import_network(network, found.state.network)
    if optimizer is not None:
        state.import_optimizer(optimizer, network, found.state.optimizer)
    return found.progress.update


def check_sync(network: Any, *, when: str = "now", all_gather: Callable[[Any], list[Any]] | None = None) -> None:
    """Checks that every rank holds the same parameters and buffers; all ranks must call it.

    Args:
        network: An ``nn.Cell`` or ``nn.Module``.
        when: Where in the run this is, for the message ("after update 40").
        all_gather: Gathers a small value of every rank, in rank order; by default over all ranks that your own
            ``torch.distributed`` or ``mindspore.communication`` was initialised with.

    Raises:
        SyncError: On every rank alike, naming the first differing tensor and the ranks.
        EngineError: If this is not a network of a known engine.
    """
    engine = engine_of(network)
    gather = all_gather or _part(engine, "collectives").gather_values
    sync.check_sync(_part(engine, "state").export_network(network), all_gather=gather, when=when)


def _read(path: Path) -> files.Checkpoint:
    if (path / "state.json").exists():
        return files.load_checkpoint(path)
    found, _ = files.load_newest(path)
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return found


def _part(engine: str, name: str) -> Any:
    return importlib.import_module(f"convmesh.engines.{engine}.{name}")

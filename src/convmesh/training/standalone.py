"""Checkpoints, the synchronisation check, regrouped and split networks for a training loop of your own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.engines import engine_of, has_part
from convmesh.engines.contract import Arrays, TrainState
from convmesh.errors import CheckpointError, EngineError
from convmesh.geometry.regrouping import ChannelRegrouping
from convmesh.plan import Plan
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
    whole = _converter(network, "to_original")
    tensors = TrainState(
        network=whole(state.export_network(network)),
        optimizer=whole(state.export_optimizer(optimizer, network)) if optimizer is not None else {},
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
    own = _converter(network, "to_regrouped")
    state.import_network(network, own(found.state.network))
    if optimizer is not None:
        state.import_optimizer(optimizer, network, own(found.state.optimizer))
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


def regroup_channels(network: Any, regrouping: ChannelRegrouping, example: Sequence[int]) -> Any:
    """Makes a network take images with regrouped channels, and compute from them what it computed from the images.

    Call it before an optimizer is made, and before ``parallelize``; hand every batch to ``regroup_images`` first.
    Checkpoints and ``gather_state`` hold the weights of the network before.

    Args:
        network: An ``nn.Cell`` or ``nn.Module``; its first convolution is replaced in place.
        regrouping: For example ``ChannelRegrouping.of(3, space_to_depth=2)``.
        example: Shape of a batch before, like ``(2, 3, 224, 224)``; any number of samples that the network takes.

    Returns:
        The network.

    Raises:
        ConfigError: If the regrouping does not fit the images or the convolution that takes them.
        EngineError: If this is not a network of a known engine.
        ModelError: If something else than one convolution takes the images.
        MistakeList: If several things are wrong.
    """
    num_samples, *image_shape = example
    regroup = _part(engine_of(network), "regroup").regroup_channels
    return regroup(network, regrouping, image_shape=tuple(image_shape), num_samples=num_samples)


def regroup_images(images: Any, regrouping: ChannelRegrouping) -> Any:
    """Regroups the channels of a batch.

    Args:
        images: An array or a tensor of PyTorch or MindSpore, (N, C, then the spatial dims), scaled: zero channels hold
            the number 0.
        regrouping: Of their channels.

    Returns:
        The same kind, (N, regrouped channels, then the sizes in blocks).

    Raises:
        ConfigError: If the images have other channels, or do not divide into blocks.
        EngineError: If this is no batch of a known engine.
    """
    if isinstance(images, np.ndarray):
        return regrouping.images(images)
    return _part(engine_of(images), "regroup").regroup_images(images, regrouping)


def parallelize(network: Any, plan: Plan) -> Any:
    """Splits a network over the ranks of your own training loop; all ranks call it with equal networks.

    Args:
        network: An ``nn.Cell`` or ``nn.Module``; changed in place, its parameters become this rank's parts.
        plan: Made by ``plan_by_rule``, or read by ``load_plan``; its mesh says how many ranks there are.

    Returns:
        The network, to be called as before: with the samples of this rank's position on the data axis.

    Raises:
        ConfigError: If the plan does not fit the ranks.
        EngineError: If the network's engine can't split it.
        ModelError: If the plan is for another network, or the network can't be split so.
        MistakeList: If several things are wrong.
    """
    return _split_part(network).parallelize(network, plan)


def reduce_gradients(network: Any, gradients: Any = None) -> Any:
    """Sums the gradients of a split network over the data axis, after the last backward of an update.

    Every rank back-propagates its own samples' losses divided by the number of samples of the *global* batch.

    Args:
        network: Split by ``parallelize``.
        gradients: On MindSpore, in the order of ``network.trainable_params()``; PyTorch's are in the parameters.

    Returns:
        On MindSpore the sums, in the same order.

    Raises:
        EngineError: If the network's engine can't split it.
        ModelError: If it is not split.
    """
    reduce = _split_part(network).reduce_gradients
    return reduce(network) if gradients is None else reduce(network, gradients)


def gather_state(network: Any) -> Arrays:
    """Whole parameters and buffers of a split network; all ranks call it.

    Args:
        network: Split by ``parallelize``.

    Returns:
        Arrays by the names of the network it was made of.

    Raises:
        EngineError: If the network's engine can't split it.
    """
    arrays: Arrays = _split_part(network).gather_state(network)
    return arrays


def _converter(network: Any, way: str) -> Callable[[Arrays], Arrays]:
    """From tensors of a network to those of the network before its images were regrouped, or back."""
    layer = _part(engine_of(network), "regroup").regrouped_of(network)
    return dict if layer is None else getattr(layer, way)


def _split_part(network: Any) -> Any:
    engine = engine_of(network)
    if not has_part(engine, "parallelize"):
        raise EngineError(f"this version can't split networks of {engine} along channels", fix="Use PyTorch for it")
    return _part(engine, "parallelize")


def _read(path: Path) -> files.Checkpoint:
    if (path / "state.json").exists():
        return files.load_checkpoint(path)
    found, _ = files.load_newest(path)
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return found


def _part(engine: str, name: str) -> Any:
    return importlib.import_module(f"convmesh.engines.{engine}.{name}")

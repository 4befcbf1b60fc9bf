"""Metrics sinks beside the run folder's own ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow, SwanLab."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from convmesh.config import RunConfig
from convmesh.config.load import plain_config
from convmesh.errors import ConfigError, ConvMeshError
from convmesh.training.sinks.background import BackgroundSink, OnEvent
from convmesh.training.sinks.tracker import RunAbout, Tracker


@dataclass(frozen=True)
class _Library:
    """What a sink needs: a module, installed with the extra of the sink's name, and the tracker that uses it."""

    module: str
    tracker: str


_LIBRARIES: Mapping[str, _Library] = {
    "tensorboard": _Library("tensorboardX", "convmesh.training.sinks.tensorboard:TensorBoard"),
    "wandb": _Library("wandb", "convmesh.training.sinks.wandb:WeightsAndBiases"),
    "mlflow": _Library("mlflow", "convmesh.training.sinks.mlflow:MLflow"),
    "swanlab": _Library("swanlab", "convmesh.training.sinks.swanlab:SwanLab"),
}


def missing_sinks(run: RunConfig) -> list[ConvMeshError]:
    """The sinks of a run whose library is not installed; imports none of them."""
    return [
        ConfigError(
            f"the sink '{name}' in train.sinks is not installed",
            got=f"no module '{_LIBRARIES[name].module}'",
            fix=f"Install it with: pip install 'convmesh[{name}]'",
        )
        for name in run.train.sinks
        if importlib.util.find_spec(_LIBRARIES[name].module) is None
    ]


def open_sinks(run: RunConfig, *, run_dir: Path, update: int, on_event: OnEvent) -> list[BackgroundSink]:
    """Opens the sinks of a run, each in a thread of its own; only one rank may.

    Args:
        run: The run.
        run_dir: The run folder.
        update: Updates that were done before.
        on_event: Takes remarks of the sinks; called from any thread.

    Returns:
        The sinks, which never fail.
    """
    about = RunAbout(run_dir=run_dir, project=run.train.project, update=update, config=plain_config(run))
    return [
        BackgroundSink(name, lambda name=name: _open(name, about), on_event=on_event)  # type: ignore[misc]
        for name in run.train.sinks
    ]


def _open(name: str, about: RunAbout) -> Tracker:
    module, _, attribute = _LIBRARIES[name].tracker.partition(":")
    tracker: Tracker = getattr(importlib.import_module(module), attribute)(about)
    return tracker

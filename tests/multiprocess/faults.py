"""Observing ranks after a mistake was planted in what they train with; `torch_faults` and `mindspore_faults` plant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

from convmesh.config import RunConfig
from convmesh.engines.contract import Engine, Exercise, Observation, World


def observe_faulty(
    engine: Engine,
    placed: World,
    network: Any,
    *,
    run: RunConfig,
    exercise: Exercise,
    plant: Callable[[Any, Any], None],
    observe_ranks: Callable[..., Observation],
) -> Observation:
    """What a rank sees of a run with a fault.

    Args:
        engine: Started.
        placed: Where the rank stands.
        network: Whole.
        run: The run.
        exercise: With the micro-batches of all positions on the data axis.
        plant: Given the split network and its training step, plants the mistake.
        observe_ranks: Of the engine's verification.
    """
    build_step = engine.build_step
    exercise = dataclasses.replace(exercise, updates=[exercise.updates[placed.shard]])

    def build_faulty(network: Any, *args: Any, **options: Any) -> Any:
        step = build_step(network, *args, **options)
        plant(network, step)
        return step

    with mock.patch.object(engine, "build_step", build_faulty):
        return observe_ranks(engine, network, run, exercise)

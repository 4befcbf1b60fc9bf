"""Training for a few updates while everything is noted, on all ranks and on one device, so that both can be compared.

The one device knows nothing of axes, collectives and sharded layers: it runs the user's own network on each shard's
micro-batches, one after the other, sums the gradients, and averages what each shard made of the buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from convmesh.config.schema import RunConfig
from convmesh.engines.contract import Arrays, Batch, Exercise, Observation, PixelScale
from convmesh.engines.mindspore.channel_split import split_of
from convmesh.engines.mindspore.collectives import DataAxis, as_scalar
from convmesh.engines.mindspore.engine import MindSporeEngine
from convmesh.engines.mindspore.gradients import Backward
from convmesh.engines.mindspore.loader import to_device
from convmesh.engines.mindspore.objective import Loss
from convmesh.engines.mindspore.optimizer import Optimizer
from convmesh.engines.mindspore.state import assign_array, export_parameters, import_parameters, named_parameters
from convmesh.engines.observing import jittered
from convmesh.errors import ConfigError

NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
"""Cells whose ``beta`` shifts normalised values."""


def observe_ranks(engine: MindSporeEngine, network: nn.Cell, run: RunConfig, exercise: Exercise) -> Observation:
    """Trains on the ranks of a started engine; all ranks call it.

    Args:
        engine: Started.
        network: Whole, on every rank.
        run: The run.
        exercise: With the micro-batches of this rank's position on the data axis alone.

    Returns:
        What was seen: whole tensors, and losses and outputs of this rank's samples.

    Raises:
        ConfigError: If anything else than float32 is asked for.
    """
    _begin(network, exercise)
    step = engine.build_step(network, run, pixel_scale=exercise.pixel_scale)
    notes = _Notes(network)
    step.on_scores, step.on_gradients = notes.take_scores, notes.take_gradients
    for index, (batches, count) in enumerate(zip(exercise.updates[0], exercise.counts, strict=True)):
        result = step.update(
            batches,
            global_count=count,
            learning_rate=run.optimizer.learning_rate,
            loss_scale=1.0,
            update_index=index,
        )
        notes.losses.append(float(result.loss_sum) / count)
    return notes.observation(
        step.whole(notes.gradients),
        step.export_state().network,
        peak_memory_bytes=engine.peak_memory_bytes(),
        collectives=step.collectives(),
    )


def observe_one_device(
    engine: MindSporeEngine, network: nn.Cell, run: RunConfig, exercises: Sequence[Exercise]
) -> list[Observation]:
    """Trains on one device as plain MindSpore does, from the same state for each exercise.

    Args:
        engine: Started on a single rank.
        network: Whole.
        run: The run.
        exercises: With the micro-batches of all positions on the data axis; all have the same scale of pixels.
            MindSpore has no other kernels to choose.

    Returns:
        What was seen, one per exercise; the memory is told by the first.

    Raises:
        ConfigError: If anything else than float32 is asked for.
    """
    named = named_parameters(network)
    start = export_parameters(named)
    # Graphs are compiled once for all exercises.
    device = OneDevice(network, run, pixel_scale=exercises[0].pixel_scale)
    observed = []
    for exercise in exercises:
        import_parameters(named, start)
        device.restart()
        _begin(network, exercise)
        before = export_parameters({name: parameter for name, parameter in named.items() if parameter.requires_grad})
        notes = _Notes(network)
        for index, count in enumerate(exercise.counts):
            shards = [of_shard[index] for of_shard in exercise.updates]
            notes.losses.append(device.update(shards, count=count, notes=notes))
        observed.append(
            notes.observation(
                notes.gradients, export_parameters(named), peak_memory_bytes=engine.peak_memory_bytes(), start=before
            )
        )
    return observed


def _begin(network: nn.Cell, exercise: Exercise) -> None:
    """Brings a network into the state that an exercise starts from."""
    if exercise.dtype != "float32":
        raise ConfigError(
            "MindSpore can verify in float32 only: its convolutions know no larger type",
            got=exercise.dtype,
            fix="Leave out --dtype, or use --engine torch",
        )
    if exercise.norm_shift is not None:
        for _, cell in network.cells_and_names():
            shift = getattr(cell, "beta", None)
            if isinstance(cell, NORMS) and isinstance(shift, Parameter):
                assign_array(shift, np.full(shift.shape, exercise.norm_shift, np.float32))
    if exercise.jitter is not None:
        trained = {name: entry for name, entry in named_parameters(network).items() if entry.requires_grad}
        import_parameters(trained, jittered(export_parameters(trained), seed=exercise.jitter))


class OneDevice:
    """A network trained on one device with the micro-batches of all shards.

    Args:
        network: The network.
        run: The run.
        pixel_scale: How pixels become the network's input.
    """

    def __init__(self, network: nn.Cell, run: RunConfig, *, pixel_scale: PixelScale) -> None:
        self._network = network
        self._run = run
        named = named_parameters(network)
        self._trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self._buffers = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        loss = Loss(network, pixel_scale, label_smoothing=run.train.label_smoothing)
        self._backward = Backward(loss, self._trained, None)
        self._optimizer = Optimizer(
            self._trained, run.optimizer, axis=DataAxis(), shard=False, buckets=(1,) * len(self._trained)
        )
        self._num_updates = 0

    def restart(self) -> None:
        """Forgets what the optimizer knows."""
        self._optimizer.import_state({})
        self._num_updates = 0

    def update(self, shards: Sequence[Sequence[Batch]], *, count: int, notes: _Notes | None) -> float:
        """Runs one update.

        Args:
            shards: The micro-batches of each position on the data axis.
            count: Samples of the global batch.
            notes: Takes outputs and gradients, or None.

        Returns:
            The mean loss of the global batch.
        """
        self._network.set_train()
        before = export_parameters(self._buffers)
        after = {name: np.zeros_like(array) for name, array in before.items()}
        loss_sum = 0.0
        gradients = {name: np.zeros(parameter.shape, np.float32) for name, parameter in self._trained.items()}
        for batches in shards:
            taken = [to_device(batch) for batch in batches]
            num_real = sum(batch.num_real for batch in taken)
            if not num_real:
                continue
            import_parameters(self._buffers, before)
            for batch in taken:
                inputs = (batch.images_NHWC, batch.labels_N, batch.weights_N)
                loss, scores_NK, *found = self._backward(*inputs, as_scalar(1 / count))
                loss_sum += float(loss.asnumpy())
                for name, gradient in zip(gradients, found, strict=True):
                    gradients[name] += gradient.asnumpy()
                if notes is not None:
                    notes.take_scores(scores_NK)
            for name, array in export_parameters(self._buffers).items():
                after[name] += array * np.float32(num_real / count)
        if notes is not None:
            notes.take_gradients({name: Tensor(gradient) for name, gradient in gradients.items()})
        self._apply([Tensor(gradient) for gradient in gradients.values()])
        import_parameters(self._buffers, after)
        return loss_sum / count

    def _apply(self, gradients: Sequence[Tensor]) -> None:
        self._optimizer.apply(
            gradients,
            learning_rate=self._run.optimizer.learning_rate,
            loss_scale=1.0,
            num_updates=self._num_updates,
        )
        self._num_updates += 1


class _Notes:
    """What is noted while a network trains: outputs and first gradients."""

    def __init__(self, network: nn.Cell) -> None:
        self._named = named_parameters(network)
        self._split = split_of(network)
        self._outputs: list[np.ndarray] = []
        self.losses: list[float] = []
        self.gradients: Arrays = {}

    def take_scores(self, scores_NK: Tensor) -> None:
        """Notes the output of one forward."""
        self._outputs.append(scores_NK.asnumpy().copy())

    def take_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Notes the gradients of the first update."""
        if not self.gradients:
            self.gradients = {name: gradient.asnumpy().copy() for name, gradient in gradients.items()}

    def observation(self, gradients: Arrays, state: Arrays, **facts: Any) -> Observation:
        """All that was noted."""
        trained = {name: parameter for name, parameter in self._named.items() if parameter.requires_grad}
        parts = {name for name in trained if self._split is not None and self._split.is_of_data(name)}
        return Observation(
            losses=tuple(self.losses),
            outputs=tuple(self._outputs),
            gradients=gradients,
            parameters={name: array for name, array in state.items() if name in trained},
            buffers={name: array for name, array in state.items() if name not in trained},
            saved_bytes=None,
            parameter_bytes=tuple(parameter.nbytes for name, parameter in trained.items() if name not in parts),
            buffer_bytes=sum(parameter.nbytes for name, parameter in self._named.items() if name not in trained),
            **facts,
        )

"""Training for a few updates while everything is noted, on all ranks and on one device, so that both can be compared.

The one device knows nothing of axes, collectives and sharded layers: it runs the user's own network on each shard's
micro-batches, one after the other, sums the gradients, and averages what each shard made of the buffers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from convmesh.config.schema import RunConfig
from convmesh.engines.contract import Arrays, Batch, Exercise, Observation, PixelScale
from convmesh.engines.observing import jittered
from convmesh.engines.torch.channel_split import split_of
from convmesh.engines.torch.collectives import DataAxis
from convmesh.engines.torch.engine import TorchEngine
from convmesh.engines.torch.loader import to_device
from convmesh.engines.torch.objective import DTYPES, Objective
from convmesh.engines.torch.optimizer import Optimizer
from convmesh.engines.torch.state import copy_arrays, export_network, to_array
from convmesh.engines.torch.train_step import seed_generators

NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
"""Modules whose ``bias`` shifts normalised values."""


def observe_ranks(engine: TorchEngine, network: nn.Module, run: RunConfig, exercise: Exercise) -> Observation:
    """Trains on the ranks of a started engine; all ranks call it.

    Args:
        engine: Started.
        network: Whole, on every rank.
        run: The run.
        exercise: With the micro-batches of this rank's position on the data axis alone.

    Returns:
        What was seen: whole tensors, and losses and outputs of this rank's samples.
    """
    _begin(network, exercise)
    step = engine.build_step(network, run, pixel_scale=exercise.pixel_scale)
    notes = _Notes(network)
    step.on_gradients = notes.take_gradients
    for index, (batches, count) in enumerate(zip(exercise.updates[0], exercise.counts, strict=True)):
        with notes.saved_bytes(only=index == 0):
            result = step.update(
                batches,
                global_count=count,
                learning_rate=run.optimizer.learning_rate,
                loss_scale=1.0,
                update_index=index,
            )
        notes.losses.append(float(result.loss_sum) / count)
    notes.close()
    return notes.observation(
        step.whole(notes.gradients),
        step.export_state().network,
        peak_memory_bytes=engine.peak_memory_bytes(),
        collectives=step.collectives(),
    )


def observe_one_device(
    engine: TorchEngine, network: nn.Module, run: RunConfig, exercises: Sequence[Exercise]
) -> list[Observation]:
    """Trains on one device as plain PyTorch does, from the same state for each exercise.

    Args:
        engine: Started on a single rank.
        network: Whole.
        run: The run.
        exercises: With the micro-batches of all positions on the data axis.

    Returns:
        What was seen, one per exercise; the memory is told by the first.
    """
    observed = []
    for exercise in exercises:
        own = copy.deepcopy(network)
        _begin(own, exercise)
        if run.train.channels_last:
            own.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        observed.append(_observe_alone(engine, own, run, exercise))
    return observed


def _begin(network: nn.Module, exercise: Exercise) -> None:
    """Brings a network into the state that an exercise starts from."""
    network.to(_dtype(exercise))
    if exercise.norm_shift is not None:
        for module in network.modules():
            shift = getattr(module, "bias", None)
            if isinstance(module, NORMS) and isinstance(shift, nn.Parameter):
                nn.init.constant_(shift, exercise.norm_shift)
    if exercise.jitter is not None:
        parameters = {name: to_array(parameter) for name, parameter in network.named_parameters()}
        with torch.no_grad():
            copy_arrays(dict(network.named_parameters()), jittered(parameters, seed=exercise.jitter))


def _observe_alone(engine: TorchEngine, network: nn.Module, run: RunConfig, exercise: Exercise) -> Observation:
    start = {name: to_array(parameter).copy() for name, parameter in network.named_parameters()}
    device = OneDevice(network, run, pixel_scale=exercise.pixel_scale)
    notes = _Notes(network)
    with contextlib.ExitStack() as stack:
        for library in (torch.backends.mkldnn, torch.backends.cudnn) if exercise.other_kernels else ():
            stack.enter_context(library.flags(enabled=False))
        for index, count in enumerate(exercise.counts):
            shards = [of_shard[index] for of_shard in exercise.updates]
            with notes.saved_bytes(only=index == 0):
                loss = device.update(shards, count=count, index=index, notes=notes)
            notes.losses.append(loss)
    notes.close()
    return notes.observation(
        notes.gradients, export_network(network), peak_memory_bytes=engine.peak_memory_bytes(), start=start
    )


class OneDevice:
    """A network trained on one device with the micro-batches of all shards.

    Args:
        network: On its device.
        run: The run.
        pixel_scale: How pixels become the network's input.
    """

    def __init__(self, network: nn.Module, run: RunConfig, *, pixel_scale: PixelScale) -> None:
        first = next(network.parameters())
        self._network = network
        self._run = run
        self._device = first.device
        self._objective = Objective(
            pixel_scale,
            device=first.device,
            compute=DTYPES[run.precision.compute],
            channels_last=run.train.channels_last,
            dtype=first.dtype,
        )
        parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self._optimizer = Optimizer(parameters, run.optimizer, axis=DataAxis(None), shard=False)

    def update(self, shards: Sequence[Sequence[Batch]], *, count: int, index: int, notes: _Notes | None) -> float:
        """Runs one update.

        Args:
            shards: The micro-batches of each position on the data axis.
            count: Samples of the global batch.
            index: Number of the update.
            notes: Takes the gradients, or None.

        Returns:
            The mean loss of the global batch.
        """
        self._optimizer.clear_gradients()
        self._network.train()
        buffers = dict(self._network.named_buffers())
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        after = {name: torch.zeros_like(buffer) for name, buffer in buffers.items()}
        loss_sum = 0.0
        for shard, batches in enumerate(shards):
            num_real = sum(batch.num_real for batch in (to_device(batch, self._device) for batch in batches))
            for name, buffer in buffers.items():
                buffer.copy_(before[name])
            for micro, batch in enumerate(batches):
                if num_real:
                    seed_generators(self._run.train.seed, index, shard, micro)
                    loss_sum += self._backward(batch, count)
            for name, buffer in buffers.items():
                if buffer.is_floating_point():
                    after[name] += buffer * (num_real / count) if num_real else 0
                else:
                    after[name] = torch.maximum(after[name], buffer)
        if notes is not None:
            notes.take_gradients({n: p.grad for n, p in self._network.named_parameters() if p.grad is not None})
        self._optimizer.step(learning_rate=self._run.optimizer.learning_rate, loss_scale=1.0)
        for name, buffer in buffers.items():
            buffer.copy_(after[name])
        return loss_sum / count

    def _backward(self, batch: Batch, count: int) -> float:
        taken = to_device(batch, self._device)
        scores_NK = self._objective.scores(self._network, taken)
        losses_N = self._objective.losses(scores_NK, taken, label_smoothing=self._run.train.label_smoothing)
        loss = losses_N.sum()
        (loss / count).backward()
        return float(loss.detach())


class _Notes:
    """What is noted while a network trains: outputs, first gradients, and bytes that the backward keeps."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._handle = network.register_forward_hook(self._take_output)
        self._saved: dict[int, int] = {}
        self._most_saved = 0
        self._outputs: list[Tensor] = []
        self.losses: list[float] = []
        self.gradients: Arrays = {}

    def take_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Notes the gradients of the first update."""
        if not self.gradients:
            self.gradients = {name: to_array(gradient) for name, gradient in gradients.items()}

    @contextlib.contextmanager
    def saved_bytes(self, *, only: bool) -> Iterator[None]:
        """Counts the most that a forward keeps for its backward, each memory once, parameters not counted."""
        if not only:
            yield
            return
        own = {tensor.untyped_storage().data_ptr() for tensor in self._network.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                self._saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # The tensor itself could hold the function that holds it.

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def close(self) -> None:
        """Stops taking notes."""
        self._handle.remove()

    def observation(self, gradients: Arrays, state: Arrays, **facts: Any) -> Observation:
        """All that was noted."""
        trainable = {name for name, _ in self._network.named_parameters()}
        buffers = {name: buffer for name, buffer in self._network.named_buffers() if buffer.is_floating_point()}
        split = split_of(self._network)
        parts = split.of_data.shards if split is not None and split.of_data is not None else {}
        return Observation(
            losses=tuple(self.losses),
            outputs=tuple(to_array(output) for output in self._outputs),
            gradients=gradients,
            parameters={name: array for name, array in state.items() if name in trainable},
            buffers={name: array for name, array in state.items() if name not in trainable},
            saved_bytes=self._most_saved,
            parameter_bytes=tuple(
                _num_bytes(entry)
                for name, entry in self._network.named_parameters()
                if entry.requires_grad and name not in parts
            ),
            buffer_bytes=sum(_num_bytes(buffer) for name, buffer in buffers.items() if name not in parts),
            **facts,
        )

    def _take_output(self, _network: nn.Module, _inputs: Any, output: Tensor) -> None:
        self._outputs.append(output.detach())
        self._most_saved = max(self._most_saved, sum(self._saved.values()))
        self._saved.clear()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dtype(exercise: Exercise) -> torch.dtype:
    return {"float32": torch.float32, "float64": torch.float64}[exercise.dtype]

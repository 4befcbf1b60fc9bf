"""One update and one evaluation batch of a network on one rank; implements `convmesh.engines.contract.TrainStep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from convmesh.config.schema import RunConfig
from convmesh.engines.contract import Arrays, Batch, CollectiveCount, EvalSums, PixelScale, TrainState, UpdateResult
from convmesh.engines.filling import filled
from convmesh.engines.torch.average import WeightAverage
from convmesh.engines.torch.buffers import Buffers
from convmesh.engines.torch.channel_split import split_of
from convmesh.engines.torch.collectives import DataAxis
from convmesh.engines.torch.layer_times import LayerTimes
from convmesh.engines.torch.loader import TorchBatch, to_device
from convmesh.engines.torch.objective import DTYPES, Objective
from convmesh.engines.torch.optimizer import Optimizer
from convmesh.engines.torch.regroup import regrouped_of
from convmesh.engines.torch.state import copy_arrays, export_network, find_misfits, refuse_misfits
from convmesh.errors import CheckpointError, ModelError
from convmesh.profiling.recorder import RECORDER


class TorchTrainStep:
    """A network with everything that training it takes, on one rank.

    Args:
        network: On the device, its parameters and buffers equal on all ranks of the axis; it may be split along
            channels.
        run: The run.
        pixel_scale: How pixels become the network's input.
        axis: The data axis.

    Attributes:
        on_gradients: Called in every update with the reduced gradients, before they are clipped and applied.

    Raises:
        ModelError: If the network has nothing to train.
    """

    def __init__(self, network: nn.Module, run: RunConfig, *, pixel_scale: PixelScale, axis: DataAxis) -> None:
        parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
        if not parameters:
            raise ModelError("the network has no trainable parameter", got=type(network).__name__)
        first = next(iter(parameters.values()))
        self._network = network
        self._run = run
        self._axis = axis
        self._split = split_of(network)
        self._regrouped = regrouped_of(network)
        self._device = first.device
        self._num_updates = 0
        self._counts: tuple[CollectiveCount, ...] = ()
        self.on_gradients: Callable[[Mapping[str, Tensor]], None] | None = None
        self._objective = Objective(
            pixel_scale,
            device=first.device,
            compute=DTYPES[run.precision.compute],
            channels_last=run.train.channels_last,
            dtype=first.dtype,
        )
        # The optimizer may move parameters into a flat buffer, so it comes before what remembers where they are.
        self._optimizer = Optimizer(
            parameters, run.optimizer, axis=axis, shard=run.strategy.optimizer_sharding, split=self._split
        )
        parts = self._split.of_data.shards if self._split is not None and self._split.of_data is not None else {}
        self._buffers = Buffers(network, axis=axis, parts=parts)
        self._layers = LayerTimes(network, enabled=first.device.type == "cpu" and not run.train.profile.detail)
        self._average = WeightAverage(network, decay=run.train.weight_average) if run.train.weight_average > 0 else None
        self._parallel = axis.data_parallel(
            network,
            bucket_bytes=run.strategy.bucket_bytes,
            reduction=DTYPES[run.precision.gradient_reduction],
            parts=parts,
        )

    def update(
        self,
        micro_batches: Sequence[Batch],
        *,
        global_count: int,
        learning_rate: float,
        loss_scale: float,
        update_index: int,
    ) -> UpdateResult:
        """Runs one update; see `convmesh.engines.contract.TrainStep.update`.

        Gradients of all but the last micro-batch stay on this rank. A skipped update leaves parameters, optimizer,
        average and buffers as they were. PyTorch's global generators are seeded for each micro-batch.
        """
        self._axis.begin_update()
        self._layers.follow()
        if self._split is not None:
            self._split.begin_update()
        self._buffers.remember()
        self._optimizer.clear_gradients()
        if self._split is not None and self._split.of_data is not None:
            micro_batches = filled(micro_batches, run=self._run, num_shards=self._axis.size, global_count=global_count)
        batches = [to_device(batch, self._device) for batch in micro_batches]
        losses = []
        for micro, batch in enumerate(batches):
            self._seed(update_index, micro)
            last = micro == len(batches) - 1
            losses.append(self._backward(batch, factor=loss_scale / global_count, reduce=last))
        self._axis.count_used_parameters(self._network)
        if self.on_gradients is not None:
            self.on_gradients({name: p.grad for name, p in self._network.named_parameters() if p.grad is not None})
        with RECORDER.span("optimizer", "optimizer"):
            overflow, norm = self._optimizer.step(learning_rate=learning_rate, loss_scale=loss_scale)
        if overflow:
            self._buffers.restore()
        else:
            num_real = sum(batch.num_real for batch in batches)
            ragged = global_count != self._run.train.global_batch
            self._buffers.combine(weight=num_real / global_count, ragged=ragged)
            self._num_updates += 1
            if self._average is not None:
                self._average.update()
        self._counts = self._axis.counts() + (self._split.counts() if self._split is not None else ())
        return UpdateResult(
            loss_sum=torch.stack(losses).sum(),
            overflow=overflow,
            gradient_norm=norm if self._run.optimizer.clip_norm is not None else None,
        )

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> EvalSums:
        """Runs one batch in evaluation mode, with averaged weights if there are any; without label smoothing."""
        batch = to_device(batch, self._device)
        self._set_mode(training=False)
        forward = self._network if self._average is None else self._average.scores
        scores_NK = self._objective.scores(forward, batch)
        correct_N = (scores_NK.argmax(dim=1) == batch.labels_N) * batch.weights_N
        return EvalSums(
            loss_sum=self._objective.losses(scores_NK, batch).sum(),
            num_correct=correct_N.sum(),
            num_samples=batch.weights_N.sum(),
        )

    def export_state(self) -> TrainState:
        """Whole tensors of everything; with a sharded optimizer or split channels all ranks must call it."""
        return TrainState(
            network=self.whole(export_network(self._network)),
            optimizer=self.whole(self._optimizer.export_state()),
            average=self.whole(self._average.export_state() if self._average is not None else {}),
            num_updates=self._num_updates,
        )

    def whole(self, arrays: Arrays) -> Arrays:
        """Tensors of the network that was built, from this rank's of the one that is trained; all ranks must call it.

        Args:
            arrays: By name, or by ``slot/name``.

        Returns:
            The same names.
        """
        arrays = self._split.gather(arrays) if self._split is not None else arrays
        return self._regrouped.to_original(arrays) if self._regrouped is not None else arrays

    def _own(self, arrays: Arrays) -> Arrays:
        arrays = self._regrouped.to_regrouped(arrays) if self._regrouped is not None else arrays
        return self._split.own(arrays) if self._split is not None else arrays

    def import_state(self, state: TrainState) -> None:
        """Takes over a state; changes nothing if something does not fit. Communicates nothing.

        Without optimizer tensors the optimizer starts afresh, and without an average it starts from the network.

        Raises:
            CheckpointError: If names are missing or unexpected, or shapes differ; all of them are listed.
        """
        tensors = self._network.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        own = self._own
        state = TrainState(own(state.network), own(state.optimizer), own(state.average), state.num_updates)
        misfits = find_misfits(state.network, shapes, source="the checkpoint")
        misfits += self._optimizer.find_misfits(state.optimizer)
        if self._average is not None and state.average:
            misfits += self._average.find_misfits(state.average)
        refuse_misfits(misfits, CheckpointError)
        copy_arrays(tensors, state.network)
        self._optimizer.import_state(state.optimizer, num_updates=state.num_updates)
        if self._average is not None:
            self._average.restart()
            self._average.import_state(state.average)
        self._num_updates = state.num_updates

    def local_tensors(self) -> Arrays:
        """This rank's copy of every parameter and persistent buffer that the data axis has alike."""
        tensors, split = export_network(self._network), self._split
        return {name: tensor for name, tensor in tensors.items() if split is None or not split.is_of_data(name)}

    def collectives(self) -> tuple[CollectiveCount, ...]:
        """What the last update communicated."""
        return self._counts

    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds from the first update on."""
        return self._optimizer.num_bytes()

    def num_parameters(self) -> int:
        """Elements of all trainable parameters of the whole network."""
        trainable = {name: p for name, p in self._network.named_parameters() if p.requires_grad}
        layer = self._regrouped
        num_zeros = layer.convolution.num_zeros if layer is not None and layer.weight in trainable else 0
        if self._split is not None:
            return self._split.num_parameters(trainable.items()) - num_zeros
        return sum(parameter.numel() for parameter in trainable.values()) - num_zeros

    def _backward(self, batch: TorchBatch, *, factor: float, reduce: bool) -> Tensor:
        # A filler takes part in the collectives and leaves no trace: in evaluation mode batch norm learns nothing
        # from it, and accepts a single value per channel.
        self._set_mode(training=batch.num_real > 0)
        if self._split is not None:
            self._split.drop(training=True)
        if isinstance(self._parallel, DistributedDataParallel) and not reduce:
            with self._parallel.no_sync():
                return self._loss(batch, factor)
        return self._loss(batch, factor)

    def _loss(self, batch: TorchBatch, factor: float) -> Tensor:
        begun = RECORDER.now()
        scores_NK = self._objective.scores(self._parallel, batch)
        losses_N = self._objective.losses(scores_NK, batch, label_smoothing=self._run.train.label_smoothing)
        loss = losses_N.sum()
        RECORDER.add("compute", "forward", start=begun, end=RECORDER.now())
        self._back_propagate(loss * factor)
        return loss.detach()

    def _set_mode(self, *, training: bool) -> None:
        if self._network.training != training:
            self._network.train(training)
        if self._split is not None:
            self._split.drop(training=training)

    def _back_propagate(self, loss: Tensor) -> None:
        begun = RECORDER.now()
        loss.backward()
        end = RECORDER.now()
        # The last bucket is sent off with the last gradient; from then on the backward only waits for sums.
        computed = self._axis.last_sent if self._axis.last_sent > begun else end
        self._layers.end(computed)
        RECORDER.add("compute", "backward", start=begun, end=computed)
        RECORDER.count("communication", end - computed, axis="data")

    def _seed(self, update_index: int, micro: int) -> None:
        seed_generators(self._run.train.seed, update_index, self._axis.position, micro)


def seed_generators(seed: int, update_index: int, shard: int, micro: int) -> None:
    """Seeds PyTorch's global generators for one micro-batch.

    Args:
        seed: Of the run.
        update_index: Number of the update.
        shard: Position on the data axis.
        micro: Number of the micro-batch of this shard in the update.
    """
    entropy = (seed, update_index, shard, micro)
    torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1)))

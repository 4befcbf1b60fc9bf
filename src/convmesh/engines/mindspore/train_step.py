"""One update and one evaluation batch of a network on one rank; implements `convmesh.engines.contract.TrainStep`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from convmesh.config.schema import RunConfig
from convmesh.engines.contract import Arrays, Batch, CollectiveCount, EvalSums, PixelScale, TrainState, UpdateResult
from convmesh.engines.mindspore.average import WeightAverage
from convmesh.engines.mindspore.buffers import Buffers
from convmesh.engines.mindspore.collectives import BucketedAllReduce, DataAxis, as_scalar
from convmesh.engines.mindspore.loader import MindSporeBatch, to_device
from convmesh.engines.mindspore.objective import Evaluation, Loss
from convmesh.engines.mindspore.optimizer import Optimizer
from convmesh.engines.mindspore.partition import plan_buckets
from convmesh.engines.mindspore.state import (
    export_parameters,
    find_misfits,
    import_parameters,
    named_parameters,
    refuse_misfits,
    shapes_of,
)
from convmesh.errors import CheckpointError, DataError, ModelError

DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}


class MindSporeTrainStep:
    """A network with everything that training it takes, on one rank.

    Args:
        network: Its parameters and buffers equal on all ranks of the axis.
        run: The run.
        pixel_scale: How pixels become the network's input.
        axis: The data axis.

    Raises:
        ModelError: If the network has nothing to train, or trains parameters of another type than float32.
    """

    def __init__(self, network: nn.Cell, run: RunConfig, *, pixel_scale: PixelScale, axis: DataAxis) -> None:
        self._network = network
        self._run = run
        self._axis = axis
        self._num_channels = len(pixel_scale.factor_C)
        self._num_updates = 0
        self._counts: tuple[CollectiveCount, ...] = ()
        self._named = named_parameters(network)
        self._trained = _trained_parameters(self._named, network)
        buckets = self._plan_buckets()
        self._num_buckets = max(buckets)
        self._optimizer = Optimizer(
            self._trained, run.optimizer, axis=axis, shard=run.strategy.optimizer_sharding, buckets=buckets
        )
        self._buffers = Buffers(_buffers(self._named), axis=axis)
        decay = run.train.weight_average
        self._average = WeightAverage(self._named, decay=decay) if decay > 0 else None
        parallel = axis.size > 1
        self._reduce = _Reduce(
            reduce=BucketedAllReduce(axis, buckets, dtype=self._reduction) if parallel else None,
            update=self._optimizer.in_place,
        )
        self._loss = Loss(network, pixel_scale, label_smoothing=run.train.label_smoothing)
        self._whole = _WholeUpdate(self._loss, list(self._trained.values()), reduce=self._reduce)
        self._in_parts: tuple[nn.Cell, nn.Cell] | None = None
        self._evaluation = Evaluation(network, pixel_scale)

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

        Without accumulation a full update is one graph. Otherwise gradients stay on this rank until a second graph,
        which is the same on all ranks, reduces them: in a ragged last update ranks may have other shapes, and one
        without samples computes nothing and takes part with zeros. A skipped update leaves parameters, optimizer,
        average and buffers as they were.
        """
        batches = [self._checked(batch) for batch in micro_batches]
        self._use_average(False)
        self._set_mode(training=True)
        self._buffers.remember()
        coefficients = self._optimizer.coefficients(
            learning_rate=learning_rate, loss_scale=loss_scale, num_updates=self._num_updates
        )
        loss_sum, result = self._compute(batches, global_count, loss_scale, coefficients)
        applied, norm = self._optimizer.apply_sharded(result, coefficients) if self._optimizer.is_sharded else result
        overflow = float(applied.asnumpy()) == 0.0
        if overflow:
            self._buffers.restore()
        else:
            self._buffers.combine(weight=sum(batch.num_real for batch in batches) / global_count)
            self._num_updates += 1
            if self._average is not None:
                self._average.update()
        self._counts = self._count(applied=not overflow)
        clips = self._run.optimizer.clip_norm is not None
        return UpdateResult(
            loss_sum=loss_sum, overflow=overflow, gradient_norm=float(norm.asnumpy()) if clips else None
        )

    def evaluate(self, batch: Batch) -> EvalSums:
        """Runs one batch in evaluation mode, with averaged weights if there are any; without label smoothing."""
        batch = self._checked(batch)
        self._use_average(True)
        self._set_mode(training=False)
        loss_sum, num_correct, num_samples = self._evaluation(*_inputs(batch))
        return EvalSums(
            loss_sum=float(loss_sum.asnumpy()),
            num_correct=float(num_correct.asnumpy()),
            num_samples=float(num_samples.asnumpy()),
        )

    def export_state(self) -> TrainState:
        """Whole tensors of everything; with a sharded optimizer all ranks must call it."""
        self._use_average(False)
        return TrainState(
            network=export_parameters(self._named),
            optimizer=self._optimizer.export_state(),
            average=self._average.export_state() if self._average is not None else {},
            num_updates=self._num_updates,
        )

    def import_state(self, state: TrainState) -> None:
        """Takes over a state; changes nothing if something does not fit. Communicates nothing.

        Without optimizer tensors the optimizer starts afresh, and without an average it starts from the network.

        Raises:
            CheckpointError: If names are missing or unexpected, or shapes differ; all of them are listed.
        """
        misfits = find_misfits(state.network, shapes_of(self._named), source="the checkpoint")
        misfits += self._optimizer.find_misfits(state.optimizer)
        if self._average is not None and state.average:
            misfits += self._average.find_misfits(state.average)
        refuse_misfits(misfits, CheckpointError)
        self._use_average(False)
        import_parameters(self._named, state.network)
        self._optimizer.import_state(state.optimizer)
        if self._average is not None:
            self._average.restart()
            self._average.import_state(state.average)
        self._num_updates = state.num_updates

    def local_tensors(self) -> Arrays:
        """This rank's copy of every parameter and buffer."""
        self._use_average(False)
        return export_parameters(self._named)

    def collectives(self) -> tuple[CollectiveCount, ...]:
        """What the last update communicated."""
        return self._counts

    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds."""
        return self._optimizer.num_bytes()

    def num_parameters(self) -> int:
        """Elements of all trainable parameters of the whole network."""
        return sum(parameter.size for parameter in self._trained.values())

    @property
    def _reduction(self) -> ms.Type:
        return DTYPES[self._run.precision.gradient_reduction]

    def _plan_buckets(self) -> tuple[int, ...]:
        width = 4 if self._reduction == ms.float32 else 2
        sizes = [parameter.size * width for parameter in self._trained.values()]
        return plan_buckets(sizes, bucket_bytes=self._run.strategy.bucket_bytes)

    def _checked(self, batch: Batch) -> MindSporeBatch:
        batch = to_device(batch)
        num_channels = batch.images_NHWC.shape[-1]
        if num_channels != self._num_channels:
            raise DataError(
                "images have another number of channels than mean and std",
                got=num_channels,
                expected=self._num_channels,
            )
        return batch

    def _compute(
        self,
        batches: Sequence[MindSporeBatch],
        global_count: int,
        loss_scale: float,
        coefficients: tuple[Tensor, ...],
    ) -> tuple[float, tuple[Tensor, ...]]:
        """The loss of this rank, and what ``_Reduce`` gives."""
        factor = as_scalar(loss_scale / global_count)
        is_full = global_count == self._run.train.global_batch
        if self._run.strategy.accumulation == 1 and is_full and len(batches) == 1:
            loss, result = self._whole(*_inputs(batches[0]), factor, *coefficients)
            return float(loss.asnumpy()), result
        backward, finish = self._parts()
        losses = [backward(*_inputs(batch), factor) for batch in batches if batch.num_real > 0]
        return sum(float(loss.asnumpy()) for loss in losses), finish(*coefficients, as_scalar(0.0))

    def _parts(self) -> tuple[nn.Cell, nn.Cell]:
        if self._in_parts is None:
            sums = [
                Parameter(ops.zeros_like(parameter), name=f"gradient.{parameter.name}", requires_grad=False)
                for parameter in self._trained.values()
            ]
            backward = _Backward(self._loss, list(self._trained.values()), sums=sums)
            self._in_parts = backward, _Finish(sums, reduce=self._reduce)
        return self._in_parts

    def _use_average(self, wanted: bool) -> None:
        if self._average is not None:
            self._average.use(wanted)

    def _set_mode(self, *, training: bool) -> None:
        if self._network.training != training:
            self._network.set_train(training)

    def _count(self, *, applied: bool) -> tuple[CollectiveCount, ...]:
        if self._axis.size == 1:
            return ()
        num_elements = self.num_parameters()
        width = 4 if self._reduction == ms.float32 else 2
        counts = [CollectiveCount("gradients", "all-reduce", self._num_buckets, width * num_elements)]
        if applied and self._optimizer.is_sharded:
            counts.append(CollectiveCount("parameters", "all-reduce", self._num_buckets, 4 * num_elements))
        if applied and self._buffers.num_collectives:
            counts.append(
                CollectiveCount("buffers", "all-reduce", self._buffers.num_collectives, self._buffers.num_bytes)
            )
        return tuple(counts)


class _Backward(nn.Cell):
    """Gradients of one micro-batch, added to sums that stay on this rank; no collective."""

    def __init__(self, loss: nn.Cell, parameters: list[Parameter], *, sums: list[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.differentiate = ops.value_and_grad(loss, None, ms.ParameterTuple(parameters), has_aux=True)
        self.loss = loss
        self.sums = ms.ParameterTuple(sums)
        self.count = len(sums)

    def construct(self, images_NHWC: Tensor, labels_N: Tensor, weights_N: Tensor, factor: Tensor) -> Tensor:
        (_, loss_sum), gradients = self.differentiate(images_NHWC, labels_N, weights_N, factor)
        for index in range(self.count):
            loss_sum = ops.depend(loss_sum, ops.assign_add(self.sums[index], gradients[index]))
        return loss_sum


class _Reduce(nn.Cell):
    """Sums gradients over the ranks and, if every rank updates everything, applies them."""

    def __init__(self, *, reduce: nn.Cell | None, update: nn.Cell | None) -> None:
        super().__init__(auto_prefix=False)
        self.is_parallel = reduce is not None
        self.reduce = reduce
        self.updates = update is not None
        self.update = update

    def construct(
        self,
        gradients: tuple[Tensor, ...],
        learning_rate: Tensor,
        loss_scale: Tensor,
        correction1: Tensor,
        correction2: Tensor,
    ) -> tuple[Any, ...]:
        if self.is_parallel:
            gradients = self.reduce(gradients)
        if self.updates:
            return self.update(gradients, learning_rate, loss_scale, correction1, correction2)
        return gradients


class _WholeUpdate(nn.Cell):
    """An update of one micro-batch as one graph."""

    def __init__(self, loss: nn.Cell, parameters: list[Parameter], *, reduce: _Reduce) -> None:
        super().__init__(auto_prefix=False)
        self.differentiate = ops.value_and_grad(loss, None, ms.ParameterTuple(parameters), has_aux=True)
        self.loss = loss
        self.reduce = reduce

    def construct(  # noqa: PLR0913, PLR0917 (a graph takes its inputs one by one)
        self,
        images_NHWC: Tensor,
        labels_N: Tensor,
        weights_N: Tensor,
        factor: Tensor,
        learning_rate: Tensor,
        loss_scale: Tensor,
        correction1: Tensor,
        correction2: Tensor,
    ) -> tuple[Any, ...]:
        (_, loss_sum), gradients = self.differentiate(images_NHWC, labels_N, weights_N, factor)
        return loss_sum, self.reduce(gradients, learning_rate, loss_scale, correction1, correction2)


class _Finish(nn.Cell):
    """Reduces the accumulated gradients, then clears them; the same graph whatever the micro-batches were."""

    def __init__(self, sums: list[Parameter], *, reduce: _Reduce) -> None:
        super().__init__(auto_prefix=False)
        self.sums = ms.ParameterTuple(sums)
        self.count = len(sums)
        self.reduce = reduce

    def construct(
        self,
        learning_rate: Tensor,
        loss_scale: Tensor,
        correction1: Tensor,
        correction2: Tensor,
        nothing: Tensor,
    ) -> tuple[Any, ...]:
        gradients = ()
        for index in range(self.count):
            # A copy that the compiler can't leave out: the sums are cleared while the gradients are still in use.
            gradients += (self.sums[index] + nothing,)
        result = self.reduce(gradients, learning_rate, loss_scale, correction1, correction2)
        for index in range(self.count):
            result = ops.depend(result, ops.assign(self.sums[index], self.sums[index] * nothing))
        return result


def _inputs(batch: MindSporeBatch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.images_NHWC, batch.labels_N, batch.weights_N


def _trained_parameters(named: dict[str, Parameter], network: nn.Cell) -> dict[str, Parameter]:
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if not trained:
        raise ModelError("the network has no trainable parameter", got=type(network).__name__)
    others = sorted({str(parameter.dtype) for parameter in trained.values() if parameter.dtype != ms.float32})
    if others:
        raise ModelError(
            "trainable parameters must be float32",
            got=", ".join(others),
            fix="Build the network in float32 and set 'precision.compute: float16'",
        )
    return trained


def _buffers(named: dict[str, Parameter]) -> list[Parameter]:
    return [p for p in named.values() if not p.requires_grad and p.dtype == ms.float32]

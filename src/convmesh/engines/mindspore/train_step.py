"""One update and one evaluation batch of a network on one rank; implements `convmesh.engines.contract.TrainStep`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from convmesh.config.schema import RunConfig
from convmesh.engines.contract import Arrays, Batch, CollectiveCount, EvalSums, PixelScale, TrainState, UpdateResult
from convmesh.engines.filling import filled
from convmesh.engines.mindspore.average import WeightAverage
from convmesh.engines.mindspore.buffers import Buffers
from convmesh.engines.mindspore.channel_split import ChannelSplit, Equalizer, HalfSquare, split_of
from convmesh.engines.mindspore.collectives import BucketedSum, DataAxis, as_scalar
from convmesh.engines.mindspore.gradients import Accumulate, Backward, Take
from convmesh.engines.mindspore.graph_record import Recorded, added
from convmesh.engines.mindspore.loader import MindSporeBatch, to_device
from convmesh.engines.mindspore.objective import Evaluation, Loss
from convmesh.engines.mindspore.optimizer import Optimizer
from convmesh.engines.mindspore.partition import NORM_BYTES, plan_buckets
from convmesh.engines.mindspore.regroup import regrouped_of
from convmesh.engines.mindspore.sample_axis import SampleAxis
from convmesh.engines.mindspore.state import (
    export_parameters,
    find_misfits,
    import_parameters,
    named_parameters,
    refuse_misfits,
    shapes_of,
)
from convmesh.errors import CheckpointError, DataError, ModelError
from convmesh.profiling.recorder import RECORDER

DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}


class MindSporeTrainStep:
    """A network with everything that training it takes, on one rank.

    Args:
        network: Its parameters and buffers equal on all ranks of the axis; it may be split along channels.
        run: The run.
        pixel_scale: How pixels become the network's input.
        axis: The data axis.

    Attributes:
        on_scores: Called in every update with the network's output for each micro-batch.
        on_gradients: Called in every update with the reduced gradients, before they are clipped and applied.

    Raises:
        ModelError: If the network has nothing to train, or trains parameters of another type than float32.
    """

    def __init__(self, network: nn.Cell, run: RunConfig, *, pixel_scale: PixelScale, axis: DataAxis) -> None:
        self._network = network
        self._run = run
        self._axis = axis
        self._split = split_of(network)
        self._regrouped = regrouped_of(network)
        self._equalizer: Equalizer | None = None
        self._num_channels = len(pixel_scale.factor_C)
        self._num_updates = 0
        self._counts: tuple[CollectiveCount, ...] = ()
        self._named = named_parameters(network)
        self._trained = _trained_parameters(self._named, network)
        self.on_scores: Callable[[Tensor], None] | None = None
        self.on_gradients: Callable[[Mapping[str, Tensor]], None] | None = None
        if self._split is not None and self._split.replicas_may_differ:
            self._equalizer = Equalizer(self._trained, self._split)
        self._samples = self._split.axis if self._split and isinstance(self._split.axis, SampleAxis) else None
        parts = {name for name in self._trained if self._split is not None and self._split.is_of_data(name)}
        self._summed = [place for place, name in enumerate(self._trained) if name not in parts]
        buckets = self._plan_buckets()
        self._optimizer = Optimizer(
            self._trained,
            run.optimizer,
            axis=axis,
            shard=run.strategy.optimizer_sharding,
            buckets=buckets,
            half_square=_half_square(self._trained, self._split),
            parts=parts,
        )
        self._buffers = Buffers(_buffers(self._named), axis=axis)
        decay = run.train.weight_average
        self._average = WeightAverage(self._named, decay=decay) if decay > 0 else None
        self._loss = Loss(network, pixel_scale, label_smoothing=run.train.label_smoothing)
        self._backward_graph = Backward(self._loss, self._trained, self._split)
        self._backward = self._recorded(self._backward_graph)
        self._accumulation: tuple[Recorded, Take] | None = None
        self._sum = BucketedSum(axis, buckets, dtype=self._reduction)
        self._evaluation = self._recorded(Evaluation(network, pixel_scale))

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

        Gradients of several micro-batches are added up on this rank. A rank without samples computes nothing and takes
        part in the sums with zeros; where ranks exchange samples, it computes along and leaves no trace. A skipped
        update leaves parameters, optimizer, average and buffers as they were.
        """
        if self._samples is not None:
            micro_batches = filled(micro_batches, run=self._run, num_shards=self._axis.size, global_count=global_count)
        batches = [self._checked(batch) for batch in micro_batches]
        self._use_average(False)
        self._set_mode(training=True)
        self._buffers.remember()
        with RECORDER.span("compute", "forward and backward"):
            loss_sum, gradients = self._differentiate(batches, factor=as_scalar(loss_scale / global_count))
        gradients = self._sum_over_data(gradients)
        if self._equalizer is not None:
            gradients = self._equalizer(gradients)
        if self.on_gradients is not None:
            self.on_gradients(dict(zip(self._trained, gradients, strict=True)))
        with RECORDER.span("optimizer", "optimizer"):
            overflow, norm = self._optimizer.apply(
                gradients, learning_rate=learning_rate, loss_scale=loss_scale, num_updates=self._num_updates
            )
        if overflow:
            self._buffers.restore()
        else:
            self._buffers.combine(weight=sum(batch.num_real for batch in batches) / global_count)
            self._num_updates += 1
            if self._average is not None:
                self._average.update()
        self._counts = self._count(applied=not overflow)
        clips = self._run.optimizer.clip_norm is not None
        return UpdateResult(loss_sum=loss_sum, overflow=overflow, gradient_norm=norm if clips else None)

    def evaluate(self, batch: Batch) -> EvalSums:
        """Runs one batch in evaluation mode, with averaged weights if there are any; without label smoothing."""
        batch = self._checked(batch)
        self._use_average(True)
        self._set_mode(training=False)
        self._expect(batch)
        loss_sum, num_correct, num_samples = self._evaluation(*_inputs(batch))
        return EvalSums(
            loss_sum=float(loss_sum.asnumpy()),
            num_correct=float(num_correct.asnumpy()),
            num_samples=float(num_samples.asnumpy()),
        )

    def export_state(self) -> TrainState:
        """Whole tensors of everything; with a sharded optimizer or split channels all ranks must call it."""
        self._use_average(False)
        return TrainState(
            network=self.whole(export_parameters(self._named)),
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
        own = self._own
        state = TrainState(own(state.network), own(state.optimizer), own(state.average), state.num_updates)
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
        """This rank's copy of every parameter and buffer that the data axis has alike."""
        self._use_average(False)
        tensors, split = export_parameters(self._named), self._split
        return {name: tensor for name, tensor in tensors.items() if split is None or not split.is_of_data(name)}

    def collectives(self) -> tuple[CollectiveCount, ...]:
        """What the last update communicated."""
        return self._counts

    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds."""
        return self._optimizer.num_bytes()

    def num_parameters(self) -> int:
        """Elements of all trainable parameters of the whole network."""
        layer = self._regrouped
        num_zeros = layer.convolution.num_zeros if layer is not None and layer.weight in self._trained else 0
        if self._split is not None:
            return self._split.num_parameters(self._trained.items()) - num_zeros
        return sum(parameter.size for parameter in self._trained.values()) - num_zeros

    @property
    def _reduction(self) -> ms.Type:
        return DTYPES[self._run.precision.gradient_reduction]

    @property
    def _gradient_bytes(self) -> int:
        width = 4 if self._reduction == ms.float32 else 2
        trained = list(self._trained.values())
        return width * sum(trained[place].size for place in self._summed)

    def _plan_buckets(self) -> tuple[int, ...]:
        width = 4 if self._reduction == ms.float32 else 2
        trained = list(self._trained.values())
        sizes = [trained[place].size * width for place in self._summed]
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

    def _differentiate(self, batches: Sequence[MindSporeBatch], *, factor: Tensor) -> tuple[float, Sequence[Tensor]]:
        """The loss of this rank and its gradients, over all micro-batches that have samples."""
        if self._samples is None:
            batches = [batch for batch in batches if batch.num_real > 0]
        if not batches:
            return 0.0, [ops.zeros_like(parameter) for parameter in self._trained.values()]
        if len(batches) == 1:
            with self._without_trace(batches[0]):
                loss, scores_NK, *gradients = self._backward(*_inputs(batches[0]), factor)
            self._tell_scores(scores_NK)
            return float(loss.asnumpy()), gradients
        accumulate, take = self._accumulators()
        loss_sum = 0.0
        for batch in batches:
            with self._without_trace(batch):
                loss, scores_NK = accumulate(*_inputs(batch), factor)
            loss_sum += float(loss.asnumpy())
            self._tell_scores(scores_NK)
        return loss_sum, take(as_scalar(0.0))

    def _expect(self, batch: MindSporeBatch) -> None:
        """Tells a network that exchanges samples how many there are."""
        if self._samples is not None:
            num_own = batch.images_NHWC.shape[0]
            full = self._run.train.global_batch // (self._axis.size * self._run.strategy.accumulation)
            self._samples.expect(num_own, capacity=max(num_own, full))

    @contextlib.contextmanager
    def _without_trace(self, batch: MindSporeBatch) -> Iterator[None]:
        """Runs a micro-batch, of which fillers change no statistics."""
        self._expect(batch)
        buffers = {name: entry for name, entry in self._named.items() if not entry.requires_grad}
        kept = export_parameters(buffers) if batch.num_real == 0 else {}
        yield
        if kept:
            import_parameters(buffers, kept)

    def _sum_over_data(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._axis.size == 1 or not self._summed:
            return gradients
        found = list(gradients)
        sums = self._sum([found[place] for place in self._summed])
        for place, gradient in zip(self._summed, sums, strict=True):
            found[place] = gradient
        return found

    def _tell_scores(self, scores_NK: Tensor) -> None:
        if self.on_scores is not None:
            self.on_scores(scores_NK)

    def _accumulators(self) -> tuple[Recorded, Take]:
        if self._accumulation is None:
            sums = [
                Parameter(ops.zeros_like(parameter), name=f"gradient.{parameter.name}", requires_grad=False)
                for parameter in self._trained.values()
            ]
            self._accumulation = self._recorded(Accumulate(self._backward_graph, sums=sums)), Take(sums)
        return self._accumulation

    def _recorded(self, graph: nn.Cell) -> Recorded:
        return Recorded(graph, self._split.axis if self._split is not None else None)

    def _use_average(self, wanted: bool) -> None:
        if self._average is not None:
            self._average.use(wanted)

    def _set_mode(self, *, training: bool) -> None:
        if self._network.training != training:
            self._network.set_train(training)

    def _count(self, *, applied: bool) -> tuple[CollectiveCount, ...]:
        counts = []
        trained = list(self._trained.values())
        num_elements = sum(trained[place].size for place in self._summed)
        if self._axis.size > 1 and self._summed:
            counts.append(CollectiveCount("gradients", "all-reduce", self._sum.num_buckets, self._gradient_bytes))
        if applied and self._optimizer.is_sharded:
            counts.append(CollectiveCount("parameters", "all-reduce", self._sum.num_buckets, 4 * num_elements))
        if applied and self._buffers.num_collectives:
            counts.append(
                CollectiveCount("buffers", "all-reduce", self._buffers.num_collectives, self._buffers.num_bytes)
            )
        if self._split is not None:
            graphs = [self._backward, *(self._accumulation or ())[:1]]
            counts += added([count for graph in graphs for count in graph.take_counts()])
            if self._equalizer is not None:
                counts.append(self._equalizer.count())
            counts.append(CollectiveCount("norm", "all-reduce", 1, NORM_BYTES, axis=self._split.axis.name))
        return tuple(counts)


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


def _half_square(trained: dict[str, Parameter], split: ChannelSplit | None) -> HalfSquare | None:
    if split is None:
        return None
    return HalfSquare(tuple(name in split.shards for name in trained), split.axis)


def _buffers(named: dict[str, Parameter]) -> list[Parameter]:
    return [p for p in named.values() if not p.requires_grad and p.dtype == ms.float32]

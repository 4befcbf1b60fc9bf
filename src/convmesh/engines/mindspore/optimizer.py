"""Applying reduced gradients in one graph: overflow check, unscaling, clipping, optimizer; whole or sharded.

A skipped update needs no second graph and no branch: dividing by 0 with ``DivNoNan`` turns any gradient, even one that
is no number, into 0. With the coefficients of a skipped update (learning rate 0, momentum 1) each value then stays what
it is, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from convmesh.config.schema import OptimizerConfig
from convmesh.engines.contract import Arrays
from convmesh.engines.mindspore.channel_split import HalfSquare
from convmesh.engines.mindspore.collectives import BucketedSum, DataAxis, as_scalar
from convmesh.engines.mindspore.partition import Interval, own_intervals
from convmesh.engines.mindspore.state import assign_array, find_misfits

_NORM_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``."""


class Optimizer:
    """The optimizer of a network on one rank.

    With ``shard``, this rank owns one even range of the concatenated parameters: it keeps optimizer state for its
    elements alone, updates them, and gets the others by a sum to which every rank contributes its part.

    Args:
        parameters: All trainable parameters by neutral name, in order.
        config: The optimizer.
        axis: The data axis.
        shard: Whether each rank keeps only its part of the state.
        buckets: The bucket of each parameter, in which updated values travel.
        half_square: Of a network split along channels, how the norm of its gradients is found.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        config: OptimizerConfig,
        *,
        axis: DataAxis,
        shard: bool,
        buckets: tuple[int, ...],
        half_square: HalfSquare | None = None,
    ) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self._axis = axis
        self.is_sharded = shard and axis.size > 1
        counts = [parameter.size for parameter in parameters.values()]
        position, size = (axis.position, axis.size) if self.is_sharded else (0, 1)
        self._intervals = own_intervals(counts, position=position, size=size)
        self._slots = {
            slot: [
                Parameter(Tensor(np.zeros(self._slot_shape(p, i), np.float32)), f"{slot}.{p.name}", requires_grad=False)
                for p, i in zip(parameters.values(), self._intervals, strict=True)
            ]
            for slot in _slot_names(config)
        }
        whole = list(parameters.values())
        square = half_square or HalfSquare((False,) * len(whole), None)
        self._in_place = UpdateWhole(whole, config, slots=self._slots, half_square=square)
        self._slices = UpdateSlices(whole, config, slots=self._slots, half_square=square, intervals=self._intervals)
        self._sum = BucketedSum(axis, buckets)
        self._put = _Put(whole)

    def apply(self, gradients: Sequence[Tensor], coefficients: tuple[Tensor, ...]) -> tuple[bool, float]:
        """Updates the parameters, unless a gradient is not finite. With a shard, all ranks must call it.

        Args:
            gradients: Summed over all ranks, times the loss scale.
            coefficients: From ``coefficients``.

        Returns:
            Whether the update was skipped, and the global norm before clipping. Both are equal on all ranks: those that
            split samples hold the same gradients, those that split channels add up their squares.
        """
        if not self.is_sharded:
            applied, norm = self._in_place(*coefficients, *gradients)
            return float(applied.asnumpy()) == 0.0, float(norm.asnumpy())
        applied, norm, *values = self._slices(*coefficients, as_scalar(0.0), *gradients)
        skipped = float(applied.asnumpy()) == 0.0
        if not skipped:
            # Every rank contributes its part within zeros.
            self._put(*self._sum(values))
        return skipped, float(norm.asnumpy())

    def coefficients(self, *, learning_rate: float, loss_scale: float, num_updates: int) -> tuple[Tensor, ...]:
        """The last inputs of ``apply``.

        Args:
            learning_rate: For this update.
            loss_scale: Taken out of the gradients.
            num_updates: Updates applied so far, for AdamW's bias correction.

        Returns:
            Learning rate, loss scale, and ``1 - beta^t`` for both of AdamW's moments.
        """
        first, second = self._config.betas
        time = num_updates + 1
        return tuple(map(as_scalar, (learning_rate, loss_scale, 1 - first**time, 1 - second**time)))

    def num_bytes(self) -> int:
        """Bytes of the optimizer's tensors on this rank."""
        per_element = 4 * len(self._slots)
        return per_element * sum(interval.size for interval in self._intervals)

    def export_state(self) -> Arrays:
        """Whole tensors as ``slot/parameter``. With a shard, all ranks must call it."""
        arrays: Arrays = {}
        for slot, tensors in self._slots.items():
            own = [tensor.asnumpy().reshape(-1)[: i.size] for tensor, i in zip(tensors, self._intervals, strict=True)]
            whole = self._gather(own) if self.is_sharded else own
            for (name, parameter), array in zip(self._parameters.items(), whole, strict=True):
                arrays[f"{slot}/{name}"] = np.array(array).reshape(parameter.shape)
        return arrays

    def find_misfits(self, arrays: Arrays) -> list[str]:
        """What is missing, unexpected or of another shape in a state; an empty state is a fresh one."""
        if not arrays:
            return []
        shapes = {f"{slot}/{name}": tuple(p.shape) for slot in self._slots for name, p in self._parameters.items()}
        return find_misfits(arrays, shapes, source="the optimizer state")

    def import_state(self, arrays: Arrays) -> None:
        """Takes over whole tensors, of which a shard keeps its part; ``arrays`` has passed ``find_misfits``."""
        for slot, tensors in self._slots.items():
            for name, tensor, interval in zip(self._parameters, tensors, self._intervals, strict=True):
                whole = arrays.get(f"{slot}/{name}")
                if interval.size == 0:
                    continue
                own = np.zeros(interval.size) if whole is None else whole.reshape(-1)[interval.start : interval.stop]
                assign_array(tensor, own.astype(np.float32).reshape(tensor.shape))

    def _slot_shape(self, parameter: Parameter, interval: Interval) -> tuple[int, ...]:
        # MindSpore has no tensors without elements; a rank that owns nothing of a parameter holds one unused number.
        return (max(interval.size, 1),) if self.is_sharded else tuple(parameter.shape)

    def _gather(self, own: list[np.ndarray]) -> list[np.ndarray]:
        return [
            _gather_whole(part, interval=interval, count=parameter.size, axis=self._axis)
            for part, interval, parameter in zip(own, self._intervals, self._parameters.values(), strict=True)
        ]


class _Update(nn.Cell):
    """What both ways to update have in common.

    Args:
        parameters: Whole parameters.
        config: The optimizer.
        slots: Optimizer state per slot and parameter.
        half_square: Half the square of the norm of the gradients.
    """

    def __init__(
        self,
        parameters: list[Parameter],
        config: OptimizerConfig,
        *,
        slots: Mapping[str, list[Parameter]],
        half_square: HalfSquare,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ms.ParameterTuple(parameters)
        self.count = len(parameters)
        self.is_adamw = config.name == "adamw"
        self.is_plain = not slots
        self.first = ms.ParameterTuple(slots.get("exp_avg", slots.get("momentum", [])))
        self.second = ms.ParameterTuple(slots.get("exp_avg_sq", []))
        self.decays = tuple(
            config.weight_decay if parameter.ndim >= 2 or config.decay_norm_and_bias else 0.0
            for parameter in parameters
        )
        self.momentum = config.momentum
        self.beta1, self.beta2 = config.betas
        self.epsilon = config.epsilon
        self.clip_norm = config.clip_norm or 0.0
        self.half_square = half_square
        self.divide = ops.DivNoNan()
        self.apply_momentum = ops.ApplyMomentum()

    def judge(self, gradients: tuple[Tensor, ...], loss_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether to apply the update, the divisor of the gradients (0 if not), and their norm."""
        total = self.half_square(gradients) * 2.0
        finite = ops.isfinite(total)
        norm = ops.sqrt(total) / loss_scale
        divisor = loss_scale
        if self.clip_norm > 0:
            # Gradients are divided by max(1, (norm + e) / clip): the inverse of min(1, clip / (norm + e)).
            divisor = loss_scale * ops.maximum((norm + _NORM_EPSILON) / self.clip_norm, Tensor(1.0, ms.float32))
        zero = Tensor(0.0, ms.float32)
        return ops.cast(finite, ms.float32), ops.select(finite, divisor, zero), norm

    def decayed(self, index: int, value: Tensor, gradient: Tensor, applied: Tensor) -> Tensor:
        """The gradient with SGD's weight decay."""
        if self.decays[index] > 0:
            gradient = gradient + value * (applied * self.decays[index])
        return gradient

    def sgd(self, index: int, value: Tensor, gradient: Tensor, applied: Tensor, rate: Tensor) -> Tensor:
        """``buf = momentum * buf + (g + decay * p)``, ``p = p - rate * buf``, as ``torch.optim.SGD``."""
        gradient = self.decayed(index, value, gradient, applied)
        if not self.is_plain:
            momentum = 1.0 - (1.0 - self.momentum) * applied
            gradient = ops.assign(self.first[index], self.first[index] * momentum + gradient)
        return value - gradient * rate

    def adamw(
        self,
        index: int,
        value: Tensor,
        gradient: Tensor,
        applied: Tensor,
        rate: Tensor,
        correction1: Tensor,
        correction2: Tensor,
    ) -> Tensor:
        """Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101, algorithm 2, as ``torch.optim.AdamW``."""
        if self.decays[index] > 0:
            value = value * (1.0 - rate * self.decays[index])
        first = self.first[index] + (gradient - self.first[index]) * (applied * (1.0 - self.beta1))
        second = self.second[index] + (gradient * gradient - self.second[index]) * (applied * (1.0 - self.beta2))
        first = ops.assign(self.first[index], first)
        second = ops.assign(self.second[index], second)
        denominator = ops.sqrt(second) / ops.sqrt(correction2) + self.epsilon
        return value - first / denominator * (rate / correction1)


class UpdateWhole(_Update):
    """One update of all parameters where they lie."""

    def construct(
        self, learning_rate: Tensor, loss_scale: Tensor, correction1: Tensor, correction2: Tensor, *gradients: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Updates parameters and state.

        Args:
            learning_rate: For this update.
            loss_scale: Taken out of the gradients.
            correction1: ``1 - beta1^t`` of AdamW.
            correction2: ``1 - beta2^t`` of AdamW.
            *gradients: Summed over all ranks, times the loss scale. (MindSpore takes a tuple of tensors for a constant
                and compiles again for each.)

        Returns:
            1 if the update was applied and 0 if a gradient was not finite, and the global norm before clipping.
        """
        applied, divisor, norm = self.judge(gradients, loss_scale)
        rate = learning_rate * applied
        done = applied
        for index in range(self.count):
            gradient = self.divide(gradients[index], divisor)
            value = self.parameters[index]
            if self.is_adamw:
                new = self.adamw(index, value, gradient, applied, rate, correction1, correction2)
                done = ops.depend(done, ops.assign(self.parameters[index], new))
            elif self.is_plain:
                done = ops.depend(done, ops.assign(value, self.sgd(index, value, gradient, applied, rate)))
            else:
                # One pass over memory instead of three.
                gradient = self.decayed(index, value, gradient, applied)
                momentum = 1.0 - (1.0 - self.momentum) * applied
                done = ops.depend(
                    done, self.apply_momentum(self.parameters[index], self.first[index], rate, gradient, momentum)
                )
        return done, norm


class UpdateSlices(_Update):
    """One update of this rank's slices.

    Args:
        parameters: Whole parameters.
        config: The optimizer.
        slots: Optimizer state per slot and parameter, flat slices.
        half_square: Half the square of the norm of the gradients.
        intervals: What this rank owns of each parameter.
    """

    def __init__(
        self,
        parameters: list[Parameter],
        config: OptimizerConfig,
        *,
        slots: Mapping[str, list[Parameter]],
        half_square: HalfSquare,
        intervals: tuple[Interval, ...],
    ) -> None:
        super().__init__(parameters, config, slots=slots, half_square=half_square)
        self.starts = tuple(interval.start for interval in intervals)
        self.stops = tuple(interval.stop for interval in intervals)
        self.sizes = tuple(parameter.size for parameter in parameters)
        self.shapes = tuple(tuple(parameter.shape) for parameter in parameters)

    def construct(
        self,
        learning_rate: Tensor,
        loss_scale: Tensor,
        correction1: Tensor,
        correction2: Tensor,
        nothing: Tensor,
        *gradients: Tensor,
    ) -> tuple[Tensor, ...]:
        """Updates state and computes this rank's part of the new parameters.

        Args:
            learning_rate: For this update.
            loss_scale: Taken out of the gradients.
            correction1: ``1 - beta1^t`` of AdamW.
            correction2: ``1 - beta2^t`` of AdamW.
            nothing: The number 0. Zeros that the compiler knows of would be kept in memory as constants.
            *gradients: Of the whole parameters, summed over all ranks, times the loss scale.

        Returns:
            As ``UpdateWhole``, and after that this rank's part of each new parameter within zeros.
        """
        applied, divisor, norm = self.judge(gradients, loss_scale)
        rate = learning_rate * applied
        values: tuple[Tensor, ...] = ()
        for index in range(self.count):
            if self.stops[index] > self.starts[index]:
                gradient = self.divide(self.own(gradients[index], index), divisor)
                value = self.own(self.parameters[index], index)
                if self.is_adamw:
                    new = self.adamw(index, value, gradient, applied, rate, correction1, correction2)
                else:
                    new = self.sgd(index, value, gradient, applied, rate)
                values += (self.whole(new, index, nothing),)
            else:
                values += (self.parameters[index] * nothing,)
        return (applied, norm, *values)

    def own(self, tensor: Tensor, index: int) -> Tensor:
        """This rank's slice of a whole tensor."""
        return ops.reshape(tensor, (-1,))[self.starts[index] : self.stops[index]]

    def whole(self, value: Tensor, index: int, nothing: Tensor) -> Tensor:
        """A slice within zeros of the shape of its parameter."""
        if self.stops[index] - self.starts[index] < self.sizes[index]:
            flat = ops.reshape(self.parameters[index], (-1,)) * nothing
            parts: tuple[Tensor, ...] = (value,)
            if self.starts[index] > 0:
                parts = (flat[: self.starts[index]], *parts)
            if self.stops[index] < self.sizes[index]:
                parts += (flat[self.stops[index] :],)
            value = ops.concat(parts, 0)
        return ops.reshape(value, self.shapes[index])


class _Put(nn.Cell):
    """Overwrites parameters."""

    def __init__(self, parameters: list[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ms.ParameterTuple(parameters)
        self.count = len(parameters)

    def construct(self, *values: Tensor) -> Tensor:
        done = Tensor(0, ms.int32)
        for index in range(self.count):
            done = ops.depend(done, ops.assign(self.parameters[index], values[index]))
        return done


def _slot_names(config: OptimizerConfig) -> tuple[str, ...]:
    if config.name == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum",) if config.momentum else ()


class _Sum(nn.Cell):
    def __init__(self, axis: DataAxis) -> None:
        super().__init__(auto_prefix=False)
        self.operator = axis.all_reduce()

    def construct(self, x: Tensor) -> Tensor:
        return self.operator(x)


def _gather_whole(own: np.ndarray, *, interval: Interval, count: int, axis: DataAxis) -> np.ndarray:
    whole = np.zeros(count, np.float32)
    whole[interval.start : interval.stop] = own
    return _Sum(axis)(Tensor(whole)).asnumpy()

"""Applying reduced gradients: overflow check, unscaling, clipping, optimizer; whole or sharded.

One graph finds the norm, which tells whether a gradient is not finite; the host decides; another graph updates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

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
        buckets: The bucket of each parameter but ``parts``, in which updated values travel.
        parts: Names of parameters of which every rank of the data axis has another part: each updates its own.
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
        parts: Collection[str] = (),
    ) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self._axis = axis
        self._common = [place for place, name in enumerate(parameters) if name not in parts]
        self.is_sharded = shard and axis.size > 1 and bool(self._common)
        counts = [parameter.size for parameter in parameters.values()]
        intervals = [Interval(0, count) for count in counts]
        if self.is_sharded:
            of_common = own_intervals([counts[place] for place in self._common], position=axis.position, size=axis.size)
            for place, interval in zip(self._common, of_common, strict=True):
                intervals[place] = interval
        self._intervals = tuple(intervals)
        self._slots = {
            slot: [
                Parameter(Tensor(np.zeros(self._slot_shape(p, i), np.float32)), f"{slot}.{p.name}", requires_grad=False)
                for p, i in zip(parameters.values(), self._intervals, strict=True)
            ]
            for slot in _slot_names(config)
        }
        whole = list(parameters.values())
        self._whole = whole
        self._half_square = _Norm(half_square or HalfSquare((False,) * len(whole), None))
        self._updates: dict[bool, nn.Cell] = {}
        self._sum = BucketedSum(axis, buckets, purpose="parameters")
        self._put = _Put(whole)

    def apply(
        self, gradients: Sequence[Tensor], *, learning_rate: float, loss_scale: float, num_updates: int
    ) -> tuple[bool, float]:
        """Updates the parameters, unless a gradient is not finite. With a shard, all ranks must call it.

        Args:
            gradients: Summed over all ranks, times the loss scale.
            learning_rate: For this update.
            loss_scale: Taken out of the gradients.
            num_updates: Updates applied so far, for AdamW's bias correction.

        Returns:
            Whether the update was skipped, and the global norm before clipping. Both are equal on all ranks: those that
            split samples hold the same gradients, those that split channels add up their squares.
        """
        square = 2 * float(self._half_square(*gradients).asnumpy())
        if not math.isfinite(square):
            return True, square
        norm = math.sqrt(square) / loss_scale
        divisor = loss_scale
        if self._config.clip_norm is not None:
            # The inverse of PyTorch's factor min(1, clip / (norm + e)).
            divisor *= max(1.0, (norm + _NORM_EPSILON) / self._config.clip_norm)
        first, second = self._config.betas
        time = num_updates + 1
        coefficients = map(as_scalar, (learning_rate, divisor, 1 - first**time, 1 - second**time))
        update = self._update(divides=divisor != 1.0)
        if self.is_sharded:
            # Every rank contributes its part within zeros.
            values = list(update(*coefficients, as_scalar(0.0), *gradients))
            sums = self._sum([values[place] for place in self._common])
            for place, value in zip(self._common, sums, strict=True):
                values[place] = value
            self._put(*values)
        else:
            update(*coefficients, *gradients)
        return False, norm

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

    def _update(self, *, divides: bool) -> nn.Cell:
        if divides not in self._updates:
            parts = (self._whole, self._config, self._slots)
            self._updates[divides] = (
                UpdateSlices(*parts, divides=divides, intervals=self._intervals)
                if self.is_sharded
                else UpdateWhole(*parts, divides=divides)
            )
        return self._updates[divides]

    def _slot_shape(self, parameter: Parameter, interval: Interval) -> tuple[int, ...]:
        # MindSpore has no tensors without elements; a rank that owns nothing of a parameter holds one unused number.
        return (max(interval.size, 1),) if self.is_sharded else tuple(parameter.shape)

    def _gather(self, own: list[np.ndarray]) -> list[np.ndarray]:
        found = list(own)
        counts = [parameter.size for parameter in self._parameters.values()]
        for place in self._common:
            found[place] = _gather_whole(
                own[place], interval=self._intervals[place], count=counts[place], axis=self._axis
            )
        return found


class _Norm(nn.Cell):
    """Half the square of the norm of all gradients; not finite if one of them is not."""

    def __init__(self, half_square: HalfSquare) -> None:
        super().__init__(auto_prefix=False)
        self.half_square = half_square

    def construct(self, *gradients: Tensor) -> Tensor:
        return self.half_square(gradients)


class _Update(nn.Cell):
    """What both ways to update have in common.

    Args:
        parameters: Whole parameters.
        config: The optimizer.
        slots: Optimizer state per slot and parameter.
        divides: Whether gradients are divided by anything but 1, which costs a pass over memory.
    """

    def __init__(
        self,
        parameters: list[Parameter],
        config: OptimizerConfig,
        slots: Mapping[str, list[Parameter]],
        *,
        divides: bool,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ms.ParameterTuple(parameters)
        self.count = len(parameters)
        self.is_adamw = config.name == "adamw"
        self.is_plain = not slots
        self.divides = divides
        self.first = ms.ParameterTuple(slots.get("exp_avg", slots.get("momentum", [])))
        self.second = ms.ParameterTuple(slots.get("exp_avg_sq", []))
        self.decays = tuple(
            config.weight_decay if parameter.ndim >= 2 or config.decay_norm_and_bias else 0.0
            for parameter in parameters
        )
        self.momentum = config.momentum
        self.beta1, self.beta2 = config.betas
        self.epsilon = config.epsilon
        self.apply_momentum = ops.ApplyMomentum()

    def divided(self, gradient: Tensor, divisor: Tensor) -> Tensor:
        """The gradient without loss scale, clipped."""
        return gradient / divisor if self.divides else gradient

    def decayed(self, index: int, value: Tensor, gradient: Tensor) -> Tensor:
        """The gradient with SGD's weight decay."""
        if self.decays[index] > 0:
            gradient = gradient + value * self.decays[index]
        return gradient

    def sgd(self, index: int, value: Tensor, gradient: Tensor, rate: Tensor) -> Tensor:
        """``buf = momentum * buf + (g + decay * p)``, ``p = p - rate * buf``, as ``torch.optim.SGD``."""
        gradient = self.decayed(index, value, gradient)
        if not self.is_plain:
            gradient = ops.assign(self.first[index], self.first[index] * self.momentum + gradient)
        return value - gradient * rate

    def adamw(
        self, index: int, value: Tensor, gradient: Tensor, rate: Tensor, corrections: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101, algorithm 2, as ``torch.optim.AdamW``."""
        if self.decays[index] > 0:
            value = value * (1.0 - rate * self.decays[index])
        first = self.first[index] + (gradient - self.first[index]) * (1.0 - self.beta1)
        second = self.second[index] * self.beta2 + gradient * gradient * (1.0 - self.beta2)
        first = ops.assign(self.first[index], first)
        second = ops.assign(self.second[index], second)
        denominator = ops.sqrt(second) / ops.sqrt(corrections[1]) + self.epsilon
        return value - first / denominator * (rate / corrections[0])


class UpdateWhole(_Update):
    """One update of all parameters where they lie."""

    def construct(
        self, rate: Tensor, divisor: Tensor, correction1: Tensor, correction2: Tensor, *gradients: Tensor
    ) -> Tensor:
        """Updates parameters and state.

        Args:
            rate: Learning rate of this update.
            divisor: Of the gradients.
            correction1: ``1 - beta1^t`` of AdamW.
            correction2: ``1 - beta2^t`` of AdamW.
            *gradients: Summed over all ranks. (MindSpore takes a tuple of tensors for a constant and compiles again for
                each.)

        Returns:
            Nothing of use; a graph has an output.
        """
        done = rate
        for index in range(self.count):
            gradient = self.divided(gradients[index], divisor)
            value = self.parameters[index]
            if self.is_adamw:
                new = self.adamw(index, value, gradient, rate, (correction1, correction2))
                done = ops.depend(done, ops.assign(self.parameters[index], new))
            elif self.is_plain:
                done = ops.depend(done, ops.assign(self.parameters[index], self.sgd(index, value, gradient, rate)))
            else:
                # One pass over memory instead of three.
                gradient = self.decayed(index, value, gradient)
                done = ops.depend(
                    done, self.apply_momentum(self.parameters[index], self.first[index], rate, gradient, self.momentum)
                )
        return done


class UpdateSlices(_Update):
    """One update of this rank's slices.

    Args:
        parameters: Whole parameters.
        config: The optimizer.
        slots: Optimizer state per slot and parameter, flat slices.
        divides: Whether gradients are divided by anything but 1.
        intervals: What this rank owns of each parameter.
    """

    def __init__(
        self,
        parameters: list[Parameter],
        config: OptimizerConfig,
        slots: Mapping[str, list[Parameter]],
        *,
        divides: bool,
        intervals: tuple[Interval, ...],
    ) -> None:
        super().__init__(parameters, config, slots, divides=divides)
        self.starts = tuple(interval.start for interval in intervals)
        self.stops = tuple(interval.stop for interval in intervals)
        self.sizes = tuple(parameter.size for parameter in parameters)
        self.shapes = tuple(tuple(parameter.shape) for parameter in parameters)

    def construct(
        self,
        rate: Tensor,
        divisor: Tensor,
        correction1: Tensor,
        correction2: Tensor,
        nothing: Tensor,
        *gradients: Tensor,
    ) -> tuple[Tensor, ...]:
        """Updates state and computes this rank's part of the new parameters.

        Args:
            rate: Learning rate of this update.
            divisor: Of the gradients.
            correction1: ``1 - beta1^t`` of AdamW.
            correction2: ``1 - beta2^t`` of AdamW.
            nothing: The number 0. Zeros that the compiler knows of would be kept in memory as constants.
            *gradients: Of the whole parameters, summed over all ranks.

        Returns:
            This rank's part of each new parameter within zeros.
        """
        values: tuple[Tensor, ...] = ()
        for index in range(self.count):
            if self.stops[index] > self.starts[index]:
                gradient = self.divided(self.own(gradients[index], index), divisor)
                value = self.own(self.parameters[index], index)
                if self.is_adamw:
                    new = self.adamw(index, value, gradient, rate, (correction1, correction2))
                else:
                    new = self.sgd(index, value, gradient, rate)
                values += (self.whole(new, index, nothing),)
            else:
                values += (self.parameters[index] * nothing,)
        return values

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

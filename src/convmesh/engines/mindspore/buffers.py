"""Batch-norm statistics and other buffers: equal on all ranks after each update, untouched by a skipped one."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from convmesh.engines.mindspore.collectives import BucketedSum, DataAxis, as_scalar


class Buffers:
    """The buffers of a network over the data axis.

    Args:
        parameters: The buffers: float32 parameters that are not trained. Equal on all ranks now.
        axis: The data axis.
    """

    def __init__(self, parameters: Sequence[Parameter], *, axis: DataAxis) -> None:
        self._parameters = tuple(parameters)
        self._axis = axis
        before = [
            Parameter(Tensor(parameter.asnumpy().copy()), name=f"before.{parameter.name}", requires_grad=False)
            for parameter in self._parameters
        ]
        self._remember = _Copy(before, self._parameters)
        self._restore = _Copy(self._parameters, before)
        self._change = _Change(self._parameters, before)
        self._put = _Put(self._parameters, before)
        self._sum = BucketedSum(axis, [1] * len(self._parameters), purpose="buffers")

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(parameter.nbytes for parameter in self._parameters)

    @property
    def num_collectives(self) -> int:
        """Collectives of one ``combine``."""
        return self._sum.num_buckets if self._axis.size > 1 else 0

    def remember(self) -> None:
        """Notes the values before an update."""
        if self._parameters:
            self._remember()

    def restore(self) -> None:
        """Brings back what was noted: a skipped update leaves no trace, not even an infinite running mean."""
        if self._parameters:
            self._restore()

    def combine(self, *, weight: float) -> None:
        """Makes buffers equal on all ranks: the mean of what each rank made of them, weighted by its samples.

        What is averaged is the *change* since ``remember``, so that a constant stays what it is to the last bit.

        Args:
            weight: This rank's share of the samples of the global batch.
        """
        if self._parameters and self._axis.size > 1:
            changes = self._change(as_scalar(weight))
            changes = self._sum(changes)
            self._put(*changes)


class _Copy(nn.Cell):
    def __init__(self, to: Sequence[Parameter], of: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.to = ms.ParameterTuple(to)
        self.of = ms.ParameterTuple(of)
        self.count = len(self.to)

    def construct(self) -> Tensor:
        done = Tensor(0, ms.int32)
        for index in range(self.count):
            done = ops.depend(done, ops.assign(self.to[index], self.of[index]))
        return done


class _Change(nn.Cell):
    def __init__(self, now: Sequence[Parameter], before: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.now = ms.ParameterTuple(now)
        self.before = ms.ParameterTuple(before)
        self.count = len(self.now)

    def construct(self, weight: Tensor) -> tuple[Tensor, ...]:
        changes: tuple[Tensor, ...] = ()
        for index in range(self.count):
            changes += ((self.now[index] - self.before[index]) * weight,)
        return changes


class _Put(nn.Cell):
    def __init__(self, now: Sequence[Parameter], before: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.now = ms.ParameterTuple(now)
        self.before = ms.ParameterTuple(before)
        self.count = len(self.now)

    def construct(self, *changes: Tensor) -> Tensor:
        done = Tensor(0, ms.int32)
        for index in range(self.count):
            done = ops.depend(done, ops.assign(self.now[index], self.before[index] + changes[index]))
        return done

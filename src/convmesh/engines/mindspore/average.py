"""A moving average of the weights, for evaluation."""

from __future__ import annotations

from collections.abc import Mapping

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from convmesh.engines.contract import Arrays
from convmesh.engines.mindspore.state import export_parameters, find_misfits, import_parameters, shapes_of


class WeightAverage:
    """``average = decay * average + (1 - decay) * value`` of all parameters and floating-point buffers.

    A compiled network always computes with its own parameters, so that for evaluation the two are exchanged.

    Args:
        parameters: Parameters and buffers by neutral name; their present values are the first average.
        decay: From 0 to 1.
    """

    def __init__(self, parameters: Mapping[str, Parameter], *, decay: float) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.dtype in (ms.float32, ms.float16)}
        self._values = {
            name: Parameter(Tensor(p.asnumpy().copy()), name=f"average.{p.name}", requires_grad=False)
            for name, p in self._parameters.items()
        }
        self._move = _Move(self._values, self._parameters, rate=1 - decay)
        self._exchange = _Exchange(self._values, self._parameters)
        self._in_use = False

    def update(self) -> None:
        """Moves the average towards the network's present values."""
        self._move()

    def use(self, wanted: bool) -> None:
        """Puts the average into the network, or the network's own values back; nothing if they are there already."""
        if wanted != self._in_use:
            self._exchange()
            self._in_use = wanted

    def restart(self) -> None:
        """Starts again from the network's present values."""
        import_parameters(self._values, export_parameters(self._parameters))

    def export_state(self) -> Arrays:
        """Copies of the average by name."""
        return export_parameters(self._values)

    def find_misfits(self, arrays: Arrays) -> list[str]:
        """What is missing, unexpected or of another shape."""
        return find_misfits(arrays, shapes_of(self._values), source="the weight average")

    def import_state(self, arrays: Arrays) -> None:
        """Takes over an average that has passed ``find_misfits``."""
        import_parameters(self._values, arrays)


class _Move(nn.Cell):
    def __init__(self, values: Mapping[str, Parameter], parameters: Mapping[str, Parameter], *, rate: float) -> None:
        super().__init__(auto_prefix=False)
        self.values = ms.ParameterTuple(values.values())
        self.parameters = ms.ParameterTuple(parameters.values())
        self.count = len(self.values)
        self.rate = rate

    def construct(self) -> Tensor:
        done = Tensor(0, ms.int32)
        for index in range(self.count):
            change = (self.parameters[index] - self.values[index]) * self.rate
            done = ops.depend(done, ops.assign_add(self.values[index], change))
        return done


class _Exchange(nn.Cell):
    def __init__(self, values: Mapping[str, Parameter], parameters: Mapping[str, Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.values = ms.ParameterTuple(values.values())
        self.parameters = ms.ParameterTuple(parameters.values())
        self.spare = ms.ParameterTuple(
            [Parameter(Tensor(p.asnumpy().copy()), name=f"spare.{p.name}", requires_grad=False) for p in self.values]
        )
        self.count = len(self.values)

    def construct(self) -> Tensor:
        done = Tensor(0, ms.int32)
        for index in range(self.count):
            done = ops.depend(done, ops.assign(self.spare[index], self.values[index]))
            done = ops.depend(done, ops.assign(self.values[index], self.parameters[index]))
            done = ops.depend(done, ops.assign(self.parameters[index], self.spare[index]))
        return done

"""Reading an ``nn.Cell`` into a graph, through the MindIR that ``mindspore.export`` writes.

Nothing is computed with the network's weights, and it stays as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from convmesh.engines.mindspore.state import named_parameters
from convmesh.engines.mindspore.trace_borders import BORDER, DIRECT, borders
from convmesh.engines.mindspore.trace_call import Call, Input, Meaning, Own, Value
from convmesh.engines.mindspore.trace_fold import fold
from convmesh.engines.mindspore.trace_mindir import Constant, MindIR, Primitive, parse_mindir
from convmesh.engines.mindspore.trace_operators import PRIMITIVES
from convmesh.errors import ModelError, brief
from convmesh.graph import Graph, Parameter
from convmesh.graph.canonical import build_graph
from convmesh.graph.graph import BUFFERS
from convmesh.graph.kinds import convolution_weight
from convmesh.graph.operator import Operator, Port

Example = Sequence[int] | Any

_SILENT = ("UpdateState", "Return", "Print", "Summary")


def trace(network: nn.Cell, example: Example) -> Graph:
    """Reads a network as it is in training.

    Args:
        network: The network; it is not changed.
        example: One batch of its input: a shape such as (8, 3, 32, 32), a tensor or an array.

    Returns:
        The graph.

    Raises:
        ModelError: If MindSpore can't compile it; what stopped it is told.
    """
    x = _as_tensor(example)
    with _training(network):
        try:
            with borders(network):
                content = _export(network, x)
        except Exception:
            # What marks can't pass through may still compile without them, functions then named as MindSpore does; and
            # what can't be compiled at all is told without the marks in the message.
            try:
                content = _export(network, x)
            except Exception as error:
                raise ModelError(
                    f"the network {type(network).__name__} can't be compiled for input of shape {tuple(x.shape)}",
                    got=brief(error),
                    fix="Make construct one that MindSpore's graph mode takes, with one tensor as its input",
                ) from error
    parsed = parse_mindir(content)
    operators, outputs = _Reader(parsed, network).read()
    return build_graph(*fold(operators, outputs))


def _export(network: nn.Cell, x: Tensor) -> bytes:
    known = set(network.compile_cache)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.mindir"
        try:
            ms.export(network, x, file_name=str(path.with_suffix("")), file_format="MINDIR")
        finally:
            # What was compiled here is for reading alone: a later export of the user must compile again.
            network.compile_cache.intersection_update(known)
        return path.read_bytes()


class _Reader:
    """Turns the primitives of a MindIR into operators."""

    def __init__(self, content: MindIR, network: nn.Cell) -> None:
        self.content = content
        self.operators: dict[str, Operator] = {}
        self.values: dict[str, Input] = {}
        self.bordered = False
        self.direct = {path for path, cell in network.cells_and_names() if type(cell) in DIRECT}
        self.neutral = {own.name: (name, own) for name, own in named_parameters(network).items()}

    def read(self) -> tuple[list[Operator], tuple[Port, ...]]:
        for number, (name, (shape, dtype)) in enumerate(self.content.inputs.items(), start=1):
            key = "input" if number == 1 else f"input@{number}"
            self.operators[key] = Operator(key=key, kind="input", output_shapes=(shape,), dtype=dtype)
            self.values[name] = Value((key, 0), shape)
        for name, own in self.content.parameters.items():
            self.values[name] = Own(own, tuple(self.neutral[own][1].shape))
        self.values |= self.content.constants
        for primitive in self.content.primitives:
            self._read(primitive)
        outputs = [port for name in self.content.outputs for port in self._ports(self.values[name])]
        return list(self.operators.values()), tuple(outputs)

    def _read(self, primitive: Primitive) -> None:
        inputs = tuple(self.values.get(name) for name in primitive.inputs)
        if primitive.name in ("Load", "Depend"):
            self.values[primitive.output] = inputs[0]
        elif primitive.name == "MakeTuple":
            self.values[primitive.output] = inputs
        elif primitive.name == "TupleGetItem":
            self.values[primitive.output] = self._item(inputs)
        elif primitive.name == BORDER:
            self.values[primitive.output] = self._pass_border(inputs[0], primitive)
        elif primitive.name not in _SILENT and primitive.shapes:
            self._add(primitive, Call(primitive.name, primitive.attributes, inputs, primitive.shapes))

    @staticmethod
    def _item(inputs: tuple[Input, ...]) -> Input:
        source, index = inputs
        if not isinstance(index, Constant):
            return None
        if isinstance(source, Value):
            # Values of several results are kept as tuples; what a norm or dropout returns beside its result is not.
            return source if index.value == 0 else None
        return source[index.value] if isinstance(source, tuple) else None

    def _pass_border(self, value: Input, primitive: Primitive) -> Input:
        path, calls = primitive.attributes["path"], self._calls((value,))
        if primitive.attributes["side"] == "enter":
            calls = (*calls, path)
        elif path in calls:
            calls = calls[: len(calls) - 1 - calls[::-1].index(path)]
        self.bordered = True
        if isinstance(value, Own):
            # As a tensor of its own it can't be the weight of an operator any more; nor does MindSpore see it as one.
            return Value(self._ports(value)[0], value.shape, calls)
        return dataclasses.replace(value, calls=calls) if isinstance(value, Value) else value

    def _calls(self, inputs: tuple[Input, ...]) -> tuple[str, ...]:
        """The innermost of the calls in which tensors stand: what is computed with them stands there too."""
        found: tuple[str, ...] = ()
        for value in inputs:
            own = self._calls(value) if isinstance(value, tuple) else getattr(value, "calls", ())
            found = max(found, own, key=len)
        return found

    def _add(self, primitive: Primitive, call: Call) -> None:
        rule = PRIMITIVES.get(primitive.name)
        meaning = (rule(call) if rule else None) or self._opaque(call)
        calls = self._calls(call.inputs)
        shapes = primitive.shapes if meaning.kind in ("split", "opaque") else primitive.shapes[:1]
        key = primitive.output
        self.operators[key] = Operator(
            key=key,
            kind=meaning.kind,
            attributes=meaning.attributes,
            inputs=tuple(port for entry in meaning.inputs for port in self._ports(entry)),
            output_shapes=shapes,
            parameters=tuple(self._parameter(own, role, meaning) for role, own in meaning.parameters.items()),
            dtype=primitive.dtype,
            module=self._module(primitive.scope, calls),
            origin=primitive.name,
        )
        results = tuple(Value((key, output), shape, calls) for output, shape in enumerate(shapes))
        self.values[key] = results if len(results) > 1 or meaning.kind == "split" else results[0]

    def _module(self, scope: str, calls: tuple[str, ...]) -> str:
        if scope in self.direct or not self.bordered:
            return scope
        return calls[-1] if calls else ""

    def _opaque(self, call: Call) -> Meaning:
        flat = [entry for given in call.inputs for entry in (given if isinstance(given, tuple) else (given,))]
        own = {f"value{index}": entry for index, entry in enumerate(flat) if isinstance(entry, Own)}
        tensors = tuple(entry for entry in flat if isinstance(entry, Value))
        return Meaning("opaque", {"operator": call.name}, tensors, own)

    def _ports(self, value: Input) -> tuple[Port, ...]:
        """The outputs that a value is; a parameter or constant that is used by itself becomes a node."""
        if isinstance(value, Value):
            return (value.port,)
        if isinstance(value, tuple):
            return tuple(port for entry in value for port in self._ports(entry))
        if isinstance(value, Own):
            parameter = self._parameter(value, "value", None)
            self.operators[parameter.name] = Operator(
                key=parameter.name,
                kind="parameter",
                output_shapes=(parameter.shape,),
                parameters=(parameter,),
                dtype=str(self.neutral[value.name][1].dtype).lower(),
            )
            return ((parameter.name, 0),)
        if isinstance(value, Constant):
            shape = value.shape or ()
            key = "constant" + "x".join(map(str, shape)) + f"_{len(self.operators)}"
            self.operators[key] = Operator(key=key, kind="constant", output_shapes=(shape,))
            return ((key, 0),)
        return ()

    def _parameter(self, own: Own, role: str, meaning: Meaning | None) -> Parameter:
        name, tensor = self.neutral[own.name]
        shape = own.shape
        if meaning is not None and meaning.kind == "convolution" and role == "weight":
            shape = convolution_weight(dict(meaning.attributes))
        role = "value" if role.startswith("value") else role
        return Parameter(name, shape, role=role, trainable=bool(tensor.requires_grad) and role not in BUFFERS)


@contextlib.contextmanager
def _training(network: nn.Cell) -> Iterator[None]:
    modes = [(cell, cell.training) for _, cell in network.cells_and_names()]
    network.set_train(True)
    try:
        yield
    finally:
        for cell, mode in modes:
            cell.training = mode


def _as_tensor(example: Example) -> Tensor:
    if isinstance(example, Tensor):
        return example
    if isinstance(example, list | tuple) and all(isinstance(size, int) for size in example):
        return Tensor(np.zeros(tuple(example), np.float32))
    try:
        return Tensor(np.asarray(example))
    except (TypeError, ValueError) as error:
        raise ModelError(
            "the example is no batch of images", got=brief(error), expected="a shape, a tensor or an array"
        ) from None

"""Reading what ``mindspore.export`` writes: values, shapes, scopes and parameter names out of the MindIR protobuf.

MindIR has one node per primitive, each with a scope such as ``Default/layer1-SequentialCell/0-Bottleneck/conv1-Conv2d/
Conv2D-op0``; numbers are nodes of their own, and what a primitive has fixed stands in a table that nodes refer to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convmesh.errors import ModelError
from convmesh.graph.graph import Shape

_REFERENCE = "REF::"
_DTYPES = {
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "FLOAT16": "float16",
    "BFLOAT16": "bfloat16",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class Constant:
    """A value that the graph holds.

    Args:
        value: A number, text, truth value, None or nested tuple of them; of a tensor with several elements an array.
        shape: Shape, if it is a tensor.
    """

    value: Any
    shape: Shape | None = None


@dataclass(frozen=True)
class Primitive:
    """One call of a primitive.

    Args:
        name: The primitive, such as ``"Conv2D"``.
        scope: Path of the cell in which it is called.
        inputs: Names of what it takes.
        output: Name of its result.
        attributes: What it has fixed.
        shapes: Shape of each tensor of its result.
        dtype: Data type of the first.
    """

    name: str
    scope: str
    inputs: tuple[str, ...]
    output: str
    attributes: Mapping[str, Any]
    shapes: tuple[Shape, ...]
    dtype: str


@dataclass
class MindIR:
    """The content of a MindIR file.

    Args:
        inputs: Name to shape and data type of what the network takes.
        parameters: Name to the name of the parameter in the network.
        constants: Name to value.
        primitives: Calls in order.
        outputs: Names of results.
    """

    inputs: dict[str, tuple[Shape, str]] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    primitives: list[Primitive] = field(default_factory=list)
    outputs: tuple[str, ...] = ()


def parse_mindir(content: bytes) -> MindIR:
    """Reads a MindIR file.

    Args:
        content: The file.

    Returns:
        What it says.

    Raises:
        ModelError: If the network branches on values of tensors.
    """
    from mindspore.train.mind_ir_pb2 import ModelProto

    model = ModelProto()
    model.ParseFromString(content)
    if any(node.op_type not in ("Constant",) and not node.op_type.startswith(_REFERENCE) for node in model.graph.node):
        raise ModelError(
            "the network takes different ways for different values of its tensors",
            fix="Make construct not depend on values, and remove @jit and recompute inside it",
        )
    found = MindIR(outputs=tuple(entry.name for entry in model.graph.output))
    for entry in model.graph.input:
        found.inputs[entry.name] = (tuple(entry.tensor[0].dims), _dtype(entry.tensor[0]))
    for entry in model.graph.parameter:
        found.parameters[entry.name] = entry.name.partition(":")[2]
    table = {entry.name: {item.name: _value(item) for item in entry.attribute} for entry in model.primitives}
    for node in model.graph.node:
        if node.op_type == "Constant":
            found.constants[node.output[0]] = _constant(node.attribute[0])
        else:
            found.primitives.append(_primitive(node, table))
    return found


def _primitive(node: Any, table: Mapping[str, Mapping[str, Any]]) -> Primitive:
    reference = node.op_type.removeprefix(_REFERENCE)
    tensors = [tensor for item in node.attribute if item.name == "shape" for tensor in _tensors(item)]
    *cells, _ = node.domain.split("/")
    return Primitive(
        name=reference.partition(":")[0],
        scope=".".join(cell.rpartition("-")[0] for cell in cells if "-" in cell),
        inputs=tuple(node.input),
        output=node.output[0],
        attributes={
            **table.get(reference, {}),
            **{item.name: _value(item) for item in node.attribute if item.name != "shape"},
        },
        shapes=tuple(tuple(tensor.dims) for tensor in tensors),
        dtype=_dtype(tensors[0]) if tensors else "",
    )


def _tensors(item: Any) -> list[Any]:
    return [*item.tensors, *(tensor for entry in item.values for tensor in _tensors(entry))]


def _constant(item: Any) -> Constant:
    value = _value(item)
    if isinstance(value, np.ndarray):
        return Constant(value.item() if value.size == 1 else value, shape=value.shape)
    return Constant(value)


def _value(item: Any) -> Any:
    kind = item.AttributeType.Name(item.type)
    if kind in ("TUPLE", "LIST"):
        return tuple(_value(entry) for entry in item.values)
    if kind == "TENSORS":
        return _array(item.tensors[0])
    if kind == "STRING":
        return (item.s or (item.strings[0] if item.strings else b"")).decode()
    if kind in ("FLOAT", "DOUBLE"):
        several = (*item.floats, *item.doubles)
        return float(several[0]) if several else float(item.f or item.d)
    if kind == "BOOL" or kind.startswith(("INT", "UINT")):
        single = item.ints[0] if item.ints else item.i
        return bool(single) if kind == "BOOL" else int(single)
    return None


def _array(tensor: Any) -> Any:
    dtype = _dtype(tensor)
    if dtype == "bfloat16" or not tensor.raw_data:
        return np.zeros(tuple(tensor.dims), np.float32)
    return np.frombuffer(tensor.raw_data, dtype).reshape(tuple(tensor.dims))


def _dtype(tensor: Any) -> str:
    name = tensor.DataType.Name(tensor.data_type)
    return _DTYPES.get(name, name.lower())

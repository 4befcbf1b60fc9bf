"""Undoes how MindSpore's own cells are made of several primitives.

- the bias of a convolution or dense layer is added by a primitive of its own;
- ``nn.Conv1d`` and padded pooling work in one dim more, ``nn.Dense`` on rows, ``nn.BatchNorm3d`` in two dims: a reshape
  before and one after;
- ``nn.LeakyReLU`` is the maximum of x and a multiple of x.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from convmesh.graph import kinds
from convmesh.graph.operator import Operator, Port

_PER_DIM = ("kernel", "stride", "padding", "dilation", "output_padding")


def fold(operators: list[Operator], outputs: tuple[Port, ...]) -> tuple[list[Operator], tuple[Port, ...]]:
    """Joins primitives that are one operator.

    Args:
        operators: As traced, in order of execution.
        outputs: What the network returns.

    Returns:
        The fewer operators and what the network returns of them.
    """
    table = {operator.key: operator for operator in operators}
    for key in list(table):
        if key in table:
            for step in (_bias, _lifted, _leaky):
                joined = step(table[key], table, outputs)
                if joined is not None:
                    parts, table[key] = joined
                    for part in parts:
                        del table[part]
    return list(table.values()), outputs


Joined = tuple[tuple[str, ...], Operator]


def _bias(last: Operator, table: Mapping[str, Operator], outputs: tuple[Port, ...]) -> Joined | None:
    if last.kind != "bias":
        return None
    owner = table[last.inputs[0][0]]
    joinable = owner.kind in ("convolution", "dense") and not owner.attributes["bias"]
    if not joinable or not _used_once(owner, table, outputs):
        return (), dataclasses.replace(last, kind="opaque", attributes={"operator": "BiasAdd"})
    attributes = {**owner.attributes, "bias": True}
    parameters = (*owner.parameters, *last.parameters)
    return (owner.key,), dataclasses.replace(owner, key=last.key, attributes=attributes, parameters=parameters)


def _lifted(last: Operator, table: Mapping[str, Operator], outputs: tuple[Port, ...]) -> Joined | None:
    if last.kind not in ("reshape", "flatten"):
        return None
    middle = table[last.inputs[0][0]]
    if not middle.inputs or not _used_once(middle, table, outputs):
        return None
    first = table[middle.inputs[0][0]]
    if first.kind not in ("reshape", "flatten") or not _used_once(first, table, outputs):
        return None
    if last.module != first.module or not f"{middle.module}.".startswith(f"{last.module}."):
        return None
    source_key, output = first.inputs[0]
    attributes = _unlifted(middle, before=table[source_key].output_shapes[output], after=last.output_shapes[0])
    if attributes is None:
        return None
    parameters = middle.parameters
    if middle.kind == "convolution":
        shape = kinds.convolution_weight(attributes)
        parameters = tuple(
            dataclasses.replace(entry, shape=shape) if entry.role == "weight" else entry for entry in parameters
        )
    joined = dataclasses.replace(
        middle,
        key=last.key,
        attributes=attributes,
        inputs=first.inputs,
        output_shapes=last.output_shapes,
        parameters=parameters,
        module=last.module,
    )
    return (first.key, middle.key), joined


def _unlifted(middle: Operator, *, before: tuple[int, ...], after: tuple[int, ...]) -> dict[str, Any] | None:
    """The attributes of the operator on the tensor as it was before the first reshape, if they can be told."""
    attributes = dict(middle.attributes)
    if middle.kind == "dense":
        return attributes if before[:-1] == after[:-1] else None
    if middle.kind == "batch_norm":
        return attributes if before == after else None
    if middle.kind not in ("convolution", "max_pool", "avg_pool"):
        return None
    idle = attributes["kernel"][0] == 1 and attributes["stride"][0] == 1 and attributes["padding"][0] == (0, 0)
    if not idle or len(before) != len(attributes["kernel"]) + 1 or len(after) != len(before):
        return None
    return {name: value[1:] if name in _PER_DIM else value for name, value in attributes.items()}


def _leaky(last: Operator, table: Mapping[str, Operator], outputs: tuple[Port, ...]) -> Joined | None:
    if last.attributes.get("function") != "maximum" or len(last.inputs) != 2:
        return None
    scaled = table[last.inputs[0][0]]
    value = scaled.attributes.get("value")
    is_leaky = (
        scaled.attributes.get("function") == "multiply_scalar"
        and scaled.inputs[0] == last.inputs[1]
        and value is not None
        and 0 <= value < 1
        and scaled.module == last.module
        and _used_once(scaled, table, outputs)
    )
    if not is_leaky:
        return None
    attributes = {"function": "leaky_relu", "negative_slope": value}
    return (scaled.key,), dataclasses.replace(last, attributes=attributes, inputs=last.inputs[1:])


def _used_once(operator: Operator, table: Mapping[str, Operator], outputs: tuple[Port, ...]) -> bool:
    uses = sum(key == operator.key for user in table.values() for key, _ in user.inputs)
    return uses == 1 and not any(key == operator.key for key, _ in outputs)

"""Joins operators that are one: padding with its convolution, the steps of a channel shuffle, reshapes in a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from convmesh.graph.elementwise import FUNCTIONS
from convmesh.graph.kinds import reshape_kind
from convmesh.graph.operator import Operator, Port

Table = Mapping[str, Operator]
Outputs = tuple[Port, ...]


def fold(table: Table, outputs: Outputs) -> tuple[dict[str, Operator], Outputs]:
    """Joins what belongs together.

    Args:
        table: Operators by key.
        outputs: What the network returns.

    Returns:
        The fewer operators by key, and what the network returns of them.
    """
    joined = _merge_reshapes(table, outputs)
    for key in list(joined):
        if key not in joined:
            continue
        operator = joined[key]
        parts = _shuffle_parts(operator, joined) or _padding_parts(operator, joined)
        if parts and _used_once(parts[:-1], joined, outputs):
            module = _common_module(parts, joined)
            if module is not None:
                for part in parts[:-1]:
                    del joined[part.key]
                joined[key] = dataclasses.replace(_join(parts), module=module)
    return joined, outputs


def _merge_reshapes(table: Table, outputs: Outputs) -> dict[str, Operator]:
    merged = dict(table)
    for key in list(merged):
        last = merged[key]
        while last.kind in ("reshape", "flatten"):
            first = merged[last.inputs[0][0]]
            if first.kind not in ("reshape", "flatten") or not _used_once((first,), merged, outputs):
                break
            source_key, output = first.inputs[0]
            kind, attributes = reshape_kind(merged[source_key].output_shapes[output], last.output_shapes[0])
            if kind == "identity":
                break
            last = dataclasses.replace(last, kind=kind, attributes=attributes, inputs=first.inputs)
            del merged[first.key]
            merged[key] = last
    return merged


def _shuffle_parts(last: Operator, table: Table) -> tuple[Operator, ...]:
    """Reshape to (N, g, C/g, ...), transpose of dims 1 and 2, reshape back; or nothing."""
    if last.kind not in ("reshape", "flatten") or table[last.inputs[0][0]].kind != "transpose":
        return ()
    middle = table[last.inputs[0][0]]
    first = table[middle.inputs[0][0]]
    if first.kind != "reshape":
        return ()
    num_dims = len(first.output_shapes[0])
    source_key, output = first.inputs[0]
    is_shuffle = (
        middle.attributes["order"] == (0, 2, 1, *range(3, num_dims))
        and last.output_shapes[0] == table[source_key].output_shapes[output]
        and len(last.output_shapes[0]) == num_dims - 1
        and last.output_shapes[0][2:] == first.output_shapes[0][3:]
        and last.output_shapes[0][0] == first.output_shapes[0][0]
    )
    return (first, middle, last) if is_shuffle else ()


def _padding_parts(operator: Operator, table: Table) -> tuple[Operator, ...]:
    """A padding and the operator that can do it itself; or nothing."""
    if operator.kind not in ("convolution", "max_pool", "avg_pool") or not operator.inputs:
        return ()
    pad = table[operator.inputs[0][0]]
    if pad.kind != "pad" or pad.attributes["mode"] != "constant" or any(map(any, pad.attributes["padding"][:2])):
        return ()
    if operator.attributes.get("transposed") or operator.attributes.get("ceil_mode"):
        return ()
    value = pad.attributes["value"]
    if operator.kind == "max_pool":
        # Zeros can't win a maximum over numbers that are not negative.
        fits = value == float("-inf") or (value == 0 and _never_negative(table[pad.inputs[0][0]]))
    elif operator.kind == "avg_pool":
        padded = any(map(any, operator.attributes["padding"]))
        fits = value == 0 and (operator.attributes["count_padding"] or not padded)
    else:
        fits = value == 0
    return (pad, operator) if fits else ()


def _never_negative(operator: Operator) -> bool:
    return operator.kind == "elementwise" and FUNCTIONS[operator.attributes["function"]].never_negative


def _join(parts: tuple[Operator, ...]) -> Operator:
    first, last = parts[0], parts[-1]
    attributes: dict[str, Any] = dict(last.attributes)
    if first.kind == "pad":
        own, more = attributes["padding"], first.attributes["padding"][2:]
        attributes["padding"] = tuple((a + c, b + d) for (a, b), (c, d) in zip(own, more, strict=True))
        if last.kind == "avg_pool":
            attributes["count_padding"] = True
        return dataclasses.replace(last, attributes=attributes, inputs=(first.inputs[0], *last.inputs[1:]))
    return dataclasses.replace(
        last, kind="channel_shuffle", attributes={"groups": first.output_shapes[0][1]}, inputs=first.inputs
    )


def _used_once(parts: tuple[Operator, ...], table: Table, outputs: Outputs) -> bool:
    keys = {part.key for part in parts}
    uses = [key for operator in table.values() for key, _ in operator.inputs if key in keys]
    return len(uses) == len(keys) and not any(key in keys for key, _ in outputs)


def _common_module(parts: tuple[Operator, ...], table: Table) -> str | None:
    """The smallest module that holds all parts, if nothing else stands in it or all parts are written in the same."""
    modules = {part.module for part in parts}
    if len(modules) == 1:
        return modules.pop()
    shared = _shared_path(modules)
    members = {operator.key for operator in table.values() if shared in _holders(operator.module)}
    return shared if shared and members == {part.key for part in parts} else None


def _shared_path(modules: set[str]) -> str:
    first, *others = (module.split(".") for module in modules)
    length = 0
    while all(len(path) > length for path in (first, *others)) and all(
        path[length] == first[length] for path in others
    ):
        length += 1
    return ".".join(first[:length])


def _holders(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))

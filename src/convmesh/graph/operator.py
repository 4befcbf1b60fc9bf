"""Operators as an engine traced them, before they become nodes of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from convmesh.graph.graph import Parameter, Shape

Port = tuple[str, int]
"""Key of an operator and number of its output."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator as an engine traced it.

    Args:
        key: Unique name within the trace; for sources the name that the node gets.
        kind: A key of the table of rules, or ``"identity"``.
        attributes: Made by `convmesh.graph.kinds`.
        inputs: Key and output number of each input.
        output_shapes: Shape of each output.
        parameters: Its parameters.
        dtype: Data type of its outputs.
        module: Path of the module in which it is written.
        origin: The framework's own name for it, for an operator without a rule.
        call: As `convmesh.graph.graph.Node` tells.
    """

    key: str
    kind: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Port, ...] = ()
    output_shapes: tuple[Shape, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    dtype: str = "float32"
    module: str = ""
    origin: str = ""
    call: int | None = None

    @property
    def label(self) -> str:
        """What it is, for its name."""
        if self.kind == "elementwise":
            return str(self.attributes["function"])
        if self.kind == "opaque":
            *_, name = (part for part in str(self.attributes["operator"]).split(".")[:2])
            return name.lower()
        return self.kind

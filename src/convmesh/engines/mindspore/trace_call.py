"""A call of a primitive of MindSpore, and what it means in `convmesh.graph`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from convmesh.engines.mindspore.trace_mindir import Constant
from convmesh.graph.graph import Shape
from convmesh.graph.operator import Port


@dataclass(frozen=True)
class Value:
    """A tensor that an operator makes.

    Args:
        port: Which output of which operator.
        shape: Its shape.
        calls: Paths of the cells whose calls it stands in, outermost first.
    """

    port: Port
    shape: Shape
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Own:
    """A parameter of the network, loaded.

    Args:
        name: Its name in MindSpore.
        shape: Its shape.
    """

    name: str
    shape: Shape


Input = Value | Own | Constant | tuple["Input", ...] | None


@dataclass(frozen=True)
class Call:
    """One call of a primitive.

    Args:
        name: The primitive.
        attributes: What it has fixed.
        inputs: What it takes; a tuple for a list of tensors.
        shapes: Shapes of what it returns.
    """

    name: str
    attributes: Mapping[str, Any]
    inputs: tuple[Input, ...]
    shapes: tuple[Shape, ...]

    def tensor(self, index: int = 0) -> Value | None:
        """The tensor at a position, or None if there is no computed one."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return found if isinstance(found, Value) else None

    def own(self, index: int) -> Own | None:
        """The parameter at a position, or None."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return found if isinstance(found, Own) else None

    def constant(self, index: int, default: Any = None) -> Any:
        """The value of the constant at a position."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return found.value if isinstance(found, Constant) else default


@dataclass(frozen=True)
class Meaning:
    """What a call is.

    Args:
        kind: A kind of the table of rules, ``"identity"``, or ``"bias"`` for what is joined to the operator before.
        attributes: Its attributes.
        inputs: Its tensors, some of which may be parameters used by themselves.
        parameters: Its parameters by role.
    """

    kind: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Value | Own | Constant, ...] = ()
    parameters: Mapping[str, Own] = field(default_factory=dict)


def of_first(call: Call, kind: str, attributes: Mapping[str, Any]) -> Meaning | None:
    """A meaning whose one input is the first of the call; None if that is no computed tensor."""
    x = call.tensor(0)
    return None if x is None else Meaning(kind, attributes, (x,))


def parameters_at(call: Call, first: int, roles: tuple[str, ...]) -> dict[str, Own] | None:
    """Parameters by role, from a position on; None if one is computed."""
    found = {role: call.own(first + index) for index, role in enumerate(roles)}
    known = {role: own for role, own in found.items() if own is not None}
    return known if len(known) == len(roles) else None

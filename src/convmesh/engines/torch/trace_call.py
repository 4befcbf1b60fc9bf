"""A call of an operator of PyTorch, and what it means in `convmesh.graph`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from convmesh.graph.graph import Shape


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Args:
        name: The operator without name space, overload and the mark of working in place: ``conv2d``.
        arguments: Value by the schema's name, defaults filled in; tensors are nodes of PyTorch's graph.
        output_shapes: Shapes of what it returns.
        own: Whether a node is a parameter or buffer of the network.
    """

    name: str
    arguments: Mapping[str, Any]
    output_shapes: tuple[Shape, ...]
    own: Callable[[Any], bool]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def shape(self, name: str = "input") -> Shape:
        """The shape of a tensor argument."""
        return shape_of(self.arguments[name])


@dataclass(frozen=True)
class Meaning:
    """What a call is.

    Args:
        kind: A kind of the table of rules, or ``"identity"``.
        attributes: Its attributes.
        inputs: Its tensors.
        parameters: Its parameters by role.
    """

    kind: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[fx.Node, ...] = ()
    parameters: Mapping[str, fx.Node] = field(default_factory=dict)


def shape_of(node: fx.Node) -> Shape:
    """The shape that export found for a node."""
    return tuple(int(size) for size in node.meta["val"].shape)


def own_parameters(call: Call, **by_role: Any) -> dict[str, fx.Node] | None:
    """Parameters by role, those that are None left out; None if one is computed."""
    given = {role: node for role, node in by_role.items() if node is not None}
    return given if all(call.own(node) for node in given.values()) else None


def positive(dim: int, shape: Shape) -> int:
    """A dim counted from the first."""
    return dim % len(shape)

"""Graph: a network as its operators, free of any framework.

A graph is what a network computes in training mode, one node per operator, in an order in which it can be computed.
The same network written for MindSpore and for PyTorch gives equal graphs; `convmesh.graph.canonical` says how.

Shapes are in elements, the samples first, channels second, then depth, height, width as far as there are any.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from convmesh.errors import ModelError

SCHEMA_VERSION = 1
"""Version of the JSON that ``Graph.to_json`` writes."""

Shape = tuple[int, ...]

SOURCES = ("input", "parameter", "constant")
"""Kinds of nodes that compute nothing."""

BUFFERS = ("running_mean", "running_var", "buffer")
"""Roles of tensors that belong to the network and are no parameters."""

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of one element by data type."""


@dataclass(frozen=True)
class Edge:
    """A tensor: which output of which node.

    Args:
        node: Name of the node that makes it.
        output: Which of its outputs.
    """

    node: str
    output: int = 0

    def __str__(self) -> str:
        return f"{self.node}:{self.output}" if self.output else self.node


@dataclass(frozen=True)
class Parameter:
    """A tensor that belongs to the network.

    Args:
        name: Its engine-neutral name, as in torchvision: ``layer1.0.bn1.running_mean``.
        shape: Its shape in PyTorch's layout: a convolution's weight is (out, in / groups, kernel...), a transposed
            one's (in, out / groups, kernel...), a dense layer's (out, in).
        role: ``"weight"``, ``"bias"``, ``"value"`` (a parameter used by itself); or, of what is no parameter,
            ``"running_mean"``, ``"running_var"`` or ``"buffer"``.
        trainable: Whether it takes a gradient.
    """

    name: str
    shape: Shape
    role: str
    trainable: bool = True

    @property
    def num_elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Node:
    """An operator of the network.

    Args:
        name: Unique. The path of its module where that computes nothing else (``layer1.0.conv1``), else the path of the
            module in which it is written and what it is (``layer1.0.add``); ``@2`` marks the second of a name.
        kind: A key of `convmesh.graph.rules.RULES`.
        attributes: What the kind needs, of numbers, texts, booleans and tuples of them; see `convmesh.graph.kinds`.
        inputs: The tensors that it computes with, without its parameters.
        output_shapes: Shape of each output.
        parameters: Its own parameters and statistics.
        dtype: Data type of its outputs, like ``"float32"``.
        module: Path of the module in which it is written, as users see it; empty for the network itself. Whether a
            ReLU is written as a module or as a function is no part of what a network computes: graphs that differ in
            this alone are equal.
        call: Which call of its module it is, counting those of functions that the engine can put others in place of;
            None where it can't. Like the module no part of what the network computes.
    """

    name: str
    kind: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Edge, ...] = ()
    output_shapes: tuple[Shape, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    dtype: str = "float32"
    module: str = field(default="", compare=False)
    call: int | None = field(default=None, compare=False)

    @property
    def shape(self) -> Shape:
        """The shape of the first output."""
        return self.output_shapes[0]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of its outputs."""
        return DTYPE_BYTES[self.dtype]

    @property
    def output_bytes(self) -> int:
        """Bytes of all its outputs."""
        return sum(math.prod(shape) for shape in self.output_shapes) * self.element_bytes

    def parameter(self, role: str) -> Parameter | None:
        """Its parameter of a role, or None."""
        return next((parameter for parameter in self.parameters if parameter.role == role), None)


@dataclass(frozen=True)
class Graph:
    """The operators of a network.

    Args:
        nodes: In an order in which they can be computed.
        outputs: What the network returns.

    Raises:
        ModelError: If a name stands twice or a node uses what no earlier node makes.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Edge, ...]

    def __post_init__(self) -> None:
        known: dict[str, Node] = {}
        for node in self.nodes:
            if node.name in known:
                raise ModelError("a graph has two nodes of one name", got=node.name)
            self._check_edges(f"the node {node.name}", node.inputs, known)
            known[node.name] = node
        self._check_edges("the graph", self.outputs, known)

    @staticmethod
    def _check_edges(user: str, edges: tuple[Edge, ...], known: Mapping[str, Node]) -> None:
        for edge in edges:
            if edge.node not in known or not 0 <= edge.output < len(known[edge.node].output_shapes):
                raise ModelError(f"{user} uses what no node before it makes", got=str(edge))

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def node(self, name: str) -> Node:
        """A node by name.

        Raises:
            ModelError: If there is none; the nearest names are told.
        """
        if name not in self._by_name:
            import difflib

            near = difflib.get_close_matches(name, self._by_name, n=3)
            raise ModelError(
                f"the network has no operator '{name}'", fix=f"Did you mean {' or '.join(near)}?" if near else None
            )
        return self._by_name[name]

    def shape(self, edge: Edge) -> Shape:
        """The shape of a tensor."""
        return self._by_name[edge.node].output_shapes[edge.output]

    def input_shapes(self, node: Node) -> tuple[Shape, ...]:
        """The shapes of a node's inputs."""
        return tuple(self.shape(edge) for edge in node.inputs)

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes through which data enters."""
        return tuple(node for node in self.nodes if node.kind == "input")

    @cached_property
    def _consumers(self) -> dict[Edge, tuple[Node, ...]]:
        found: dict[Edge, list[Node]] = {}
        for node in self.nodes:
            for edge in dict.fromkeys(node.inputs):
                found.setdefault(edge, []).append(node)
        return {edge: tuple(nodes) for edge, nodes in found.items()}

    def consumers(self, edge: Edge) -> tuple[Node, ...]:
        """The nodes that use a tensor, in order, each once."""
        return self._consumers.get(edge, ())

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters and buffers, in order of first use; one that several nodes share stands once."""
        found = {parameter.name: parameter for node in reversed(self.nodes) for parameter in reversed(node.parameters)}
        return tuple(reversed(found.values()))

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, trainable or not; running statistics and other buffers are none."""
        return sum(parameter.num_elements for parameter in self.parameters if parameter.role not in BUFFERS)

    @cached_property
    def needs_gradient(self) -> frozenset[str]:
        """Names of the nodes to whose outputs a gradient flows, because something trainable stands before them."""
        found: set[str] = set()
        for node in self.nodes:
            if any(parameter.trainable for parameter in node.parameters) or any(
                edge.node in found for edge in node.inputs
            ):
                found.add(node.name)
        return frozenset(found)

    def to_json(self) -> str:
        """Writes the graph as JSON that ``from_json`` reads back to an equal graph."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "nodes": [_node_as_dict(node) for node in self.nodes],
            "outputs": [[edge.node, edge.output] for edge in self.outputs],
        }
        return json.dumps(content, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Graph:
        """Reads a graph.

        Args:
            text: What ``to_json`` wrote.

        Returns:
            An equal graph.

        Raises:
            ModelError: If the text is not a graph, or of another version.
        """
        try:
            content = json.loads(text)
            version = content["schema_version"]
        except (ValueError, TypeError, KeyError) as error:
            raise ModelError("this is not a graph in JSON", got=f"{type(error).__name__}: {error}") from None
        if version != SCHEMA_VERSION:
            raise ModelError(
                "the graph was written by another version",
                got=f"schema_version {version}",
                expected=SCHEMA_VERSION,
                fix="Write it again with: convmesh graph CONFIG --json",
            )
        try:
            nodes = tuple(_node_from_dict(entry) for entry in content["nodes"])
            return cls(nodes, outputs=tuple(Edge(name, int(output)) for name, output in content["outputs"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ModelError("the graph in JSON is damaged", got=f"{type(error).__name__}: {error}") from None


def _node_as_dict(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "kind": node.kind,
        "module": node.module,
        **({} if node.call is None else {"call": node.call}),
        "dtype": node.dtype,
        "attributes": dict(node.attributes),
        "inputs": [[edge.node, edge.output] for edge in node.inputs],
        "output_shapes": node.output_shapes,
        "parameters": [
            {"name": entry.name, "shape": entry.shape, "role": entry.role, "trainable": entry.trainable}
            for entry in node.parameters
        ],
    }


def _node_from_dict(entry: Mapping[str, Any]) -> Node:
    return Node(
        name=entry["name"],
        kind=entry["kind"],
        module=entry["module"],
        call=entry.get("call"),
        dtype=entry["dtype"],
        attributes={name: _as_tuple(value) for name, value in entry["attributes"].items()},
        inputs=tuple(Edge(name, int(output)) for name, output in entry["inputs"]),
        output_shapes=tuple(tuple(shape) for shape in entry["output_shapes"]),
        parameters=tuple(
            Parameter(item["name"], tuple(item["shape"]), item["role"], item["trainable"])
            for item in entry["parameters"]
        ),
    )


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value

"""Signature: one operator at the shapes at which one rank computes it; all that its seconds depend on.

Operators with equal signatures take equally long, so each is measured, or looked up, once. A signature's text is its
key in a cluster file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from convmesh.graph import Cost, Edge, Graph, Node, Parameter, node_cost
from convmesh.graph.graph import BUFFERS, DTYPE_BYTES, SOURCES, Shape
from convmesh.plan import Resolved, ResolvedPlan
from convmesh.planner.cluster import Direction, OperatorClass

FREE = ("flatten", "reshape")
"""Kinds that only look at memory in another way."""

_CLASSES: dict[str, OperatorClass] = {
    "dense": "dense",
    "batch_norm": "norm", "group_norm": "norm", "instance_norm": "norm", "layer_norm": "norm",
    "max_pool": "pooling", "avg_pool": "pooling", "adaptive_pool": "pooling",
    "concat": "copy", "split": "copy", "slice": "copy", "transpose": "copy", "pad": "copy", "channel_shuffle": "copy",
}  # fmt: skip
# What does not change how long an operator takes, or is told by its shapes.
_UNTOLD = ("eps", "momentum", "p", "value", "in_channels", "out_channels", "in_features", "out_features", "shape")


@dataclass(frozen=True, slots=True)
class Piece:
    """Work that is looked up on one curve.

    Args:
        operator: Its class.
        dtype: Type in which it computes.
        direction: Forward or backward.
        flops: As `convmesh.graph.costs` counts them.
        num_bytes: As `convmesh.planner.signature` counts them.
        times: How often it is done.
    """

    operator: OperatorClass
    dtype: str
    direction: Direction
    flops: int = 0
    num_bytes: int = 0
    times: int = 1


@dataclass(frozen=True)
class Signature:
    """An operator at its local shapes.

    Args:
        kind: A key of `convmesh.graph.rules.RULES`.
        attributes: Name and value of each of its attributes, local: groups and channels of this rank.
        input_shapes: Of each input as the rank computes with it, whole or its part.
        output_shapes: Of each output as the rank computes it, before it is changed at the border.
        parameters: The parameters that it owns, as this rank holds them; their names are their roles.
        gradients: Of each input whether a gradient is wanted.
        dtype: Type in which it computes.
    """

    kind: str
    attributes: tuple[tuple[str, Any], ...]
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    parameters: tuple[Parameter, ...] = ()
    gradients: tuple[bool, ...] = ()
    dtype: str = "float32"

    @cached_property
    def text(self) -> str:
        """The key of a cluster file: kind, shapes, attributes, type, and which gradients are wanted."""
        names = [f"x{place}" for place, wanted in enumerate(self.gradients) if wanted]
        names += [entry.role for entry in self.parameters if entry.trainable]
        shapes = " ".join(map(_sizes, self.input_shapes)) + " -> " + " ".join(map(_sizes, self.output_shapes))
        told = [f"{name}={_sizes(value)}" for name, value in self.attributes if name not in _UNTOLD]
        return " ".join([self.kind, shapes, *told, self.dtype, "gradients=" + (",".join(names) or "none")])

    @property
    def has_backward(self) -> bool:
        """Whether there is anything to do in the backward."""
        return any(self.gradients) or any(entry.trainable for entry in self.parameters)

    @property
    def operator_class(self) -> OperatorClass:
        """On whose curve it is looked up."""
        if self.kind == "convolution":
            return _convolution_class(dict(self.attributes), self.input_shapes[0][1])
        return _CLASSES.get(self.kind, "elementwise")

    @cached_property
    def cost(self) -> Cost:
        """Its FLOPs, as `convmesh.graph.costs` counts them."""
        graph = self.graph()
        return node_cost(graph, graph.node("operator"))

    @cached_property
    def made_bytes(self) -> int:
        """Of all its outputs."""
        return _elements(self.output_shapes) * DTYPE_BYTES[self.dtype]

    @cached_property
    def taken_bytes(self) -> tuple[int, ...]:
        """Of each of its inputs."""
        return tuple(math.prod(shape) * DTYPE_BYTES[self.dtype] for shape in self.input_shapes)

    @cached_property
    def weight_bytes(self) -> int:
        """Of its parameters, in the type in which it computes."""
        weights = sum(entry.num_elements for entry in self.parameters if entry.role not in BUFFERS)
        return weights * DTYPE_BYTES[self.dtype]

    def num_bytes(self, direction: Direction) -> int:
        """Bytes that have to pass through memory at least.

        Forward: inputs, outputs and weights, each once. Backward: the gradients of outputs, those that are wanted, and
        the inputs and weights that they are computed from. An addition hands on the gradient that it gets; adding up
        the gradients of a tensor that is used twice is no operator's (`convmesh.planner.seconds`).
        """
        size = DTYPE_BYTES[self.dtype]
        weights = sum(entry.num_elements for entry in self.parameters if entry.role in ("weight", "bias"))
        made, taken = _elements(self.output_shapes), _elements(self.input_shapes)
        if direction == "forward":
            return 0 if self.kind in (*FREE, "split", "slice") else size * (made + taken + weights)
        if not self.has_backward or self.kind in FREE:
            return 0
        wanted = [shape for shape, flows in zip(self.input_shapes, self.gradients, strict=True) if flows]
        if self.kind == "add":
            return size * sum(made + math.prod(shape) for shape in wanted if shape != self.output_shapes[0])
        learned = sum(entry.num_elements for entry in self.parameters if entry.trainable)
        passes_on = self.operator_class == "copy" or self.kind in ("adaptive_pool", "mean", "sum")
        return size * (made + _elements(wanted) + learned + (0 if passes_on else taken + weights))

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Its work: the forward, then the backward; none of an operator that moves nothing."""
        if self.kind in FREE:
            return ()
        flops: dict[Direction, int] = {
            "forward": self.cost.flops_forward,
            "backward": self.cost.flops_backward if self.has_backward else 0,
        }
        return tuple(
            Piece(self.operator_class, self.dtype, direction, number, self.num_bytes(direction))
            for direction, number in flops.items()
        )

    def graph(self) -> Graph:
        """A graph of this operator alone, named ``operator``; inputs that take gradients are parameters."""
        sources = [
            Node(
                name=f"x{place}",
                kind="parameter" if wanted else "input",
                output_shapes=(shape,),
                parameters=(Parameter(f"x{place}", shape, "value"),) if wanted else (),
                dtype=self.dtype,
            )
            for place, (shape, wanted) in enumerate(zip(self.input_shapes, self.gradients, strict=True))
        ]
        node = Node(
            name="operator",
            kind=self.kind,
            attributes=dict(self.attributes),
            inputs=tuple(Edge(source.name) for source in sources),
            output_shapes=self.output_shapes,
            parameters=self.parameters,
            dtype=self.dtype,
            module="operator",
        )
        return Graph((*sources, node), outputs=(Edge("operator"),))


def signature_of(resolved: ResolvedPlan, node: Node, *, position: int = 0) -> Signature | None:
    """What a rank computes of an operator.

    Args:
        resolved: The plan, applied to the graph of one micro-batch.
        node: The operator.
        position: Of the rank on the channel axis.

    Returns:
        Its signature; None for inputs, parameters and constants, which compute nothing.
    """
    if node.kind in SOURCES:
        return None
    graph, entry = resolved.graph, resolved.operators[node.name]
    inputs = tuple(resolved.taken_shape(node, place, position) for place in range(len(node.inputs)))
    outputs = tuple(resolved.made_shape(node, place, position) for place in range(len(node.output_shapes)))
    if resolved.region is not None and resolved.region.operators[node.name].shards:
        entry, position = resolved.region.operators[node.name], resolved.data_position
    held = (_local_parameter(parameter, entry, position) for parameter in node.parameters)
    parameters = tuple(parameter for parameter in held if not _comes_later(parameter, node, outputs[0]))
    flows = tuple(edge.node in graph.needs_gradient for edge in node.inputs)
    return _interned(
        Signature(
            kind=node.kind,
            attributes=_local_attributes(node, inputs, outputs),
            input_shapes=inputs,
            output_shapes=outputs,
            parameters=parameters,
            gradients=flows,
            dtype=node.dtype,
        )
    )


def signatures(resolved: ResolvedPlan, *, position: int = 0) -> dict[Signature, int]:
    """The distinct operators of a network at the shapes of one rank, and how often each occurs; for measuring them."""
    found: dict[Signature, int] = {}
    for node in resolved.graph:
        signature = signature_of(resolved, node, position=position)
        if signature is not None:
            found[signature] = found.get(signature, 0) + 1
    return found


def _local_parameter(parameter: Parameter, entry: Resolved, position: int) -> Parameter:
    shape, shard = parameter.shape, entry.shards.get(parameter.name)
    if shard is not None:
        shape = (*shape[: shard.dim], len(shard.lists[position]), *shape[shard.dim + 1 :])
    return Parameter(parameter.role, shape, parameter.role, parameter.trainable)


def _comes_later(parameter: Parameter, node: Node, output: Shape) -> bool:
    """Whether it is a bias that is added to this rank's part of a sum over ranks, and no longer to what it computes."""
    if parameter.role != "bias" or node.kind not in ("convolution", "dense"):
        return False
    return parameter.shape[0] != output[1 if node.kind == "convolution" else -1]


def _local_attributes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> tuple[tuple[str, Any], ...]:
    attributes = dict(node.attributes)
    if node.kind == "convolution":
        num_in, num_out = inputs[0][1], outputs[0][1]
        if attributes["groups"] > 1:
            attributes["groups"] = attributes["groups"] * num_in // attributes["in_channels"]
        attributes |= {"in_channels": num_in, "out_channels": num_out}
    elif node.kind == "dense":
        attributes |= {"in_features": inputs[0][-1], "out_features": outputs[0][-1]}
    elif node.kind == "group_norm":
        attributes["groups"] = max(1, attributes["groups"] * outputs[0][1] // node.shape[1])
    elif node.kind == "reshape":
        attributes["shape"] = outputs[0]
    elif node.kind == "split":
        attributes["sizes"] = tuple(shape[attributes["dim"]] for shape in outputs)
    return tuple(sorted(attributes.items()))


def _convolution_class(attributes: dict[str, Any], num_in: int) -> OperatorClass:
    if attributes["transposed"]:
        return "convolution_transposed"
    if attributes["groups"] > 1:
        return "depthwise" if attributes["groups"] == num_in else "grouped"
    return "pointwise" if set(attributes["kernel"]) == {1} else "convolution"


@lru_cache(maxsize=2**16)
def _interned(signature: Signature) -> Signature:
    """The one object of a signature, whose text and cost are found once."""
    return signature


def _elements(shapes: Sequence[Shape]) -> int:
    return sum(map(math.prod, shapes))


def _sizes(value: Any) -> str:
    if isinstance(value, tuple):
        return (":" if any(isinstance(part, tuple) for part in value) else "x").join(map(_sizes, value)) or "1"
    return str(int(value)) if isinstance(value, bool) else str(value)

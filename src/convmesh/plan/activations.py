"""What one rank of a plan keeps of its activations, and what is there again when a block is recomputed.

Tensors have the size of the rank's part, and a change of placement makes new memory:

| change at the border | what the operator keeps as its input, or hands on |
|---|---|
| ``copy`` | the same memory |
| ``gather_sum``, ``gather_samples`` | the rank's part; the gathered whole only where the plan keeps it |
| ``gather``, ``slice``, ``permute``, ``to_channels``, ``to_samples`` before an operator | the changed tensor |
| any change after an operator | the operator keeps its own result, the others the changed one |
| none, but the operator computes in another type | what it is cast to |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

from convmesh.graph import Activations, Edge, Node, kept_with
from convmesh.graph.graph import DTYPE_BYTES
from convmesh.graph.saved import VIEWS
from convmesh.plan.resolved import ResolvedPlan

_NEW = ("gather", "slice", "permute", "to_channels", "to_samples")
_FLOATING = ("float16", "bfloat16", "float32", "float64")


def rank_activations(resolved: ResolvedPlan, *, position: int = 0) -> Activations:
    """What each operator of a rank keeps, with the plan's blocks recomputed.

    Args:
        resolved: The plan, applied to the graph of one micro-batch.
        position: Of the rank on the channel axis.

    Returns:
        Bytes by operator, kept from forward to backward and again in a block's own backward, in the data types of the
        graph.
    """
    return kept_with(resolved.graph, resolved.recomputed, storages=RankStorages(resolved, position))


class RankStorages:
    """The tensors of one rank; implements `convmesh.graph.saved.Storages`.

    A memory is the place at which it is made (``"given"`` by an operator to others, ``"made"`` before a change at its
    border, ``"taken"`` after one, or ``"as float16"`` and the like after a cast), the operator's name, and the number
    of its output.
    """

    def __init__(self, resolved: ResolvedPlan, position: int) -> None:
        self._resolved = resolved
        self._graph = resolved.graph
        self._position = position

    def local(self, node: Node) -> Node:
        """The operator with this rank's channels."""
        whole, own = node.shape, self._resolved.made_shape(node, 0, self._position)
        if own == whole:
            return node
        attributes: dict[str, Any] = dict(node.attributes)
        if node.kind == "group_norm":
            attributes["groups"] = int(attributes["groups"]) * own[1] // whole[1]
        return dataclasses.replace(node, attributes=attributes, output_shapes=(own, *node.output_shapes[1:]))

    def taken(self, node: Node, edge: Edge) -> Hashable:
        """The tensor that others gave, or what a change at the operator's border made of it."""
        new = any(
            entry.before.kind in _NEW or (entry.before.kind in ("gather_sum", "gather_samples") and entry.keep_input)
            for entry in self._resolved.entries(node.name)
        )
        if new and edge == node.inputs[0]:
            return "taken", node.name, 0
        made, wanted = self._graph.node(edge.node).dtype, node.dtype
        given = self.given(edge)
        # Under mixed precision an operator keeps what its input was cast to.
        return (f"as {wanted}", *given[1:]) if made != wanted and {made, wanted} <= set(_FLOATING) else given

    def made(self, node: Node) -> Hashable:
        """The result before it is changed at the border."""
        changed = any(entry.after.kind not in {"none", "copy"} for entry in self._resolved.entries(node.name))
        return ("made", node.name, 0) if changed else self.given(Edge(node.name))

    def given(self, edge: Edge) -> tuple[str, str, int]:
        """The result as others take it; a view is what it views."""
        node = self._graph.node(edge.node)
        if node.kind in VIEWS and all(
            change.kind in {"none", "copy"}
            for entry in self._resolved.entries(node.name)
            for change in (entry.before, entry.after)
        ):
            return self.given(node.inputs[0])
        return "given", edge.node, edge.output

    def num_bytes(self, storage: Hashable) -> int:
        """Bytes of a memory."""
        if not isinstance(storage, tuple):
            return 0
        place, name, output = storage
        node = self._graph.node(name)
        if node.kind == "parameter":
            return 0
        if place.startswith("as "):
            return math.prod(self._local_shape(name, output)) * DTYPE_BYTES[place.removeprefix("as ")]
        if place == "given":
            shape = self._local_shape(name, output)
        elif place == "made":
            shape = self._resolved.made_shape(node, 0, self._position)
        else:
            shape = self._resolved.taken_shape(node, 0, self._position)
        return math.prod(shape) * node.element_bytes

    def _local_shape(self, name: str, output: int) -> tuple[int, ...]:
        return self._resolved.rank_shape(Edge(name, output), self._position)

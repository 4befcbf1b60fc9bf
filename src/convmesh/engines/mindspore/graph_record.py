"""What a compiled graph holds: its collectives, and whether those of all ranks are alike."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from convmesh.engines.contract import CollectiveCount
from convmesh.engines.mindspore.channel_axis import ChannelAxis, Sum
from convmesh.engines.mindspore.host_collectives import ALL, KIND, OWN
from convmesh.engines.mindspore.trace_mindir import Primitive, parse_mindir
from convmesh.errors import EngineError
from convmesh.graph.graph import DTYPE_BYTES
from convmesh.plan import CHANNEL

_PIECES = 8
"""Numbers below 2^16 into which a digest is cut: sums of them over many ranks are exact in float32."""


class Recorded:
    """A graph whose collectives over the channel axis are counted, and checked to be those of the other ranks.

    Args:
        cell: Called with tensors alone.
        axis: The channel axis over which it communicates; None if it does not.
    """

    def __init__(self, cell: nn.Cell, axis: ChannelAxis | None) -> None:
        self._cell = cell
        self._axis = axis
        self._agreement = Sum(axis) if axis is not None else None
        self._of_graph: dict[str, tuple[CollectiveCount, ...]] = {}
        self._counts: list[CollectiveCount] = []

    def __call__(self, *inputs: Tensor) -> Any:
        """Runs the graph; it is compiled first, if need be. All ranks of the axis call it alike.

        Args:
            inputs: Inputs of the cell.

        Returns:
            What the cell returns.

        Raises:
            EngineError: If the ranks' graphs differ, so that their messages could be mixed up.
        """
        if self._axis is not None:
            self._counts += self._prepare(inputs)
        return self._cell(*inputs)

    def take_counts(self) -> tuple[CollectiveCount, ...]:
        """What was communicated over the axis since this was last asked, as it is meant.

        An all-gather counts a rank's own channels, also where an all-reduce of the whole stands for it.
        """
        counts, self._counts = added(self._counts), []
        return counts

    def _prepare(self, inputs: Sequence[Tensor]) -> tuple[CollectiveCount, ...]:
        self._cell.compile(*inputs)
        phase = str(self._cell.compile_phase)
        if phase not in self._of_graph:
            primitives = _compiled(phase)
            self._check_alike(primitives)
            self._of_graph[phase] = collectives_of(primitives, axis=self._axis.name if self._axis else CHANNEL)
        return self._of_graph[phase]

    def _check_alike(self, primitives: Sequence[Primitive]) -> None:
        if self._axis is None or self._agreement is None:
            return
        digest = np.frombuffer(_digest(primitives), np.uint16)[:_PIECES].astype(np.float32)
        total = self._agreement(Tensor(digest, ms.float32)).asnumpy()
        if not np.array_equal(total, digest * self._axis.size):
            raise EngineError(
                "MindSpore has made other graphs of the network on the ranks of the axis 'channel', so that they would "
                "mix up their messages",
                fix="Split channels evenly ('partition: contiguous' and numbers that divide by the ranks)",
            )


def collectives_of(primitives: Sequence[Primitive], *, axis: str = CHANNEL) -> tuple[CollectiveCount, ...]:
    """The marked collectives among the primitives of a graph, by what they stand for.

    Args:
        primitives: Of the graph.
        axis: The axis along which its network is split by channels.

    Returns:
        One entry per kind.
    """
    sums: dict[str, tuple[int, int]] = {}
    for primitive in primitives:
        kind = primitive.attributes.get(KIND)
        if kind is not None:
            num_bytes = math.prod(primitive.shapes[0]) * DTYPE_BYTES[primitive.dtype]
            number, total = sums.get(kind, (0, 0))
            meant = num_bytes * primitive.attributes[OWN] // primitive.attributes[ALL]
            sums[kind] = number + 1, total + meant
    return tuple(
        CollectiveCount("activations", kind, number, num_bytes, axis=axis)
        for kind, (number, num_bytes) in sorted(sums.items())
    )


def added(counts: Sequence[CollectiveCount]) -> tuple[CollectiveCount, ...]:
    """Counts of one purpose and kind added up."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for count in counts:
        key = (count.purpose, count.kind, count.axis)
        number, num_bytes = sums.get(key, (0, 0))
        sums[key] = number + count.number, num_bytes + count.num_bytes
    return tuple(
        CollectiveCount(purpose, kind, number, num_bytes, axis)
        for (purpose, kind, axis), (number, num_bytes) in sums.items()
    )


def _compiled(phase: str) -> list[Primitive]:
    from mindspore.common.api import _cell_graph_executor

    return parse_mindir(_cell_graph_executor._graph_executor.get_func_graph_proto(phase, "mind_ir", False)).primitives


def _digest(primitives: Sequence[Primitive]) -> bytes:
    """A hash of which primitive takes the results of which others; not of shapes and numbers, which may differ."""
    places = {primitive.output: number for number, primitive in enumerate(primitives)}
    structure = [
        (primitive.name, [places.get(name, -1) for name in primitive.inputs if name in places])
        for primitive in primitives
    ]
    return hashlib.sha256(repr(structure).encode()).digest()

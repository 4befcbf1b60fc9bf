"""The closed form: number and bytes of the collectives that one update of a split network takes, by axis.

On the channel axis each change of placement (`convmesh.plan.placement`) communicates, per micro-batch, with ``B`` the
bytes of the whole tensor and ``b`` of a rank's part of it; counted are the inputs of each collective on one rank:

| change | forward | backward, if a gradient flows there |
|---|---|---|
| ``copy`` | | all-reduce of B |
| ``gather_sum`` | all-gather of b | reduce-scatter of B, and all-gather of b again unless the input is kept |
| ``gather`` | all-gather of b | |
| ``slice`` | | all-gather of b |
| ``permute`` | all-gather of b before | all-gather of b after |
| ``reduce_scatter`` | reduce-scatter of B | all-gather of b |
| ``all_reduce`` | all-reduce of B | |

Where blocks are recomputed, what stands in the column *forward* happens once more for each change that what is kept in
the block is made of (`convmesh.plan.repetition`): not for one that only the block's output needs.

Operators along channels (`convmesh.plan.along`) exchange sums and statistics, B or b of their rows.

A whole parameter used for own channels is all-reduced once per use. Each update adds one all-reduce of 16 bytes, by
which the ranks agree on overflow and the gradient's norm; where bits of whole gradients may differ
(`convmesh.plan.resolved.ResolvedPlan.replicas_may_differ`), one broadcast makes them equal before.

On the data axis, with ``B`` the bytes of own samples with all channels and ``b`` those of own channels of all ranks'
samples, where each rank has equally many:

| change | forward | backward, if a gradient flows there |
|---|---|---|
| ``to_channels`` | all-to-all of B | all-to-all of b |
| ``to_samples`` | all-to-all of b | all-to-all of B |
| ``gather_samples`` | all-gather of B | reduce-scatter of k B, and all-gather of B again unless the input is kept |
| ``scatter_samples`` | reduce-scatter of k B | all-gather of B |

The changes of the first table take place there with the samples of all ranks. Where ranks may have unequal numbers of
samples, each ``to_channels`` and ``gather_samples`` tells them by an all-gather of eight bytes before. Dropout of own
channels exchanges its masks, of a byte per element of own samples, by an all-to-all. An update with
split parameters on the data axis agrees on the norm there too.

Each update sums the gradients of whole parameters over the data axis bucket by bucket, agrees on the parameters in use
by an all-reduce of four bytes for each, and averages the floating-point buffers in one all-reduce. A sharded optimizer
shares its new parameters: one broadcast from each rank on the CPU, one all-gather on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from convmesh.graph import Edge, Node
from convmesh.plan.along import STATISTIC_BYTES, exchanges, num_rows
from convmesh.plan.buckets import fill_buckets
from convmesh.plan.placement import Change
from convmesh.plan.plan import DATA
from convmesh.plan.repetition import Repetition, repetition
from convmesh.plan.resolved import Resolved, ResolvedPlan
from convmesh.plan.weighted import WEIGHTED

NORM_BYTES = 16
"""Bytes of the all-reduce that ends each update: two numbers in float64."""


@dataclass(frozen=True)
class SamplesTold:
    """What an engine sends besides tensors where ranks of the data axis exchange samples for channels.

    Args:
        count_bytes: Bytes by which a rank tells how many samples it has; 0 if it does not.
        mask_bytes: Bytes of a mask of dropout per element.
    """

    count_bytes: int = 8
    mask_bytes: int = 1


SAMPLES_TOLD = {"torch": SamplesTold(), "mindspore": SamplesTold(count_bytes=0, mask_bytes=4)}
"""By engine. MindSpore's graphs know numbers of samples, and masks of dropout travel in float32."""


@dataclass(frozen=True)
class Expected:
    """Collectives of one kind.

    Args:
        kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"`` or ``"broadcast"``.
        number: How many.
        num_bytes: Bytes of all their inputs on one rank.
    """

    kind: str
    number: int
    num_bytes: int


def channel_collectives(
    resolved: ResolvedPlan,
    *,
    position: int,
    num_micro_batches: int = 1,
    element_bytes: int | None = None,
    input_takes_gradient: bool = False,
    samples: SamplesTold = SamplesTold(),
) -> tuple[Expected, ...]:
    """What the forwards and backwards of one update communicate over the axis that a resolved plan tells of.

    Args:
        resolved: The plan, applied to the graph of one micro-batch.
        position: Of the rank on the axis.
        num_micro_batches: Micro-batches of the update, each as large as the graph's.
        element_bytes: Bytes of one element, if not as in the graph.
        input_takes_gradient: Whether the network's input takes a gradient, which it doesn't in training.
        samples: What is sent besides, where samples are exchanged for channels.

    Returns:
        One entry per kind of collective, kinds sorted; without the one of the gradient's norm.
    """
    sums: dict[str, tuple[int, int]] = {}
    if resolved.num_ranks == 1:
        return ()
    closed = _ClosedForm(resolved, position, element_bytes, input_takes_gradient, samples)
    for node in resolved.graph:
        for kind, num_bytes in closed.of(node):
            number, total = sums.get(kind, (0, 0))
            sums[kind] = number + num_micro_batches, total + num_micro_batches * num_bytes
    return tuple(Expected(kind, *sums[kind]) for kind in sorted(sums))


def operator_collectives(
    resolved: ResolvedPlan,
    nodes: Iterable[Node] | None = None,
    *,
    position: int = 0,
    again: Repetition | None = None,
    samples: SamplesTold = SamplesTold(),
) -> dict[str, tuple[tuple[str, int], ...]]:
    """What single operators communicate per micro-batch over the axis that a resolved plan tells of.

    Args:
        resolved: The plan; only the entries of these operators and of those that make their inputs are looked at.
        nodes: The operators; all of them if left out.
        position: Of the rank on the axis.
        again: Which of their changes happen once more; default what the plan's recomputed blocks say.
        samples: What is sent besides, where samples are exchanged for channels.

    Returns:
        Operator to kind and bytes of each of its collectives, forward and backward.
    """
    wanted = tuple(resolved.graph if nodes is None else nodes)
    if resolved.num_ranks == 1:
        return {node.name: () for node in wanted}
    closed = _ClosedForm(resolved, position, None, False, samples, again)
    return {node.name: tuple(closed.of(node)) for node in wanted}


def update_collectives(
    resolved: ResolvedPlan,
    *,
    position: int,
    num_micro_batches: int = 1,
    element_bytes: int | None = None,
    deterministic: bool = True,
    norm_bytes: int = NORM_BYTES,
    samples: SamplesTold = SamplesTold(),
) -> tuple[Expected, ...]:
    """All that an update communicates over an axis along which channels are split, without sums of gradients.

    These are activations, the norm, and what keeps replicas equal.

    Args:
        resolved: The plan, applied to the graph of one micro-batch.
        position: Of the rank on the axis.
        num_micro_batches: Micro-batches of the update, each as large as the graph's.
        element_bytes: Bytes of one element, if not as in the graph.
        deterministic: Whether equal work gives equal bits, as on the CPU.
        norm_bytes: Bytes by which the ranks agree on the norm.
        samples: What is sent besides, where samples are exchanged for channels.

    Returns:
        One entry per kind of collective, kinds sorted.
    """
    if resolved.num_ranks == 1:
        return ()
    found = {
        entry.kind: entry
        for entry in channel_collectives(
            resolved,
            position=position,
            num_micro_batches=num_micro_batches,
            element_bytes=element_bytes,
            samples=samples,
        )
    }
    norm = found.get("all-reduce", Expected("all-reduce", 0, 0))
    found["all-reduce"] = Expected("all-reduce", norm.number + 1, norm.num_bytes + norm_bytes)
    if resolved.num_whole_trainable and resolved.replicas_may_differ(deterministic=deterministic):
        size = element_bytes if element_bytes is not None else next(iter(resolved.graph)).element_bytes
        found["broadcast"] = Expected("broadcast", 1, size * resolved.num_whole_trainable)
    return tuple(found[kind] for kind in sorted(found))


def data_collectives(
    parameter_bytes: Sequence[int],
    buffer_bytes: int,
    *,
    num_ranks: int,
    bucket_bytes: int,
    shared_bytes: int = 0,
    broadcasts: bool = True,
) -> tuple[Expected, ...]:
    """What one update communicates over the data axis.

    Args:
        parameter_bytes: Of each trainable parameter as a rank holds it, in order.
        buffer_bytes: Of a rank's floating-point buffers.
        num_ranks: Ranks on the data axis.
        bucket_bytes: A bucket of gradients is closed once it holds so many bytes.
        shared_bytes: Bytes of a rank's slice of the parameters with a sharded optimizer; 0 without.
        broadcasts: Whether slices are shared by broadcasts, as on the CPU.

    Returns:
        One entry per kind of collective, kinds sorted; none on an axis of one.
    """
    if num_ranks == 1:
        return ()
    number = count_buckets(parameter_bytes, bucket_bytes) + 1 + (buffer_bytes > 0)
    found = [Expected("all-reduce", number, sum(parameter_bytes) + 4 * len(parameter_bytes) + buffer_bytes)]
    if shared_bytes and broadcasts:
        found.append(Expected("broadcast", num_ranks, num_ranks * shared_bytes))
    elif shared_bytes:
        found.insert(0, Expected("all-gather", 1, shared_bytes))
    return tuple(found)


def together(*parts: Sequence[Expected]) -> tuple[Expected, ...]:
    """Several lists of collectives as one.

    Args:
        parts: Lists with one entry per kind.

    Returns:
        One entry per kind, kinds sorted.
    """
    sums: dict[str, Expected] = {}
    for entry in (entry for part in parts for entry in part):
        before = sums.get(entry.kind, Expected(entry.kind, 0, 0))
        sums[entry.kind] = Expected(entry.kind, before.number + entry.number, before.num_bytes + entry.num_bytes)
    return tuple(sums[kind] for kind in sorted(sums))


def count_buckets(parameter_bytes: Sequence[int], bucket_bytes: int) -> int:
    """How many buckets gradients of these sizes are reduced in.

    Args:
        parameter_bytes: Size of each gradient, in the order of the parameters.
        bucket_bytes: A bucket is closed once it holds so many bytes.

    Returns:
        The number of buckets of one data type.
    """
    return max(fill_buckets(parameter_bytes, bucket_bytes), default=-1) + 1


def _dropped(shape: tuple[int, ...], node: Node, mask_bytes: int) -> Iterator[tuple[str, int]]:
    """Masks of own samples, drawn as on one device and exchanged for those of own channels."""
    if node.attributes["p"] > 0:
        yield "all-to-all", mask_bytes * math.prod(shape[:2] if node.attributes["whole_channels"] else shape)


class _ClosedForm:
    """The collectives of single operators."""

    def __init__(
        self,
        resolved: ResolvedPlan,
        position: int,
        element_bytes: int | None,
        input_takes_gradient: bool,
        samples: SamplesTold,
        again: Repetition | None = None,
    ) -> None:
        self._resolved = resolved
        self._graph = resolved.graph
        self._position = position
        self._element_bytes = element_bytes
        self._samples = samples
        # Parts of the samples that come together where channels are split.
        self._num_parts = resolved.num_ranks if resolved.axis == DATA else 1
        self._flowing = self._graph.needs_gradient
        if input_takes_gradient:
            self._flowing = frozenset(node.name for node in self._graph)
        self._again = repetition(resolved) if again is None else again

    def of(self, node: Node) -> Iterator[tuple[str, int]]:
        """Kind and bytes of each collective of an operator, per micro-batch."""
        entry = self._resolved.operators[node.name]
        if entry.before.kind != "none":
            yield from self._before(node, entry)
        if entry.after.kind != "none":
            shape, flows = self._graph.shape(Edge(node.name)), node.name in self._flowing
            yield from self._change(entry.after, shape, flows, node, again=node.name in self._again.after)
        if entry.along and node.kind != "split":
            yield from self._along(node)
        if node.kind == "dropout" and self._resolved.axis == DATA and entry.split == "channels":
            yield from _dropped(self._graph.input_shapes(node)[0], node, self._samples.mask_bytes)
        for name in entry.summed:
            parameter = next(found for found in self._graph.parameters if found.name == name)
            yield "all-reduce", parameter.num_elements * self._bytes(node)

    def _before(self, node: Node, entry: Resolved) -> Iterator[tuple[str, int]]:
        edge = node.inputs[0]
        shape = self._graph.shape(edge)
        again = node.name in self._again.before
        forgets = entry.before.kind in ("gather_sum", "gather_samples") and not entry.keep_input
        yield from self._change(entry.before, shape, edge.node in self._flowing, node, again=again)
        weight = node.parameter("weight")
        learns = weight is not None and weight.trainable
        if forgets and node.kind in WEIGHTED and learns:
            part = len(entry.before.source[self._position]) if entry.before.source else None
            yield "all-gather", self._part(shape, part, node)

    def _along(self, node: Node) -> Iterator[tuple[str, int]]:
        row_bytes = num_rows(node, self._graph.input_shapes(node)[0]) * max(STATISTIC_BYTES, self._bytes(node))
        forward, backward = exchanges(node)
        times = 2 if node.name in self._again.along else 1
        yield from [(kind, number * row_bytes) for kind, number in forward] * times
        if node.inputs[0].node in self._flowing or any(entry.trainable for entry in node.parameters):
            yield from ((kind, number * row_bytes) for kind, number in backward)

    def _change(
        self, change: Change, shape: tuple[int, ...], flows: bool, node: Node, *, again: bool
    ) -> Iterator[tuple[str, int]]:
        own = math.prod(shape) * self._bytes(node)
        whole = own * self._num_parts
        before = self._part(shape, len(change.source[self._position]), node) if change.source else whole
        after = self._part(shape, len(change.target[self._position]), node) if change.target else whole
        forward, backward = {
            "copy": ((), (("all-reduce", whole),)),
            "gather_sum": ((("all-gather", before),), (("reduce-scatter", whole),)),
            "gather": ((("all-gather", before),), ()),
            "slice": ((), (("all-gather", after),)),
            "permute": ((("all-gather", before),), (("all-gather", after),)),
            "reduce_scatter": ((("reduce-scatter", whole),), (("all-gather", after),)),
            "all_reduce": ((("all-reduce", whole),), ()),
            "to_channels": ((("all-to-all", own),), (("all-to-all", after),)),
            "to_samples": ((("all-to-all", before),), (("all-to-all", own),)),
            "gather_samples": ((("all-gather", own),), (("reduce-scatter", whole),)),
            "scatter_samples": ((("reduce-scatter", whole),), (("all-gather", own),)),
        }[change.kind]
        if self._samples.count_bytes and change.kind in ("to_channels", "gather_samples"):
            forward = (("all-gather", self._samples.count_bytes), *forward)
        yield from forward
        if again:
            yield from forward
        if flows:
            yield from backward

    def _part(self, shape: tuple[int, ...], num_channels: int | None, node: Node) -> int:
        """Bytes of own channels; of all channels of own samples where their number is None."""
        if num_channels is None:
            return math.prod(shape) * self._bytes(node)
        return self._num_parts * math.prod((shape[0], num_channels, *shape[2:])) * self._bytes(node)

    def _bytes(self, node: Node) -> int:
        return self._element_bytes if self._element_bytes is not None else node.element_bytes

"""The outer choices of a plan: mesh, micro-batches per update, recomputation, sharding of the optimizer.

`AXES` is all that this module knows of axes: a new one joins with an entry there, and `convmesh.planner.ways` with what
operators do on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from convmesh.graph import Graph
from convmesh.mesh import Mesh
from convmesh.plan.plan import CHANNEL
from convmesh.plan.weighted import WEIGHTED, Weighted

Recompute = Literal["none", "blocks"]


def largest_split(graph: Graph) -> int:
    """Ranks of a channel axis of which each can have a channel of some convolution or dense layer."""
    layers = [Weighted(node=node) for node in graph if node.kind in WEIGHTED]
    return max((max(layer.num_in, layer.num_out) for layer in layers), default=1)


@dataclass(frozen=True)
class AxisRule:
    """How large an axis can be.

    Args:
        largest: From the network and the samples of a global batch to the largest size.
        reason: Why it can't be larger, with ``{largest}`` and ``{size}``.
    """

    largest: Callable[[Graph, int], int]
    reason: str


AXES: Mapping[str, AxisRule] = {
    "data": AxisRule(
        lambda _graph, samples: samples, "a global batch of {largest} samples can't be dealt to {size} ranks"
    ),
    CHANNEL: AxisRule(
        lambda graph, _samples: largest_split(graph), "no layer has more than {largest} channels, for {size} ranks"
    ),
}
"""The axes over which ranks are spread, slowest first."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A candidate before the operators' splits are chosen.

    Args:
        mesh: The ranks.
        accumulation: Micro-batches per update.
        recompute: Whether blocks compute their activations again in the backward.
        optimizer_sharding: Whether each rank of the data axis keeps its part of the optimizer's state only.
    """

    mesh: Mesh
    accumulation: int = 1
    recompute: Recompute = "none"
    optimizer_sharding: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal outlines."""
        return (*self.mesh.sizes.items(), self.accumulation, self.recompute, self.optimizer_sharding)

    @property
    def is_plain(self) -> bool:
        """Whether it is data parallelism as users start with it."""
        return (
            self.mesh.size("data") == self.mesh.num_ranks
            and self.accumulation == 1
            and self.recompute == "none"
            and not self.optimizer_sharding
        )


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is fixed beforehand; None where the planner may choose.

    Args:
        mesh: The mesh.
        accumulation: Micro-batches per update.
        recompute: Recomputation.
        optimizer_sharding: Sharding of the optimizer.
        uses_all: Whether no rank may stay idle.
    """

    mesh: Mesh | None = None
    accumulation: int | None = None
    recompute: Recompute | None = None
    optimizer_sharding: bool | None = None
    uses_all: bool = False


@dataclass(frozen=True)
class Outlines:
    """All outlines, and the meshes that can't be.

    Args:
        found: What may be tried: plain data parallelism first, then fewer before more micro-batches.
        refused: Mesh and why it can't be.
    """

    found: tuple[Outline, ...]
    refused: tuple[tuple[Mesh, str], ...] = field(default=())


def list_outlines(
    graph: Graph, *, global_batch: int, num_ranks: int, wishes: Wishes | None = None, has_blocks: bool = True
) -> Outlines:
    """Lists all outlines for a number of ranks, and for those of its divisors that would leave ranks idle.

    Args:
        graph: The network.
        global_batch: Samples per update.
        num_ranks: The ranks there are.
        wishes: What is fixed beforehand.
        has_blocks: Whether there is anything to recompute.

    Returns:
        The outlines and the meshes that were left out.
    """
    wishes = wishes or Wishes()
    found: list[Outline] = []
    refused: list[tuple[Mesh, str]] = []
    meshes = [wishes.mesh] if wishes.mesh is not None else list(_meshes(num_ranks))
    if wishes.uses_all:
        meshes = [mesh for mesh in meshes if mesh.num_ranks == num_ranks]
    for mesh in meshes:
        reason = _impossible(graph, mesh, global_batch)
        if reason is None:
            found += _of_mesh(mesh, global_batch, wishes, has_blocks)
        elif mesh.num_ranks == num_ranks:
            refused.append((mesh, reason))
    return Outlines(tuple(sorted(found, key=_order)), tuple(refused))


def _order(outline: Outline) -> tuple[int, int, int, bool, bool]:
    """All ranks before fewer, the data axis before others, plain before special."""
    mesh = outline.mesh
    special = outline.recompute != "none", outline.optimizer_sharding
    return -mesh.num_ranks, -mesh.size("data"), outline.accumulation, *special


def _meshes(num_ranks: int) -> Iterator[Mesh]:
    for number in divisors(num_ranks):
        yield from (Mesh(dict(zip(AXES, sizes, strict=True))) for sizes in factorisations(number, len(AXES)))


def factorisations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many factors, in order."""
    if num_factors == 1:
        yield (number,)
        return
    for first in divisors(number):
        yield from ((first, *rest) for rest in factorisations(number // first, num_factors - 1))


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return sorted({*low, *(number // factor for factor in low)})


def accumulations(num_samples: int) -> list[int]:
    """Numbers of micro-batches that share a rank's samples evenly, each at least twice the one before."""
    found = [1]
    for divisor in divisors(num_samples):
        if divisor >= 2 * found[-1]:
            found.append(divisor)
    return found


def _impossible(graph: Graph, mesh: Mesh, global_batch: int) -> str | None:
    for axis, rule in AXES.items():
        size, largest = mesh.size(axis), rule.largest(graph, global_batch)
        if size > largest:
            return rule.reason.format(size=size, largest=largest)
    if global_batch % mesh.size("data"):
        return f"{global_batch} samples can't be dealt to {mesh.size('data')} ranks evenly"
    return None


def _of_mesh(mesh: Mesh, global_batch: int, wishes: Wishes, has_blocks: bool) -> Iterator[Outline]:
    num_samples = global_batch // mesh.size("data")
    steps = accumulations(num_samples)
    if wishes.accumulation is not None:
        steps = [wishes.accumulation] if num_samples % wishes.accumulation == 0 else []
    recomputes: Sequence[Recompute] = ("none", "blocks") if has_blocks else ("none",)
    shardings = (False, True) if mesh.size("data") > 1 else (False,)
    for accumulation in steps:
        for recompute in recomputes if wishes.recompute is None else (wishes.recompute,):
            for sharding in shardings if wishes.optimizer_sharding is None else (wishes.optimizer_sharding,):
                yield Outline(mesh=mesh, accumulation=accumulation, recompute=recompute, optimizer_sharding=sharding)

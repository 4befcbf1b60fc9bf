"""Plan: how a network is split over a mesh and run on it, as data.

A plan names, per operator and axis, a split, and how an update is run; it computes nothing. `convmesh.plan.resolve`
tells what follows from it for a graph, `convmesh.plan.load` reads and writes it as YAML.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from convmesh.graph import Graph, Node, node_splits
from convmesh.mesh import Mesh

SCHEMA_VERSION = 1
"""Version of the plan file."""

CHANNEL = "channel"
"""The axis along which channels are split."""

DATA = "data"
"""The axis along which the network's input is split by samples."""

CHANNEL_SPLITS = ("out_channels", "in_channels", "groups", "channels", "whole")
"""What may be split along the channel axis."""

DATA_SPLITS = ("out_channels", "in_channels", "groups", "channels", "samples")
"""What may be split along the data axis."""

Split = Literal["out_channels", "in_channels", "groups", "channels", "whole", "samples"]
"""What one axis may split; ``whole`` on the channel axis alone, ``samples`` on the data axis alone."""

Partition = Literal["contiguous", "round_robin"] | tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Which channels each rank owns: by name, as the number of each rank, or as the list of each rank."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How an operator is split along one axis.

    Args:
        split: One of ``CHANNEL_SPLITS``, or of ``DATA_SPLITS``.
        partition: Which channels of the result each rank owns; for ``in_channels`` with whole output, and where
            an input has to be split first, which channels of the input.
        keep_input: Whether an input gathered in the forward is kept for the backward; if not, it is gathered again.
        output: Whether ``in_channels`` ends with every rank's own channels, with all of them on every rank, or, on
            the data axis, with all channels of own samples.
    """

    split: Split
    partition: Partition = "contiguous"
    keep_input: bool = False
    output: Literal["sharded", "whole", "samples"] = "sharded"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a plan says about operators.

    Args:
        pattern: A name, or a pattern with ``*`` and ``?``; a ``*`` matches dots too.
        axes: Axis name to choice.
    """

    pattern: str
    axes: Mapping[str, Choice]

    @property
    def is_pattern(self) -> bool:
        """Whether it may mean several operators."""
        return any(letter in self.pattern for letter in "*?[")

    def matches(self, name: str) -> bool:
        """Whether it means the operator of this name."""
        return fnmatch.fnmatchcase(name, self.pattern)


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """What is noted of the network that a plan was made for.

    Args:
        fingerprint: Equal for equal graphs, whatever the number of samples.
        input_shape: Shape of one sample, channels first.
        operators: Name of each operator with parameters to what it is, in words.
    """

    fingerprint: str
    input_shape: tuple[int, ...]
    operators: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What a plan says about running a network besides how it is split; None leaves it to the run file.

    Args:
        accumulation: Micro-batches per update.
        optimizer_sharding: Whether each rank of the data axis keeps a part of the optimizer state.
        bucket_bytes: Gradients are reduced in buckets of about this size.
        recompute: Names and patterns of the blocks (`convmesh.graph.blocks`) that the backward computes again instead
            of keeping what they need: ``("*",)`` for all of them, ``()`` for none.
    """

    accumulation: int | None = None
    optimizer_sharding: bool | None = None
    bucket_bytes: int | None = None
    recompute: tuple[str, ...] | None = None

    def over(self, other: Execution) -> Execution:
        """What this says, and where it says nothing what another one does."""
        mine = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return replace(other, **{name: value for name, value in mine.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class Foretold:
    """What the planner has foretold of a plan, and why it chose it.

    Args:
        cluster: The devices that it was made for.
        global_batch: Samples per update.
        seconds: Of one update.
        seconds_by_kind: Kind of work to its seconds; they add up to ``seconds``.
        memory_bytes: Of the rank that needs most, at the moment when it needs most.
        memory_by_kind: Kind to bytes; they add up to ``memory_bytes``.
        memory_limit_bytes: What a rank might fill.
        reasons: Why this plan and not the others, in words.
    """

    cluster: str
    global_batch: int
    seconds: float
    seconds_by_kind: Mapping[str, float]
    memory_bytes: int
    memory_by_kind: Mapping[str, int]
    memory_limit_bytes: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a network is split and run.

    Args:
        mesh: The ranks.
        entries: What is said about operators; of several that mean the same one, the last counts. Operators that own
            weights and are not named stay whole; all others follow their inputs.
        opaque: Whether the inputs of operators without a rule are made whole, or such operators refused.
        execution: Accumulation, optimizer, buckets and recomputation.
        network: The network that it was made for; None for one written by hand.
        foretold: What the planner has foretold; None where nobody has. It changes nothing that is computed.
    """

    mesh: Mesh
    entries: tuple[Entry, ...] = ()
    opaque: Literal["gather", "refuse"] = "refuse"
    execution: Execution = field(default_factory=Execution)
    network: NetworkFacts | None = None
    foretold: Foretold | None = None

    def names(self, axis: str) -> bool:
        """Whether anything is said about an axis of the mesh."""
        return any(axis in entry.axes for entry in self.entries)

    def choice(self, graph: Graph, node: Node, axis: str = CHANNEL) -> Choice | None:
        """What the plan says about an operator on an axis.

        Args:
            graph: The network.
            node: One of its operators.
            axis: An axis of the mesh.

        Returns:
            The last entry that means it; a pattern means only operators that can be split so.
        """
        for entry in reversed(self.entries):
            if axis not in entry.axes or not entry.matches(node.name):
                continue
            if not entry.is_pattern or entry.axes[axis].split in node_splits(graph, node).allowed:
                return entry.axes[axis]
        return None

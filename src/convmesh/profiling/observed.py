"""What a profile measured of the things that a cost model has constants for.

A step is the time until the last rank has done its own work, and communication beyond that:

    step = communication + the largest own time of all ranks,  own = computing + waiting for data + idling

Legend: R ranks, S steps, C collectives.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from convmesh.profiling.analysis import Analysis
from convmesh.profiling.events import Floats, Integers
from convmesh.profiling.matching import by_name


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Collectives of one kind over one axis, in the steady steps.

    Args:
        axis: Mesh axis.
        kind: ``"all-reduce"`` and so on.
        purpose: What travels, ``"gradients"`` for example; empty if not known.
        num_ranks: Ranks of a group.
        num_per_step: Collectives of a group in a step.
        bytes_C: Input bytes of each, on a rank.
        seconds_C: What each took from the moment at which all ranks had come and the one before was through.
    """

    axis: str
    kind: str
    purpose: str
    num_ranks: int
    num_per_step: float
    bytes_C: Integers
    seconds_C: Floats

    @property
    def seconds_per_step(self) -> float:
        """Of all of them in a step."""
        return self.num_per_step * float(self.seconds_C.mean())

    def by_size(self) -> list[tuple[int, float]]:
        """Mean seconds of each size, rising: some wait for a core, and only the mean adds up to what all take."""
        sizes = np.unique(self.bytes_C)
        return [(int(size), float(self.seconds_C[self.bytes_C == size].mean())) for size in sizes]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Figures of the steady steps.

    Args:
        step_seconds: Of a step, on average.
        other_RS: Computing, the optimizer included, and idling.
        reading_RS: Waiting for data.
        optimizer_seconds: Of an average rank and step.
        step_S: Numbers of the steps.
        num_samples_RS: Samples computed; 0 if not known.
        transfers: Collectives, those that take longest first.
        peak_memory_bytes: Largest sampled memory of all ranks; 0 if not known.
    """

    step_seconds: float
    other_RS: Floats
    reading_RS: Floats
    optimizer_seconds: float
    step_S: Integers
    num_samples_RS: Integers
    transfers: tuple[Transfers, ...]
    peak_memory_bytes: int

    @property
    def computing_seconds(self) -> float:
        """Forward, backward and what nobody noted, of an average rank and step."""
        return max(float(self.other_RS.mean()) - self.optimizer_seconds, 0.0)

    @property
    def reading_seconds(self) -> float:
        """Waiting for data, of an average rank and step."""
        return float(self.reading_RS.mean())

    @property
    def communication_seconds(self) -> float:
        """Of a step, what it takes longer than the slowest rank's own work."""
        return max(self.step_seconds - self.own_seconds(self.reading_RS), 0.0)

    def own_seconds(self, reading_RS: Floats) -> float:
        """Own work of the slowest rank of each step, on average, if ranks waited so long for data."""
        return float((self.other_RS + reading_RS).max(axis=0).mean())


def observe(analysis: Analysis) -> Observed:
    """Takes from a profile what it measured.

    Args:
        analysis: The profile.

    Returns:
        The figures.
    """
    steady = analysis.steady
    return Observed(
        step_seconds=float(steady.step_RS.mean()),
        other_RS=steady.compute_RS + steady.idle_RS,
        reading_RS=steady.data_RS,
        optimizer_seconds=float(steady.optimizer_RS.mean()),
        step_S=steady.step_S,
        num_samples_RS=steady.num_samples_RS,
        transfers=tuple(_transfers(analysis)),
        peak_memory_bytes=max(analysis.peak_memory_bytes, default=0),
    )


def _transfers(analysis: Analysis) -> list[Transfers]:
    step_S = analysis.steady.step_S
    found: dict[tuple[str, str, int], list[tuple[Integers, Floats]]] = defaultdict(list)
    for group, chosen in by_name(analysis.trace, analysis.matched, step_S):
        seconds_C = group.service_seconds
        for name, chosen_C in chosen:
            found[name, group.axis, len(group.ranks)].append((group.num_bytes_C[chosen_C], seconds_C[chosen_C]))
    entries = []
    for (name, axis, num_ranks), parts in found.items():
        kind, _, purpose = name.partition(" ")
        bytes_C = np.concatenate([sizes for sizes, _ in parts])
        entries.append(
            Transfers(
                axis=axis,
                kind=kind,
                purpose=purpose,
                num_ranks=num_ranks,
                num_per_step=len(bytes_C) / (len(parts) * len(step_S)),
                bytes_C=bytes_C,
                seconds_C=np.concatenate([seconds for _, seconds in parts]),
            )
        )
    return sorted(entries, key=lambda entry: -entry.seconds_per_step)

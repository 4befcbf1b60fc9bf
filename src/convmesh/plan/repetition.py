"""Which changes of placement happen once more when the blocks of a plan are recomputed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from convmesh.graph import repeated
from convmesh.graph.recomputation import Repeated
from convmesh.plan.resolved import ResolvedPlan


@dataclass(frozen=True)
class Repetition:
    """Operators of recomputed blocks, by what of their changes is needed again.

    Args:
        before: Those whose input is changed again.
        after: Those whose output is changed again.
        along: Those that work along channels, and do it again.
        inside: All operators of recomputed blocks.
    """

    before: frozenset[str]
    after: frozenset[str]
    inside: frozenset[str]
    along: frozenset[str] = frozenset()

    def spares_along(self, name: str) -> bool:
        """Whether an operator along channels need not exchange anything when its block is recomputed."""
        return name in self.inside and name not in self.along

    def spares_before(self, name: str) -> bool:
        """Whether an operator's input need not be changed when its block is recomputed."""
        return name in self.inside and name not in self.before

    def spares_after(self, name: str) -> bool:
        """Whether an operator's output need not be changed when its block is recomputed."""
        return name in self.inside and name not in self.after


def repetition(resolved: ResolvedPlan) -> Repetition:
    """What happens again: what the tensors are made of that a block's backward needs.

    Args:
        resolved: The plan, applied to a graph.

    Returns:
        Names of operators; empty where nothing is recomputed.
    """
    before: set[str] = set()
    after: set[str] = set()
    along: set[str] = set()
    for block in resolved.recomputed:
        found = repetition_in(resolved, block.nodes, repeated(resolved.graph, block))
        before |= found.before
        after |= found.after
        along |= found.along
    inside = frozenset(name for block in resolved.recomputed for name in block.nodes)
    return Repetition(frozenset(before), frozenset(after), inside, frozenset(along))


def repetition_in(resolved: ResolvedPlan, names: Iterable[str], again: Repeated) -> Repetition:
    """What happens again of some operators of one block.

    Args:
        resolved: The plan; only the entries of these operators are looked at.
        names: The operators.
        again: What happens again in their block.

    Returns:
        Those of them whose changes are needed again; and what of the block makes or runs again.
    """
    inside = frozenset(names)
    before = set()
    for name in inside:
        entry = resolved.operators[name]
        # A gathered input that is not kept is needed by what runs again alone, any other by what keeps it too.
        forgets = entry.before.kind == "gather_sum" and not entry.keep_input
        if name in (again.run if forgets else again.taking):
            before.add(name)
    return Repetition(frozenset(before), again.used, inside, again.run)

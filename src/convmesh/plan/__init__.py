"""Plans: how a network is split over a mesh, as data, and what follows from it."""

from convmesh.plan.plan import CHANNEL, Choice, Entry, Execution, Foretold, NetworkFacts, Plan
from convmesh.plan.resolve import resolve
from convmesh.plan.resolved import Resolved, ResolvedPlan

__all__ = [
    "CHANNEL",
    "Choice",
    "Entry",
    "Execution",
    "Foretold",
    "NetworkFacts",
    "Plan",
    "Resolved",
    "ResolvedPlan",
    "resolve",
]

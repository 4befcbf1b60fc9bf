"""What the planner has found, as plain data for other programs."""

from __future__ import annotations

from typing import Any

from convmesh.planner.found import Judged
from convmesh.report.plan_view import costliest, layer_words
from convmesh.training.auto_plan import Planned, seconds_by_kind


def as_dict(planned: Planned) -> dict[str, Any]:
    """All candidates, the refused meshes, and the chosen plan's costliest layers.

    Args:
        planned: What the search has found.

    Returns:
        Mappings, lists, texts and numbers.
    """
    found = planned.found
    chosen = found.chosen.prediction if found.chosen is not None else None
    content: dict[str, Any] = {
        "num_ranks": planned.task.num_ranks,
        "global_batch": planned.pricer.training.global_batch,
        "memory_limit_bytes": found.memory_bytes,
        "cluster": planned.cluster.name,
        "cluster_reason": planned.cluster_reason,
        "fits": chosen is not None,
        "candidates": [_candidate(planned, entry) for entry in found.candidates],
        "refused": [{"mesh": dict(mesh.sizes), "reason": reason} for mesh, reason in found.refused],
        "ways_out": planned.ways_out() if chosen is None else [],
    }
    if chosen is not None:
        resolved = chosen.candidate.resolved
        content["origins"] = dict(chosen.origins)
        content["costliest"] = [
            {
                "operator": cost.node,
                "seconds": chosen.candidate.accumulation * cost.seconds,
                "plan": layer_words(resolved.graph.node(cost.node), resolved.operators[cost.node]),
            }
            for cost in costliest(chosen)
        ]
    return content


def _candidate(planned: Planned, entry: Judged) -> dict[str, Any]:
    outline, prediction = entry.outline, entry.prediction
    content: dict[str, Any] = {
        "mesh": dict(outline.mesh.sizes),
        "accumulation": outline.accumulation,
        "micro_batch": planned.pricer.samples(outline),
        "recompute": outline.recompute,
        "optimizer_sharding": outline.optimizer_sharding,
        "verdict": entry.verdict,
        "reason": entry.reason,
        "floor_seconds": entry.floor_seconds,
    }
    if entry.floor_bytes:
        content["floor_memory_bytes"] = entry.floor_bytes
    if prediction is not None:
        content |= {
            "seconds": prediction.seconds.total,
            "seconds_by_kind": seconds_by_kind(prediction.seconds),
            "samples_per_second": prediction.samples_per_second,
            "memory_bytes": prediction.memory.total,
            "memory_by_kind": prediction.memory.parts,
            "communication_share": prediction.communication_share,
            "recomputed": list(prediction.candidate.recompute),
        }
    return content

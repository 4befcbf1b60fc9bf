"""What recomputing blocks saves, as the engines do it.

| engine | on the CPU | on other devices |
|---|---|---|
| PyTorch | a block keeps its input alone | the same |
| MindSpore | nothing: a block keeps all, and has it twice while it runs again | as PyTorch; not measured |

MindSpore 2.10 on the CPU: one forward and backward of ResNet-18 (16 images of 128x128 pixels) took 391 MiB above the
start with all blocks recomputed and 268 MiB without. Numbers are exact everywhere; this is about memory alone.
"""

from __future__ import annotations

import dataclasses

from convmesh.graph import Activations
from convmesh.plan import ResolvedPlan
from convmesh.plan.activations import rank_activations
from convmesh.planner.cluster import Cluster
from convmesh.planner.prediction import Training

_SAVES_NOTHING = {("mindspore", "cpu"): "recomputing saves no memory with MindSpore on the CPU"}


def saves_nothing(engine: str, device_kind: str) -> str | None:
    """Why recomputation saves no memory, in words.

    Args:
        engine: ``"torch"`` or ``"mindspore"``.
        device_kind: ``"cpu"``, ``"cuda"`` or ``"ascend"``.

    Returns:
        The reason; None where it does save memory.
    """
    return _SAVES_NOTHING.get((engine, device_kind))


def engine_activations(
    resolved: ResolvedPlan, training: Training, cluster: Cluster, *, position: int = 0
) -> Activations:
    """What each operator of a rank keeps, the plan's blocks being recomputed as the engine does it.

    Args:
        resolved: The plan, applied to the graph of one micro-batch.
        training: Says which engine it is.
        cluster: Says which kind of device it is.
        position: Of the rank on the channel axis.

    Returns:
        Bytes by operator.
    """
    found = rank_activations(resolved, position=position)
    if not resolved.recomputed or saves_nothing(training.engine, cluster.device.kind) is None:
        return found
    whole = rank_activations(dataclasses.replace(resolved, recomputed=()), position=position)
    return Activations(kept=whole.kept, again=found.again)

"""How far loaders read ahead of the training: the same on both engines."""

from __future__ import annotations

from collections.abc import Sequence

from convmesh.config import RunConfig

UPDATES_AHEAD = 2
"""An update takes all of its micro-batches at once. The next must be there by then, and one more evens out files."""


def micro_batches_ahead(keys: Sequence[tuple[int, int, int]]) -> int:
    """Micro-batches that a rank's workers are ahead together.

    Args:
        keys: Epoch, update and number of all micro-batches that are read; not empty.

    Returns:
        Those of ``UPDATES_AHEAD`` updates.
    """
    return UPDATES_AHEAD * sum(key[:2] == keys[0][:2] for key in keys)


def readers_of(run: RunConfig) -> int:
    """Workers of a rank that read ahead: on MindSpore there always is one, a thread."""
    return max(1, run.data.num_workers) if run.engine == "mindspore" else run.data.num_workers

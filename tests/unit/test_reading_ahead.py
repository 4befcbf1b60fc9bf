"""How far loaders read ahead."""

from __future__ import annotations

from convmesh.engines.reading_ahead import UPDATES_AHEAD, micro_batches_ahead


def test_whole_updates_are_read_ahead_however_many_micro_batches_they_have() -> None:
    keys = [(0, update, micro) for update in range(5) for micro in range(3)]

    assert micro_batches_ahead(keys) == 3 * UPDATES_AHEAD
    # A run may go on in the middle of an epoch, and end with fewer micro-batches.
    assert micro_batches_ahead([(1, 7, 0), (1, 8, 0)]) == UPDATES_AHEAD

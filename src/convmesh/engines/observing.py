"""What both engines need to observe a network: numbers that differ in their last bit."""

from __future__ import annotations

import numpy as np

from convmesh.engines.contract import Arrays


def jittered(arrays: Arrays, *, seed: int) -> Arrays:
    """Changes floating-point arrays by at most one unit in the last place, as rounding them otherwise would.

    Args:
        arrays: By name.
        seed: Of the changes.

    Returns:
        New arrays of the same types.
    """
    draw = np.random.default_rng(seed)
    changed = {}
    for name, array in arrays.items():
        if not np.issubdtype(array.dtype, np.floating):
            changed[name] = array
            continue
        change = np.finfo(array.dtype).eps / 2 * draw.uniform(-1, 1, array.shape)
        changed[name] = (array.astype(np.longdouble) * (1 + change.astype(np.longdouble))).astype(array.dtype)
    return changed

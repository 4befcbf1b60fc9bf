"""Which tensors live in a process; of either engine, whose classes of tensors are handed over."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any


def live_tensors(kinds: tuple[type, ...]) -> list[Any]:
    """All tensors of this process."""
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


def whole_alive(step: Any, kinds: tuple[type, ...], *, known: Sequence[Any]) -> set[str]:
    """Split weights of more than one dim of which a tensor of the whole shape is alive, besides known tensors."""
    if step._split is None:
        return set()
    split, tensors = step._split, step.local_tensors()
    wanted = {split.whole_shape(name, tensors[name].shape): name for name in split.shards if tensors[name].ndim > 1}
    old = {id(tensor) for tensor in known}
    shapes = {tuple(tensor.shape) for tensor in live_tensors(kinds) if id(tensor) not in old}
    assert {tensors[name].shape for name in wanted.values()} <= shapes  # Parts are seen.
    return {name for shape, name in wanted.items() if shape in shapes}

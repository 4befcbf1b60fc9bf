"""Collectives of a graph through memory that the ranks of one machine share, called by the graph like any operator.

Legend: N samples, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import ops

from convmesh.engines.shared_exchange import SharedExchange
from convmesh.plan import CHANNEL
from convmesh.plan.partitions import Lists
from convmesh.profiling.recorder import RECORDER

KIND, OWN, ALL = "convmesh_kind", "convmesh_own", "convmesh_all"
"""Attributes of each collective in a graph: what it stands for, and the share of its tensor that is meant to travel."""


def gathering_on_host(exchange: SharedExchange, lists: Lists, position: int) -> Any:
    """An operator from this rank's channels to all.

    Args:
        exchange: The memory.
        lists: Channels of each rank.
        position: Of this rank.

    Returns:
        The operator.
    """
    size, tag = sum(map(len, lists)), exchange.new_tag()

    def gather(part: np.ndarray) -> np.ndarray:
        whole = np.empty((part.shape[0], size, *part.shape[2:]), part.dtype)
        exchange.gather(_flat(part), lists, _flat(whole), tag=tag)
        return whole

    return _operator("all-gather", gather, counts=(len(lists[position]), size))


def scattering_on_host(exchange: SharedExchange, lists: Lists, position: int) -> Any:
    """An operator from this rank's summand of all channels to own channels of the sum.

    Args:
        exchange: The memory.
        lists: Channels of each rank.
        position: Of this rank.

    Returns:
        The operator.
    """
    count, tag = len(lists[position]), exchange.new_tag()

    def scatter(partial: np.ndarray) -> np.ndarray:
        own = np.empty((partial.shape[0], count, *partial.shape[2:]), partial.dtype)
        exchange.reduce_scatter(_flat(partial), lists, _flat(own), tag=tag)
        return own

    return _operator("reduce-scatter", scatter, counts=(sum(map(len, lists)), count))


def summing_on_host(exchange: SharedExchange) -> Any:
    """An operator from this rank's summand to the sum."""
    tag = exchange.new_tag()

    def add(own: np.ndarray) -> np.ndarray:
        total = np.empty(own.size, own.dtype)
        exchange.all_reduce(own.reshape(-1), total, tag=tag)
        return total.reshape(own.shape)

    return _operator("all-reduce", add, counts=(1, 1))


def _operator(kind: str, work: Callable[[np.ndarray], np.ndarray], *, counts: tuple[int, int]) -> Any:
    """Makes an operator of a function; counts are the channels of its input and result."""
    taken, given = counts
    name = f"{kind} activations"

    def noted(array: np.ndarray) -> np.ndarray:
        with RECORDER.span("communication", name, axis=CHANNEL, num_bytes=array.nbytes):
            return work(array)

    def infer(shape: Sequence[int]) -> Sequence[int]:
        return shape if taken == given else (shape[0], given, *shape[2:])

    made = ops.Custom(noted, out_shape=infer, out_dtype=lambda dtype: dtype, func_type="pyfunc")
    for attribute, value in ((KIND, kind), (OWN, taken), (ALL, given)):
        made.add_prim_attr(attribute, value)
    return made


def _flat(array: np.ndarray) -> np.ndarray:
    """A view as (N, C, pixels)."""
    return array.reshape(*array.shape[:2], math.prod(array.shape[2:]))

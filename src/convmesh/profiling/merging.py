"""Joins what the recorder noted of a rank and what its engine's own profiler told."""

from __future__ import annotations

import numpy as np

from convmesh.profiling.events import NONE, RankEvents

_EVENT_COLUMNS = ("kind_E", "name_E", "layer_E", "axis_E", "lane_E", "num_bytes_E", "start_E", "end_E")
_TEXT_COLUMNS = ("name_E", "layer_E", "axis_E", "lane_E")
_DEVICE_LANES = ("stream", "communication")


def merged(noted: RankEvents, told: RankEvents) -> RankEvents:
    """Joins two records of the same steps of a rank.

    Args:
        noted: By the recorder.
        told: By the profiler, on the same clock; its computing and updating count. Its collectives count if they ran on
            a device, else the recorder's, which know their axes.

    Returns:
        The events of both, with the recorder's steps.
    """
    on_device = any(name.startswith(_DEVICE_LANES) for name in told.names)
    ours = noted.kept(noted.of_kind(*(("data",) if on_device else ("data", "communication"))))
    theirs = told.kept(told.of_kind("compute", "optimizer", *(("communication",) if on_device else ())))
    offset = len(noted.names)
    joined = {}
    for name in _EVENT_COLUMNS:
        values = getattr(theirs, name)
        if name in _TEXT_COLUMNS:
            values = np.where(values != NONE, values + offset, NONE).astype(np.int32)
        joined[name] = np.concatenate([getattr(ours, name), values])
    order = np.argsort(joined["start_E"], kind="stable")
    memory = told if len(told.memory_time_M) else noted
    return noted.replaced(
        names=noted.names + told.names,
        memory_time_M=memory.memory_time_M,
        memory_bytes_M=memory.memory_bytes_M,
        **{name: values[order] for name, values in joined.items()},
    )

"""Profiles as a Chrome trace, which https://ui.perfetto.dev opens: a process per rank, a row per lane.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (times in microseconds).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from convmesh.errors import ProfileError
from convmesh.profiling.events import KINDS, Floats, RankEvents, Trace

_STEPS_LANE = 0


def write_chrome_trace(trace: Trace, path: Path) -> None:
    """Writes a trace for Perfetto, event by event, so that memory stays small.

    Args:
        trace: What the ranks did.
        path: The file, ``.json``.

    Raises:
        ProfileError: If it can't be written.
    """
    origin = min((float(times[0]) for events in trace.ranks for times in _times(events) if len(times)), default=0.0)
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            _write(trace, file, origin)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ProfileError(f"'{path}' can't be written", got=error.strerror) from None


def _write(trace: Trace, file: TextIO, origin: float) -> None:
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    separator = ""
    for events in trace.ranks:
        for entry in _entries(events, origin):
            file.write(separator + json.dumps(entry))
            separator = ",\n"
    file.write("\n]}\n")


def _entries(events: RankEvents, origin: float) -> Iterator[dict[str, Any]]:
    process = {"pid": events.rank}
    yield {"ph": "M", "name": "process_name", **process, "args": {"name": f"rank {events.rank}"}}
    yield {"ph": "M", "name": "process_sort_index", **process, "args": {"sort_index": events.rank}}
    lanes = {int(lane): place + 1 for place, lane in enumerate(sorted(set(events.lane_E.tolist())))}
    for label, row in (("steps", _STEPS_LANE), *((events.text(lane) or "events", row) for lane, row in lanes.items())):
        yield {"ph": "M", "name": "thread_name", **process, "tid": row, "args": {"name": label}}
    for number, start, end in zip(events.step_S, events.step_start_S, events.step_end_S, strict=True):
        times = {"ts": 1e6 * (float(start) - origin), "dur": 1e6 * float(end - start)}
        yield {"ph": "X", "name": f"step {number}", "cat": "step", **process, "tid": _STEPS_LANE, **times}
    columns = (events.kind_E, events.name_E, events.layer_E, events.axis_E, events.lane_E, events.num_bytes_E)
    for kind, name, layer, axis, lane, num_bytes, start, end in zip(
        *(column.tolist() for column in columns), events.start_E.tolist(), events.end_E.tolist(), strict=True
    ):
        about = {"layer": events.text(layer), "axis": events.text(axis), "bytes": num_bytes}
        yield {
            "ph": "X",
            "name": events.text(name),
            "cat": KINDS[kind],
            **process,
            "tid": lanes[lane],
            "ts": 1e6 * (start - origin),
            "dur": 1e6 * (end - start),
            "args": {key: value for key, value in about.items() if value},
        }
    for time, num_bytes in zip(events.memory_time_M.tolist(), events.memory_bytes_M.tolist(), strict=True):
        yield {"ph": "C", "name": "memory", **process, "ts": 1e6 * (time - origin), "args": {"bytes": num_bytes}}


def _times(events: RankEvents) -> tuple[Floats, Floats]:
    return np.sort(events.start_E), events.step_start_S

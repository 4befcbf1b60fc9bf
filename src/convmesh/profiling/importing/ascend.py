"""Profile folders of Ascend NPUs, written by MindSpore (``..._ascend_ms``) or torch_npu (``..._ascend_pt``).

Read are, in the folder ``ASCEND_PROFILER_OUTPUT``:

- ``kernel_details.csv``: compute, with the number of the step where the profiler was given a schedule;
- ``communication.json``: collectives, with start, time and size;
- ``step_trace_time.csv``: the profiler's own sums per step. Where there is nothing else, a step is made of them: first
  what computes, with the hidden communication inside, then exposed communication, then what is free. Where there are
  events, the sums are compared with them.

All times are in microseconds, in ``communication.json`` in milliseconds.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.errors import ProfileError
from convmesh.profiling.breakdown import break_down
from convmesh.profiling.events import EventBuilder, RankEvents, Trace

OUTPUT = "ASCEND_PROFILER_OUTPUT"
_FILES = ("kernel_details.csv", "step_trace_time.csv", "communication.json")
_COLLECTIVE = re.compile(r"hcom_+(?P<kind>[A-Za-z]+)_")
_OPTIMIZERS = re.compile(r".*(ApplyMomentum|ApplyAdam|ApplyFusedEma|AdamApply|SGD|Lamb|AdamW).*", re.IGNORECASE)
_TOLERANCE = 0.05


@dataclass
class _Found:
    """What the files of one rank tell."""

    builder: EventBuilder
    steps: dict[int, list[float]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def extend(self, step: int | None, start: float, end: float) -> None:
        """Lets a step reach over an event."""
        if step is not None:
            bounds = self.steps.setdefault(step, [start, end])
            bounds[:] = [min(bounds[0], start), max(bounds[1], end)]


def is_ascend(folder: Path) -> bool:
    """Whether a folder is such a profile."""
    inside = _inside(folder)
    return any((inside / name).is_file() for name in _FILES)


def read_ascend(folder: Path, *, rank: int) -> tuple[RankEvents, tuple[str, ...]]:
    """Reads the profile of one rank.

    Args:
        folder: The profile's folder, or its ``ASCEND_PROFILER_OUTPUT``.
        rank: Its rank, where no ``profiler_info_RANK.json`` says it.

    Returns:
        Its events, and what a reader of the figures should know.

    Raises:
        ProfileError: If files are damaged or tell of no step.
    """
    inside = _inside(folder)
    found = _Found(EventBuilder(_rank(folder, rank)))
    kernels, collectives, sums = (inside / name for name in _FILES[:1] + _FILES[2:] + _FILES[1:2])
    if kernels.is_file():
        _read_kernels(kernels, found)
    if collectives.is_file():
        _read_collectives(collectives, found)
    of_step = _read_sums(sums) if sums.is_file() else {}
    if not len(found.builder):
        _make_blocks(of_step, found)
    if not found.steps:
        raise ProfileError(
            f"'{inside}' tells of no step",
            expected="a column 'Step Id' in kernel_details.csv, steps in communication.json, or step_trace_time.csv",
            fix="Give the profiler a schedule and call its step() after each step",
        )
    # A step lasts until the next one begins: between its last kernel and that the device is idle.
    numbers = sorted(found.steps)
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        start, end = found.steps[number]
        found.builder.add_step(number, start=start, end=found.steps[following][0] if following is not None else end)
    events = found.builder.build()
    return events, (*found.remarks, *_compare(events, of_step))


def _inside(folder: Path) -> Path:
    return folder / OUTPUT if (folder / OUTPUT).is_dir() else folder


def _rank(folder: Path, rank: int) -> int:
    outer = folder.parent if folder.name == OUTPUT else folder
    for path in sorted(outer.glob("profiler_info_*.json")):
        number = path.stem.rsplit("_", 1)[1]
        if number.isdigit():
            return int(number)
    return rank


def _rows(path: Path) -> Iterator[Mapping[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                if None in row or None in row.values():
                    raise ProfileError(
                        f"'{path}' is damaged",
                        got=f"line {reader.line_num} has another number of columns than its title",
                    )
                yield {str(key).strip(): str(value).strip() for key, value in row.items()}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ProfileError(f"'{path}' can't be read", got=str(error)) from None


def _number(row: Mapping[str, str], name: str, path: Path) -> float:
    try:
        return float(row[name])
    except KeyError:
        raise ProfileError(f"'{path}' has no column '{name}'", got=", ".join(list(row)[:8])) from None
    except ValueError:
        raise ProfileError(f"'{path}' is damaged", got=f"{row[name]!r} in '{name}'", expected="a number") from None


def _read_kernels(path: Path, found: _Found) -> None:
    for row in _rows(path):
        start = 1e-6 * _number(row, "Start Time(us)", path)
        end = start + 1e-6 * _number(row, "Duration(us)", path)
        name, kind = row.get("Name", ""), row.get("Type", "")
        step = next((row[key] for key in ("Step Id", "Step ID", "Step") if row.get(key, "").isdigit()), None)
        found.extend(int(step) if step is not None else None, start, end)
        if name.startswith("hcom_") or kind.startswith("hcom_"):
            continue  # communication.json tells more of it
        updates = _OPTIMIZERS.match(kind) or _OPTIMIZERS.match(name)
        found.builder.add(
            "optimizer" if updates else "compute",
            kind or name,
            start=start,
            end=end,
            lane=f"stream {row.get('Stream ID') or row.get('Stream Id') or ''}".rstrip(),
        )


def _read_collectives(path: Path, found: _Found) -> None:
    try:
        steps = json.loads(path.read_text("utf-8"))
        for step, groups in steps.items():
            number = re.search(r"(\d+)$", step)
            for kind in ("collective", "p2p"):
                for name, about in groups.get(kind, {}).items():
                    if not name.startswith("Total"):
                        _add_collective(name, about, int(number.group(1)) if number else None, found)
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise ProfileError(f"'{path}' is damaged", got=f"{type(error).__name__}: {error}") from None


def _add_collective(name: str, about: Mapping[str, Any], step: int | None, found: _Found) -> None:
    times = about["Communication Time Info"]
    start = 1e-6 * float(times["Start Timestamp(us)"])
    end = start + 1e-3 * float(times["Elapse Time(ms)"])
    links = about.get("Communication Bandwidth Info", {})
    sizes = [float(link.get("Transit Size(MB)", 0)) for link in links.values()]
    match = _COLLECTIVE.match(name)
    group = name.partition("@")[2]
    found.extend(step, start, end)
    found.builder.add(
        "communication",
        match.group("kind") if match else name.partition("@")[0],
        start=start,
        end=end,
        axis=f"group {group}" if group else "",
        lane=f"communication {group}".rstrip(),
        num_bytes=int(1e6 * max(sizes, default=0)),
    )


def _read_sums(path: Path) -> dict[int, dict[str, float]]:
    names = {"compute": "Computing", "exposed": "Communication(Not Overlapped)", "hidden": "Overlapped", "free": "Free"}
    found = {}
    for place, row in enumerate(_rows(path)):
        step = int(row["Step"]) if row.get("Step", "").isdigit() else place
        found[step] = {key: 1e-6 * _number(row, name, path) for key, name in names.items()}
    return found


def _make_blocks(of_step: Mapping[int, Mapping[str, float]], found: _Found) -> None:
    time = 0.0
    for step in sorted(of_step):
        sums, start = of_step[step], time
        found.builder.add("compute", "computing", start=time, end=time + sums["compute"], lane="device")
        time += sums["compute"]
        begun = time - min(sums["hidden"], sums["compute"])
        time += sums["exposed"]
        if time > begun:
            found.builder.add("communication", "communication", start=begun, end=time, lane="communication")
        time += sums["free"]
        found.steps[step] = [start, time]
    if of_step:
        found.remarks.append("only sums per step were found: what happened when within a step is not known")


def _compare(events: RankEvents, of_step: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
    breakdown = break_down(Trace(ranks=(events,), source=""))
    for place, step in enumerate(breakdown.step_S.tolist()):
        sums = of_step.get(step)
        if sums is None:
            continue
        ours = {"compute": breakdown.compute_RS, "exposed": breakdown.exposed_RS}
        length = float(breakdown.step_RS[0, place])
        for name, value_RS in ours.items():
            if not np.isclose(float(value_RS[0, place]), sums[name], atol=_TOLERANCE * length):
                yield (
                    f"rank {events.rank}, step {step}: {name} is {1e3 * float(value_RS[0, place]):.3g} ms by events "
                    f"and {1e3 * sums[name]:.3g} ms by step_trace_time.csv"
                )

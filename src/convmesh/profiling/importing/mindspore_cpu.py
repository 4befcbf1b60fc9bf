"""MindSpore's profile folder of a CPU (``..._ascend_ms`` with ``FRAMEWORK/cpu_op_execute_timestamp_RANK.txt``).

It has every operator with its scope and no marks of steps: in graph mode every step runs the same operators, so a step
begins where the first operator that runs once per step begins. How often that is, is what most operators agree on.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from convmesh.errors import ProfileError
from convmesh.profiling.events import COLUMNS, EventBuilder, Kind, RankEvents

FILE = re.compile(r"cpu_op_execute_timestamp_(\d+)\.txt")
_OPERATOR = re.compile(r"(?P<kind>\w+)-op\d+$")
_COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "AlltoAll", "Send", "Receive", "Barrier")
_OPTIMIZERS = re.compile(
    r"SGD|ApplyMomentum|FusedWeightScaleApplyMomentum|.*Adam.*|.*Adagrad.*|.*RMSProp.*|.*Ftrl.*|.*Lamb.*"
)
_DATA = ("GetNext", "InitDataSetQueue", "DynamicGetNextV2")

_Timed = list[tuple[str, list[tuple[float, float]]]]


def is_mindspore_cpu(folder: Path) -> bool:
    """Whether a folder is such a profile."""
    return _find(folder) is not None


def read_mindspore_cpu(folder: Path, *, steps_of: RankEvents | None = None) -> RankEvents:
    """Reads the profile of one rank.

    Args:
        folder: The profile's folder.
        steps_of: Events whose steps count instead of those found by operators that repeat.

    Returns:
        Its events; times are those of the machine.

    Raises:
        ProfileError: If it is damaged or has fewer than two steps.
    """
    path = _find(folder)
    if path is None:
        raise ProfileError(
            f"'{folder}' holds no CPU profile of MindSpore", expected="FRAMEWORK/cpu_op_execute_timestamp_*"
        )
    match = FILE.fullmatch(path.name)
    builder = EventBuilder(int(match.group(1)) if match else 0)
    timed = list(_read(path))
    for scope, times in timed:
        kind, name, layer = _meaning(scope)
        for start, end in times:
            builder.add(kind, name, start=start, end=end, layer=layer, lane="host")
    if steps_of is None:
        for number, (start, end) in enumerate(_steps(timed, path)):
            builder.add_step(number, start=start, end=end)
        return builder.build()
    known = {name: getattr(steps_of, name) for name in COLUMNS if name.endswith("_S")}
    return builder.build().replaced(**known)


def _find(folder: Path) -> Path | None:
    inside = folder / "FRAMEWORK" if (folder / "FRAMEWORK").is_dir() else folder
    return next(
        (path for path in sorted(inside.glob("cpu_op_execute_timestamp_*.txt")) if FILE.fullmatch(path.name)), None
    )


def _read(path: Path) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse(line, f"'{path}', line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"'{path}' can't be read", got=str(error)) from None


def _parse(line: str, where: str) -> tuple[str, list[tuple[float, float]]]:
    """One operator: ``scope;kind;start_ns,milliseconds,thread start_ns,milliseconds,thread ...``."""
    try:
        scope, _, runs = line.rstrip("\n").rsplit(";", 2)
        pairs = [run.split(",")[:2] for run in runs.split()]
        times = [(1e-9 * int(start), 1e-3 * float(length)) for start, length in pairs]
    except ValueError:
        raise ProfileError(
            f"{where} is damaged", got=line[:60].strip(), expected="scope;kind;start,milliseconds,thread ..."
        ) from None
    return scope, [(start, start + length) for start, length in times]


def _meaning(scope: str) -> tuple[Kind, str, str]:
    """Kind, operation and module path of an operator's full scope."""
    *parts, last = scope.split("/")
    found = _OPERATOR.search(last)
    name = found.group("kind") if found else last
    backward = parts[:1] == ["Gradients"]
    parts = [part for part in parts if part not in ("Gradients", "Default", "Expand") and not part.startswith("Grad_")]
    layer = ".".join(part.rsplit("-", 1)[0] for part in parts)
    if name.startswith(_COLLECTIVES):
        return "communication", name, layer
    if name in _DATA:
        return "data", name, layer
    if _OPTIMIZERS.fullmatch(name):
        return "optimizer", name, layer
    return "compute", f"{name} (backward)" if backward else name, layer


def _steps(timed: _Timed, path: Path) -> list[tuple[float, float]]:
    counts = Counter(len(times) for _, times in timed)
    if not counts:
        raise ProfileError(f"'{path}' holds no operator")
    number = statistics.mode(counts.elements())
    if number < 2:
        raise ProfileError(
            f"'{path}' holds a single step, so that its length is not known",
            fix="Profile at least two steps in graph mode",
        )
    once = [sorted(times) for _, times in timed if len(times) == number]
    first = min(once, key=lambda times: times[0][0])
    starts = [start for start, _ in first]
    end = max(times[-1][1] for times in once)
    return list(zip(starts, [*starts[1:], end], strict=True))

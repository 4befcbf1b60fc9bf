"""Finds out what the given files and folders are, and reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from convmesh.errors import ConvMeshError, ProfileError, raise_all
from convmesh.profiling.events import RankEvents, Trace
from convmesh.profiling.importing.ascend import OUTPUT, is_ascend, read_ascend
from convmesh.profiling.importing.kineto import KinetoImport
from convmesh.profiling.importing.mindspore_cpu import is_mindspore_cpu, read_mindspore_cpu

_TRACES = (".json", ".json.gz")
_KNOWN = (
    "a Kineto trace of PyTorch (.json, .json.gz), a folder of them, or a profile folder of MindSpore or an Ascend NPU"
)


def import_profiles(paths: Sequence[Path], *, on_file: Callable[[Path], None] | None = None) -> Trace:
    """Reads the profiles of all ranks.

    Ranks are taken from the files themselves; where they don't say, from the order of the paths.

    Args:
        paths: Files and folders; a folder may hold the profiles of several ranks.
        on_file: Called before each is read.

    Returns:
        What the ranks did. Their clocks may differ (`convmesh.profiling.matching.align`).

    Raises:
        ProfileError: If a path is missing, damaged or of an unknown kind; several come as a ``MistakeList``.
    """
    found = [one for path in paths for one in _expand(path)]
    read: list[tuple[RankEvents, tuple[str, ...], str]] = []
    mistakes: list[ConvMeshError] = []
    for place, path in enumerate(found):
        if on_file is not None:
            on_file(path)
        try:
            read.append(_read(path, rank=place))
        except ConvMeshError as error:
            mistakes.append(error)
    raise_all(mistakes)
    engines = {engine for _, _, engine in read}
    return Trace(
        ranks=tuple(events for events, _, _ in read),
        source=f"imported from {', '.join(str(path) for path in paths)}",
        engine=engines.pop() if len(engines) == 1 else "",
        remarks=tuple(remark for _, remarks, _ in read for remark in remarks),
    )


def _expand(path: Path) -> list[Path]:
    if not path.exists():
        raise ProfileError(f"'{path}' does not exist", expected=_KNOWN)
    if path.is_file() or _is_profile(path):
        return [path]
    folders = sorted(folder for folder in path.rglob("*") if folder.is_dir() and folder.name != OUTPUT)
    profiles = [folder for folder in folders if _is_profile(folder) and folder.name != "FRAMEWORK"]
    traces = sorted(file for file in path.iterdir() if file.name.endswith(_TRACES))
    if not profiles and not traces:
        raise ProfileError(f"'{path}' holds no profile of a kind that ConvMesh reads", expected=_KNOWN)
    return sorted(profiles or traces, key=_natural)


def _is_profile(folder: Path) -> bool:
    return is_mindspore_cpu(folder) or is_ascend(folder)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts rank 2 before rank 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _read(path: Path, *, rank: int) -> tuple[RankEvents, tuple[str, ...], str]:
    if path.is_dir():
        engine = "torch" if path.name.endswith("_ascend_pt") else "mindspore"
        if is_mindspore_cpu(path):
            return read_mindspore_cpu(path), (), engine
        events, remarks = read_ascend(path, rank=rank)
        return events, remarks, engine
    if not path.name.endswith(_TRACES):
        raise ProfileError(f"'{path}' is of a kind that ConvMesh does not read", expected=_KNOWN)
    trace = KinetoImport(path, rank=rank)
    events = trace.read()
    return events, trace.remarks, "torch"

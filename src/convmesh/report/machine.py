"""What a machine has, looked at without importing a framework."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from convmesh.data.files import cache_root
from convmesh.data.prepared import open_prepared
from convmesh.errors import DataError

_SETS = ("cifar10", "digits")


@dataclass(frozen=True, kw_only=True)
class DataSetState:
    """A data set that ``convmesh data fetch`` knows.

    Args:
        name: Its name.
        ready: Whether it is whole in the cache.
        problem: Why not, if something of it is there; empty if it was never fetched.
    """

    name: str
    ready: bool
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the doctor found out about a machine.

    Args:
        num_cores: Cores that this process may use.
        memory_bytes: Memory that this process may use: of the machine, or of its container if that is less.
        available_bytes: Memory that is free now.
        data_root: Where fetched data is kept.
        data_writable: Whether that folder can be written, or made.
        disk_free_bytes: Free space there.
        data_sets: State of each data set.
        npm: Version of npm, empty without one.
        has_scikit_learn: Whether the digits can be taken from scikit-learn.
    """

    num_cores: int
    memory_bytes: int
    available_bytes: int
    data_root: Path
    data_writable: bool
    disk_free_bytes: int
    data_sets: tuple[DataSetState, ...]
    npm: str
    has_scikit_learn: bool

    def has_data(self, name: str) -> bool:
        """Whether a data set is whole in the cache."""
        return any(state.ready for state in self.data_sets if state.name == name)


def look_at_machine() -> Machine:
    """Looks at cores, memory, disk, data and npm; starts nothing but ``npm --version``."""
    memory = psutil.virtual_memory()
    limit, used = _container_memory()
    root = cache_root()
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=min(memory.total, limit or memory.total),
        available_bytes=min(memory.available, limit - used if limit else memory.available),
        data_root=root,
        data_writable=existing.is_dir() and os.access(existing, os.W_OK),
        disk_free_bytes=shutil.disk_usage(existing).free,
        data_sets=tuple(_data_set(name, root / name) for name in _SETS),
        npm=_npm_version(),
        has_scikit_learn=importlib.util.find_spec("sklearn") is not None,
    )


def _container_memory(group: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Limit and use of memory of this control group in bytes; (0, 0) without a limit."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            limit = int((group / limit_name).read_text())
            if limit < psutil.virtual_memory().total:
                return limit, min(limit, int((group / used_name).read_text()))
    return 0, 0


def _data_set(name: str, folder: Path) -> DataSetState:
    if not folder.exists():
        return DataSetState(name=name, ready=False)
    try:
        open_prepared(folder, fetch=f"convmesh data fetch {name}")
    except DataError as error:
        return DataSetState(name=name, ready=False, problem=str(error))
    return DataSetState(name=name, ready=True)


def _npm_version() -> str:
    npm = shutil.which("npm")
    if npm is None:
        return ""
    try:
        shown = subprocess.run([npm, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return shown.stdout.strip()

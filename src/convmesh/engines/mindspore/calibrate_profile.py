"""Reads the seconds of operators between marks out of what MindSpore's profiler wrote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from convmesh.errors import EngineError

_FILE = "cpu_op_execute_timestamp_*.txt"


@dataclass(frozen=True)
class Kernel:
    """One kernel that ran.

    Args:
        name: With its scope.
        begun: Seconds of the profiler's clock.
        seconds: How long it ran.
    """

    name: str
    begun: float
    seconds: float


def read_kernels(folder: Path) -> list[Kernel]:
    """All kernels of a profile on CPU, in the order in which they ran.

    Args:
        folder: Where the profiler wrote.

    Returns:
        The kernels.

    Raises:
        EngineError: If it wrote none.
    """
    found = [kernel for file in folder.rglob(_FILE) for kernel in _read(file)]
    if not found:
        raise EngineError("MindSpore's profiler has written no times of kernels", expected=_FILE, got=str(folder))
    return sorted(found, key=lambda kernel: kernel.begun)


def _read(file: Path) -> Iterator[Kernel]:
    """Lines like ``Default/Conv2D-op0;HostCpuOps;<begun in ns>,<ms>,<thread> <begun>,<ms>,<thread>``."""
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, runs = line.rpartition(";")
        for run in runs.split():
            begun, milliseconds, *_ = run.split(",")
            yield Kernel(name.partition(";")[0], int(begun) / 1e9, float(milliseconds) / 1e3)


def pieces(kernels: list[Kernel], *, mark: str, left_out: str) -> list[list[Kernel]]:
    """What ran between marks.

    Args:
        kernels: In the order in which they ran.
        mark: Part of the names of the marks.
        left_out: Part of the names of what does not count.

    Returns:
        What ran before each mark, since the one before it.
    """
    found: list[list[Kernel]] = [[]]
    for kernel in kernels:
        if mark in kernel.name:
            found.append([])
        elif left_out not in kernel.name:
            found[-1].append(kernel)
    return found[:-1]

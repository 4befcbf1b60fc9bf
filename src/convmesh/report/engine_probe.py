"""Asks processes of their own what an engine is and can do, so that the asking process imports no framework."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from convmesh.engines import is_installed, load_launcher
from convmesh.engines.contract import LaunchRequest
from convmesh.engines.probing import shorten
from convmesh.errors import ConvMeshError
from convmesh.training.launch import free_port

TITLES = {"mindspore": "MindSpore", "torch": "PyTorch"}
"""How the engines are called in sentences."""

_DESCRIBE_SECONDS = 120.0
_COLLECTIVES_SECONDS = 240.0

# What a CPU has without a trial; the engines' own notes say the same.
_KNOWN_ON_CPU = {
    "mindspore": (
        ("all-reduce", True, "sums of float16 and float32, any group"),
        ("all-gather", True, "all ranks; made from all-reduce in smaller groups"),
        ("broadcast", True, "all ranks"),
        ("reduce-scatter", False, "made from all-reduce and a slice"),
        ("all-to-all", False, "made from all-reduce"),
    ),
    "torch": (
        ("all-reduce", True, "Gloo"),
        ("all-gather", True, "Gloo"),
        ("broadcast", True, "Gloo"),
        ("reduce-scatter", True, "Gloo"),
        ("all-to-all", True, "Gloo"),
        ("send/receive", True, "Gloo"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class CollectiveState:
    """A collective of an engine.

    Args:
        name: For example ``"all-reduce"``.
        works: Whether it does.
        note: Its limits, or why it doesn't work.
        small_seconds: Median time at 1 KiB per rank, if it was tried.
        large_seconds: Median time at 4 MiB per rank, if it was tried.
    """

    name: str
    works: bool
    note: str = ""
    small_seconds: float | None = None
    large_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """An engine on this machine.

    Args:
        name: ``"mindspore"`` or ``"torch"``.
        installed: Whether its framework can be found.
        works: Whether a process could import it and compute.
        version: Version of the framework.
        numpy_version: Version of NumPy beside it.
        devices: Names of its devices.
        problem: What is wrong, if anything.
        fix: What to do about it.
        collectives: What it can communicate.
        measured: Whether the collectives were tried by two ranks; otherwise they are what is known of its CPU build.
        collectives_problem: Why the trial could not be made or ended early.
    """

    name: str
    installed: bool
    works: bool = False
    version: str = ""
    numpy_version: str = ""
    devices: tuple[str, ...] = ()
    problem: str = ""
    fix: str = ""
    collectives: tuple[CollectiveState, ...] = ()
    measured: bool = False
    collectives_problem: str = ""

    @property
    def title(self) -> str:
        """Its name in sentences."""
        return TITLES.get(self.name, self.name)


def look_at_engine(name: str) -> EngineState:
    """Asks a process of its own to import an engine's framework and compute with it.

    Args:
        name: ``"mindspore"`` or ``"torch"``.

    Returns:
        What it is, with the collectives that are known.
    """
    if not is_installed(name):
        return EngineState(name=name, installed=False, fix=f"pip install 'convmesh[{name}]'")
    version, numpy_version = _version_of(name), _version_of("numpy")
    found, problem = _describe(name)
    fix = ""
    if name == "mindspore" and not numpy_version.startswith(("0.", "1.")):
        # MindSpore's metadata admits NumPy 2, but its first operator that needs NumPy fails.
        problem = f"MindSpore does not work with NumPy {numpy_version}"
        fix = "pip install 'numpy<2'"
    elif problem:
        fix = f"pip install --force-reinstall 'convmesh[{name}]'"
    return EngineState(
        name=name,
        installed=True,
        works=not problem,
        version=str(found.get("version") or version),
        numpy_version=numpy_version,
        devices=tuple(map(str, found.get("devices", ()))),
        problem=problem,
        fix=fix,
        collectives=() if problem else _known(name),
    )


def try_collectives(name: str, *, num_ranks: int = 2) -> tuple[tuple[CollectiveState, ...], str]:
    """Starts ranks by the engine's own launcher and has them try every collective.

    Args:
        name: ``"mindspore"`` or ``"torch"``.
        num_ranks: Ranks to start on this machine.

    Returns:
        What was tried, and why the trial ended early (empty if it didn't).
    """
    with tempfile.TemporaryDirectory(prefix="convmesh-doctor-", ignore_cleanup_errors=True) as folder:
        lines = Path(folder) / "collectives.jsonl"
        log_dir = Path(folder) / "logs"
        log_dir.mkdir()
        try:
            launcher = load_launcher(name)
            probe = (sys.executable, "-m", f"convmesh.engines.{name}.probe", "collectives", str(lines))
            request = LaunchRequest(num_ranks=num_ranks, port=free_port(), log_dir=log_dir, command=probe)
            environment = launcher.environment(num_threads=1)
            command = launcher.command(request)
        except ConvMeshError as error:
            return (), str(error)
        problem = _run(command, environment=environment, cwd=log_dir, timeout_seconds=_COLLECTIVES_SECONDS)
        return _read_collectives(lines), problem


def _known(name: str) -> tuple[CollectiveState, ...]:
    return tuple(CollectiveState(name=kind, works=works, note=note) for kind, works, note in _KNOWN_ON_CPU[name])


def _describe(name: str) -> tuple[Mapping[str, Any], str]:
    with tempfile.TemporaryDirectory(prefix="convmesh-doctor-") as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", f"convmesh.engines.{name}.probe", "describe", str(answer)]
        problem = _run(command, environment={}, cwd=Path(folder), timeout_seconds=_DESCRIBE_SECONDS)
        with contextlib.suppress(OSError, ValueError):
            return json.loads(answer.read_text("utf-8")), ""
        return {}, problem or "the process that looked at it left no answer"


def _run(command: Sequence[str], *, environment: Mapping[str, str], cwd: Path, timeout_seconds: float) -> str:
    """Runs a command quietly; returns why it failed, or nothing."""
    output = cwd / "output.txt"
    with output.open("wb") as log:
        try:
            process = psutil.Popen(
                [*command],
                env={**os.environ, **environment},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            return f"{command[0]} can't be started: {error.strerror}"
        try:
            code = process.wait(timeout=timeout_seconds)
        except psutil.TimeoutExpired:
            return f"it did not end within {timeout_seconds:.0f} s"
        finally:
            _end(process)
    return _last_error(output) or f"it ended with code {code}" if code else ""


def _end(process: psutil.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
    process.wait()


def _last_error(output: Path) -> str:
    lines = output.read_text("utf-8", errors="replace").splitlines()
    named = [line for line in lines if line[:1].isalpha() and ("Error" in line or "error" in line)]
    return shorten((named or lines or [""])[-1])


def _read_collectives(path: Path) -> tuple[CollectiveState, ...]:
    found = []
    with contextlib.suppress(OSError):
        for line in path.read_text("utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError):
                entry = json.loads(line)
                found.append(
                    CollectiveState(
                        name=str(entry["name"]),
                        works=bool(entry["works"]),
                        note=str(entry.get("error", "")),
                        small_seconds=_seconds(entry.get("small_seconds")),
                        large_seconds=_seconds(entry.get("large_seconds")),
                    )
                )
    return tuple(found)


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""

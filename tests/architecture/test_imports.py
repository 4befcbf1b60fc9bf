"""Imports go one way, and nothing heavy is loaded before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "convmesh").rglob("*.py"))

FRAMEWORKS = {"torch", "mindspore"}
HEAVY = FRAMEWORKS | {"matplotlib", "PIL", "scipy", "sklearn"}


def run_python(code: str) -> str:
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def loaded_by(code: str) -> set[str]:
    shown = run_python(f"{code}\nimport sys\nprint('LOADED', *{{name.partition('.')[0] for name in sys.modules}})")
    (line,) = [line for line in shown.splitlines() if line.startswith("LOADED ")]
    return set(line.split()[1:])


def test_import_contracts_hold() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr


def test_importing_convmesh_loads_nothing_heavy() -> None:
    assert not loaded_by("import convmesh") & HEAVY


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["doctor", "--help"], ["data", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from convmesh.cli.main import app
try:
    app({arguments!r})
except SystemExit as end:
    assert not end.code
"""
    assert not loaded_by(code) & (HEAVY | {"pydantic"} if arguments == ["--help"] else HEAVY)


@pytest.mark.parametrize(
    "module",
    [
        "convmesh.api", "convmesh.config", "convmesh.engines", "convmesh.engines.contract", "convmesh.engines.probing",
        "convmesh.engines.torch.launch", "convmesh.engines.mindspore.launch", "convmesh.training.loop",
        "convmesh.training.launch", "convmesh.data.samplers", "convmesh.report.html", "convmesh.report.display",
        "convmesh.report.plots", "convmesh.report.doctor", "convmesh.graph", "convmesh.plan", "convmesh.geometry",
        "convmesh.engines.tracing", "convmesh.cli.graph",
    ],
)  # fmt: skip
def test_only_engines_load_frameworks(module: str) -> None:
    assert not loaded_by(f"import {module}") & FRAMEWORKS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_an_engine_names_its_framework(path: Path) -> None:
    parts = path.relative_to(ROOT / "src" / "convmesh").parts
    own = {parts[1]} if parts[0] in ("engines", "models") and len(parts) > 2 else set()
    named: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            named.add((node.module or "").partition(".")[0])
    assert not (named & FRAMEWORKS) - own

"""Every command in the README and the documentation is one that can be given, and runs.

What starts ranks or fetches from the network runs as far as it starts: ``train`` as a dry run, ``verify`` as ``check``.
Tests in `tests.multiprocess` train, verify and report for real.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from convmesh.cli.main import app
from convmesh.data.prepared import write_prepared
from convmesh.engines import is_installed
from tests.docs.pages import PAGES, ROOT, commands

SHELL = ("git", "cd", "ls", ".", "python3.11", "source")
"""Commands of the shell that need nothing of ours."""


def convmesh_commands() -> list[str]:
    found = {" ".join(words[1:]) for page in PAGES for words in commands(page) if words[:1] == ["convmesh"]}
    return sorted(text for text in found if text)


@pytest.mark.parametrize("page", PAGES)
def test_each_command_names_what_there_is(page: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in commands(page):
        first = words[0]
        if first == "convmesh":
            _parse(words[1:])
        elif first == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, words
        elif first == "pip":
            wanted = re.findall(r"\[(.*)\]", " ".join(words))
            assert wanted, words
            assert set(wanted[0].split(",")) <= extras.keys(), words
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]) is not None, words
        else:
            assert first in SHELL, words


def _parse(words: list[str]) -> None:
    """Refuses a command or option that does not exist, or a file of the repository that is not there."""
    command: Any = typer.main.get_command(app)
    words = list(words)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0) if words[0] in command.commands or "run" not in command.commands else "run"
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    # Running text may leave out arguments: only what stands there is looked at.
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known | {"--help"}, words
    for word in words:
        if word.startswith("examples/"):
            assert (ROOT / word).is_file(), word


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a fresh clone, with small stand-ins for the data."""
    root = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", root / "examples")
    shutil.copy(ROOT / "examples" / "digits.yaml", root / "run.yaml")
    for source, side, num_channels, num_train in (("cifar10", 32, 3, 12_000), ("digits", 8, 1, 400)):
        arrays = {}
        for part, number in (("train", num_train), ("test", 40)):
            arrays[f"{part}_images"] = np.zeros((number, side, side, num_channels), np.uint8)
            arrays[f"{part}_labels"] = (np.arange(number) % 10).astype(np.int32)
        (root / "data").mkdir(exist_ok=True)
        write_prepared(root / "data" / source, arrays, class_names=list("abcdefghij"), origin="test")
    return root


@pytest.mark.parametrize("command", convmesh_commands())
def test_each_command_runs_as_far_as_it_can_here(command: str, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = command.split()
    if words[0] in ("calibrate", "compare", "doctor", "profile", "report") or words[:2] == ["data", "fetch"]:
        pytest.skip("tested in tests/multiprocess or tests/unit/data: it starts ranks, needs a run, or fetches")
    if len(words) == 1 or words[-1] == "CONFIG":
        pytest.skip("named in running text without its arguments")
    monkeypatch.chdir(clone)
    monkeypatch.setenv("CONVMESH_DATA", str(clone / "data"))
    name = words.pop(0)
    if name == "verify":
        name, words = "check", _without(words, "--dtype", "--steps")
    elif name == "train" and "--dry-run" not in words:
        words.append("--dry-run")
    if name in ("train", "check", "graph", "plan") and not {"--help"} & set(words):
        wanted = words[words.index("--engine") + 1] if "--engine" in words else None
        engine = wanted or "mindspore"
        if not is_installed(engine):
            pytest.skip(f"{engine} is not installed")
        words += ["--set", "train.device=cpu"] if name in ("train", "check") else []
    result = CliRunner().invoke(app, [name, *words])
    assert result.exit_code == 0, result.output + str(result.exception)


def _without(words: list[str], *options: str) -> list[str]:
    """Words without some options and their values."""
    kept, skips = [], False
    for word in words:
        if not skips and word not in options:
            kept.append(word)
        skips = word in options
    return kept

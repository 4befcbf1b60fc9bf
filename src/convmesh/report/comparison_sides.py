"""One side of a comparison: a run folder, a profile, or both, brought into a form that can be held against another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from convmesh.config.load import dotted
from convmesh.errors import RunFolderError
from convmesh.profiling.analysis import Analysis
from convmesh.report.foretelling import PLAN_NAME
from convmesh.report.html import Report, find_profile, read_report
from convmesh.report.run_folder import METRICS_NAME, RunData, section

_MACHINE_KEYS = ("platform", "processor", "cores")


@dataclass(frozen=True, kw_only=True)
class Side:
    """What is known of one of two runs.

    Args:
        name: What it is called: the name of its folder.
        report: Its files, and its profile if it has one.
        plan: Its plan file as it stands there, dotted key to text; empty without one.
    """

    name: str
    report: Report
    plan: Mapping[str, str]

    @property
    def run(self) -> RunData:
        """The run; empty for a profile without a run."""
        return self.report.run

    @property
    def analysis(self) -> Analysis | None:
        """What its profile says."""
        return self.report.analysis

    @property
    def config(self) -> dict[str, str]:
        """Dotted key to value, as text, of the resolved config."""
        settings = flatten(self.run.config)
        folder = self.run.run_dir.resolve().name
        if Path(settings.get("strategy.plan", "")).parts[-2:] == (folder, PLAN_NAME):
            settings["strategy.plan"] = PLAN_NAME  # Every run has its own; what differs in them is told apart.
        return settings

    @property
    def machine(self) -> dict[str, str]:
        """What its versions say of the machine, not of software."""
        return {key: value for key, value in self.run.versions.items() if key in _MACHINE_KEYS}

    @property
    def network(self) -> str:
        """Which network it trains, in words; empty if that is not known."""
        model = section(self.run.config, "model")
        name = model.get("name") or model.get("factory") or ""
        arguments = model.get("args")
        return f"{name} {as_text(arguments)}" if arguments else str(name)


def read_sides(before: Path, after: Path) -> tuple[Side, Side]:
    """Reads two folders; see ``read_side``. Where both have one name, that of the folder above tells them apart."""
    sides = read_side(before), read_side(after)
    if sides[0].name != sides[1].name:
        return sides
    first, second = (
        replace(side, name="/".join(folder.resolve().parts[-2:]))
        for side, folder in zip(sides, (before, after), strict=True)
    )
    return first, second


def read_side(folder: Path) -> Side:
    """Reads a run folder, or a folder with a profile alone.

    Args:
        folder: The folder.

    Returns:
        What it holds.

    Raises:
        RunFolderError: If it holds neither.
        ProfileError: If it holds a profile alone, and that is damaged.
    """
    if (folder / METRICS_NAME).is_file():
        report = read_report(folder)
    elif find_profile(folder) is not None:
        report = Report.of_profile(folder)
    else:
        raise RunFolderError(
            f"'{folder}' holds neither a run nor a profile",
            expected=f"a folder with {METRICS_NAME}, or one that 'convmesh profile' has written",
            fix="Give the folder of a run, like runs/NAME-TIME",
        )
    return Side(name=folder.resolve().name, report=report, plan=_read_plan(folder / PLAN_NAME))


def flatten(content: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings as dotted keys with their values as text.

    Args:
        content: Mappings in mappings.

    Returns:
        ``{"train.epochs": "6"}`` for ``{"train": {"epochs": 6}}``; lists and empty mappings are values.
    """
    return {name: as_text(value) for name, value in dotted(content).items()}


def as_text(value: object) -> str:
    """A value as one writes it in a run file, on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _read_plan(path: Path) -> dict[str, str]:
    """What a plan decides: without the network that it was made for, and without what was foretold of it."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(content, dict):
        return {}
    decided = {key: value for key, value in content.items() if key not in ("network", "foretold", "operators")}
    operators = section(content, "operators")
    return flatten(decided) | {f"operators.{pattern}": as_text(choice) for pattern, choice in operators.items()}

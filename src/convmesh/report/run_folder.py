"""The files of a run folder, read forgivingly.

A report is wanted most when a run went wrong: half-written lines, a missing summary and losses that are not numbers are
all normal here. Nothing in this module fails on the content of a file, only on a folder that holds no run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from convmesh.errors import RunFolderError

Record = dict[str, Any]

METRICS_NAME = "metrics.jsonl"
_RECORD_START = '{"kind"'


@dataclass(frozen=True, kw_only=True)
class RunData:
    """All that a run folder tells, with what a resumed run did over again taken out.

    Args:
        run_dir: The folder.
        config_text: The resolved config as it was saved, or empty.
        versions: Versions by name, nested names joined by a space.
        summary: The content of ``summary.json``; empty if the run never wrote one.
        starts: One record per start or resumption, in order.
        steps: Records of training, by update.
        epochs: Records of finished epochs, by update.
        evals: Records of evaluations, by update.
        checkpoints: Records of checkpoints, by update.
        events: Remarks of the run, in the order in which they were made.
    """

    run_dir: Path
    config_text: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    starts: tuple[Record, ...] = ()
    steps: tuple[Record, ...] = ()
    epochs: tuple[Record, ...] = ()
    evals: tuple[Record, ...] = ()
    checkpoints: tuple[Record, ...] = ()
    events: tuple[Record, ...] = ()

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The resolved config: of ``config.yaml``, or else of the last start; empty if neither can be read."""
        try:
            saved = yaml.safe_load(self.config_text)
        except yaml.YAMLError:
            saved = None
        return saved if isinstance(saved, dict) else section(self.start, "config")

    @property
    def start(self) -> Record:
        """The last start or resumption; empty if none was written."""
        return self.starts[-1] if self.starts else {}


def number(record: Mapping[str, Any], key: str) -> float:
    """A number of a record, ``nan`` if it is missing or not a number.

    Writers of JSON put down a loss that is not finite as NaN, as null or as text; all of them come back as a float.
    """
    return as_number(record.get(key))


def as_number(value: object) -> float:
    """Any value as a float, ``nan`` if it is not a number."""
    if isinstance(value, bool) or value is None:
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]  # what float() can't take is what we ask
    except (TypeError, ValueError, OverflowError):
        return math.nan


def numbers(record: Mapping[str, Any], key: str) -> list[float]:
    """A list of numbers of a record, one per rank as a rule; empty if it is missing."""
    value = record.get(key)
    return [as_number(item) for item in value] if isinstance(value, list | tuple) else []


def section(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A nested mapping of a record; empty if it is missing or of another type."""
    value = record.get(key)
    return dict(value) if isinstance(value, Mapping) else {}


def parse_metric_line(line: str | bytes) -> Record | None:
    """Reads one line of ``metrics.jsonl``.

    A killed run may leave half a line, to which a resumed one appends; then the whole record at its end still counts.

    Args:
        line: The line, with or without its end.

    Returns:
        The record, or None if there is none in the line.
    """
    text = line.decode("utf-8", errors="replace") if isinstance(line, bytes) else line
    for start in (0, text.rfind(_RECORD_START)):
        try:
            record = json.loads(text[start:]) if start >= 0 else None
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            return record
    return None


def read_run(run_dir: Path) -> RunData:
    """Reads a run folder, whatever state its run is in.

    Args:
        run_dir: The folder.

    Returns:
        What its files tell; what is missing or damaged is empty.

    Raises:
        RunFolderError: If the folder or its ``metrics.jsonl`` is missing.
    """
    metrics = run_dir / METRICS_NAME
    if not metrics.is_file():
        raise RunFolderError(
            f"'{run_dir}' holds no run", expected=f"a folder with {METRICS_NAME}", fix="Give the folder of a run"
        )
    kinds = _read_metrics(metrics)
    config = run_dir / "config.yaml"
    return RunData(
        run_dir=run_dir,
        config_text=config.read_text("utf-8", errors="replace") if config.is_file() else "",
        versions=_flat(_read_json(run_dir / "versions.json")),
        summary=_read_json(run_dir / "summary.json"),
        starts=tuple(kinds["start"]),
        steps=tuple(kinds["step"]),
        epochs=tuple(kinds["epoch"]),
        evals=tuple(kinds["eval"]),
        checkpoints=tuple(kinds["checkpoint"]),
        events=tuple(kinds["event"]),
    )


def _read_metrics(path: Path) -> dict[str, list[Record]]:
    kinds: dict[str, list[Record]] = {kind: [] for kind in ("start", "step", "epoch", "eval", "checkpoint", "event")}
    timed = [kinds[kind] for kind in ("step", "epoch", "eval", "checkpoint")]
    with path.open("rb") as lines:
        for line in lines:
            record = parse_metric_line(line)
            if record is None or record["kind"] not in kinds:
                continue
            same_kind = kinds[record["kind"]]
            if record["kind"] == "start":
                # What came after the checkpoint that a run goes on from is undone and done over again.
                for records in timed:
                    _cut(records, number(record, "update"), include_equal=False)
            elif any(same_kind is records for records in timed):
                _cut(same_kind, number(record, "update"), include_equal=True)
            same_kind.append(record)
    return kinds


def _cut(records: list[Record], update: float, *, include_equal: bool) -> None:
    while records:
        last = number(records[-1], "update")
        if not (last > update or (include_equal and last == update)):
            return
        records.pop()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name} ") if isinstance(value, Mapping) else {name: str(value)}
    return flat

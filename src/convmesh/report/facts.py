"""What a report says in words and single numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from convmesh.report.run_folder import RunData, number, numbers, section
from convmesh.report.scales import format_number
from convmesh.units import format_bytes, format_seconds

_ENGINE_TITLES = {"mindspore": "MindSpore", "torch": "PyTorch"}
_STATUSES = ("finished", "failed", "stopped")

Words = Mapping[str, str]
"""Texts of a page by key, in the language of the page."""


@dataclass(frozen=True)
class Tile:
    """One headline number."""

    label: str
    value: str
    detail: str = ""


def title(run: RunData, words: Words) -> str:
    """What was trained on what, for example ``"resnet18 on cifar10"``."""
    model, data = section(run.config, "model"), section(run.config, "data")
    network = str(model.get("name") or model.get("factory") or words["some_network"])
    return words["network_on"].format(network=network, data=data["source"]) if data.get("source") else network


def status(run: RunData) -> str:
    """``finished``, ``failed``, ``stopped``, or ``unfinished`` for a run without a summary."""
    said = str(run.summary.get("status"))
    return said if said in _STATUSES else "unfinished"


def started(run: RunData) -> str:
    """When the run was first started, in UTC; empty if that is not known."""
    seconds = number(run.starts[0], "time") if run.starts else math.nan
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return ""


def headline(run: RunData, words: Words) -> list[Tile]:
    """The headline numbers; one that is not known is left out."""
    makers = (_accuracy, _loss, _throughput, _time, _ranks, _memory, _collectives, _parameters)
    tiles = [make(run, words) for make in makers]
    return [tile for tile in tiles if tile is not None]


def remarks(run: RunData, words: Words) -> list[str]:
    """What a reader should know before trusting the numbers, in sentences; empty for a run without incident."""
    found = []
    if not run.summary:
        last = last_update(run)
        key = "remark_no_summary_after" if math.isfinite(last) else "remark_no_summary"
        found.append(words[key].format(update=f"{last:,.0f}"))
    broken = [number(step, "update") for step in run.steps if not math.isfinite(number(step, "loss"))]
    if broken:
        found.append(words["remark_not_finite"].format(number=len(broken), update=f"{broken[0]:,.0f}"))
    skipped = _latest(run, "skipped_updates")
    if skipped > 0:
        found.append(words["remark_overflow"].format(number=f"{skipped:,.0f}"))
    for key in ("skipped_samples", "dropped_samples"):
        if number(run.summary, key) > 0:
            found.append(words[f"remark_{key}"].format(number=f"{number(run.summary, key):,.0f}"))
    if len(run.starts) > 1:
        points = [format_number(value) for value in numbers(run.summary, "resumed_from")]
        key = "remark_resumed" + ("" if len(run.starts) > 2 else "_once") + ("_from" if points else "")
        found.append(words[key].format(number=len(run.starts) - 1, points=words["and"].join(points)))
    return found


def last_update(run: RunData) -> float:
    """The last update that any record speaks of, ``nan`` if none does."""
    updates = [number(record, "update") for records in (run.steps, run.epochs, run.evals) for record in records[-1:]]
    return max((update for update in updates if math.isfinite(update)), default=math.nan)


def collective_rows(run: RunData) -> list[tuple[str, str, str, str]]:
    """Per kind of collective: purpose, kind, number per update, bytes per update and rank."""
    return [
        (
            str(row.get("purpose", "")),
            str(row.get("kind", "")),
            format_number(number(row, "number")),
            format_bytes(number(row, "num_bytes")),
        )
        for row in _collective_records(run)
    ]


def epoch_rows(run: RunData) -> list[dict[str, str]]:
    """Per epoch: number, update, training loss, evaluation loss, accuracy, images/s and duration, as text."""
    by_epoch = {number(record, "epoch"): record for record in run.evals}
    rows = []
    for record in run.epochs:
        evaluated = by_epoch.get(number(record, "epoch"), {})
        rows.append(
            {
                "epoch": format_number(number(record, "epoch") + 1),
                "update": _text(number(record, "update")),
                "loss": _text(number(record, "loss"), ".4f"),
                "eval_loss": _text(number(evaluated, "loss"), ".4f") if evaluated else "",
                "accuracy": percent(number(evaluated, "accuracy")) if evaluated else "",
                "images_per_second": _text(number(record, "images_per_second")),
                "seconds": _duration(number(record, "seconds")),
            }
        )
    return rows


def checkpoint_rows(run: RunData) -> list[tuple[str, str, str, str]]:
    """Per checkpoint: update, path, size and seconds, as text."""
    return [
        (
            _text(number(record, "update")),
            str(record.get("path", "")),
            format_bytes(number(record, "num_bytes")) if math.isfinite(number(record, "num_bytes")) else "",
            _duration(number(record, "seconds")),
        )
        for record in run.checkpoints
    ]


def percent(share: float) -> str:
    """A share as per cent with two decimals, or a dash."""
    return f"{100 * share:.2f} %" if math.isfinite(share) else "–"


def _accuracy(run: RunData, words: Words) -> Tile | None:
    accuracies = [(number(record, "accuracy"), number(record, "update")) for record in run.evals]
    accuracies = [pair for pair in accuracies if math.isfinite(pair[0])]
    last = number(run.summary, "accuracy")
    if not math.isfinite(last):
        last = accuracies[-1][0] if accuracies else math.nan
    if not math.isfinite(last):
        return None
    best, update = max(accuracies, default=(math.nan, math.nan))
    if math.isfinite(number(run.summary, "best_accuracy")):
        best, update = number(run.summary, "best_accuracy"), number(run.summary, "best_update")
    if not math.isfinite(best):
        return Tile(words["accuracy"], percent(last))
    detail = words["best_at" if math.isfinite(update) else "best"]
    return Tile(words["accuracy"], percent(last), detail.format(accuracy=percent(best), update=f"{update:,.0f}"))


def _loss(run: RunData, words: Words) -> Tile | None:
    trained = number(run.epochs[-1] if run.epochs else run.steps[-1] if run.steps else {}, "loss")
    evaluated = number(run.summary, "loss")
    if not math.isfinite(evaluated):
        evaluated = number(run.evals[-1], "loss") if run.evals else math.nan
    training = words["loss_training"].format(loss=f"{trained:.4f}") if math.isfinite(trained) else ""
    if math.isfinite(evaluated):
        return Tile(words["loss"], f"{evaluated:.4f}", training)
    return Tile(words["loss"], f"{trained:.4f}", words["loss_of_training"]) if training else None


def _throughput(run: RunData, words: Words) -> Tile | None:
    speed = throughput(run)
    if not math.isfinite(speed):
        return None
    per_rank = words["per_rank"].format(number=_text(speed / num_ranks(run))) if num_ranks(run) > 1 else ""
    return Tile(words["images_per_second"], _text(speed), per_rank)


def throughput(run: RunData) -> float:
    """Images per second of the whole run, or as last logged; ``nan`` if neither is known."""
    speed = number(run.summary, "images_per_second")
    return speed if math.isfinite(speed) else number(run.steps[-1] if run.steps else {}, "images_per_second")


def _time(run: RunData, words: Words) -> Tile | None:
    seconds = number(run.summary, "seconds")
    if not math.isfinite(seconds):
        spent = [number(record, "seconds") for record in run.epochs]
        seconds = sum(value for value in spent if math.isfinite(value)) if spent else math.nan
    if not math.isfinite(seconds):
        return None
    updates = number(run.summary, "num_updates")
    updates = updates if math.isfinite(updates) else last_update(run)
    epochs = number(run.summary, "epochs")
    epochs = epochs if math.isfinite(epochs) else float(len(run.epochs))
    detail = f"{_count(epochs, 'epoch', words)}, {_count(updates, 'update', words)}"
    return Tile(words["time"], format_seconds(seconds), detail)


def num_ranks(run: RunData) -> int:
    """The number of ranks of the run's last start; 0 if that is not known."""
    for record in (run.summary, run.start):
        if math.isfinite(number(record, "num_ranks")):
            return int(number(record, "num_ranks"))
    return 0


def _ranks(run: RunData, words: Words) -> Tile | None:
    count = num_ranks(run)
    if not count:
        return None
    engine = str(run.summary.get("engine") or run.start.get("engine") or run.config.get("engine") or "")
    device = str(run.summary.get("device") or run.start.get("device") or "")
    parts = [_ENGINE_TITLES.get(engine, engine), device, _mesh_text(run.summary.get("mesh"))]
    return Tile(words["ranks"], str(count), " · ".join(part for part in parts if part))


def _memory(run: RunData, words: Words) -> Tile | None:
    peaks = [value for value in numbers(run.summary, "peak_memory_bytes") if math.isfinite(value)]
    if not peaks:
        return None
    states = [value for value in numbers(run.summary, "optimizer_bytes") if math.isfinite(value)]
    detail = words["largest_of_all"] if len(peaks) > 1 else ""
    state = words["optimizer_size"].format(size=format_bytes(max(states))) if states else ""
    return Tile(words["peak_memory"], format_bytes(max(peaks)), ", ".join(part for part in (detail, state) if part))


def _collectives(run: RunData, words: Words) -> Tile | None:
    rows = _collective_records(run)
    if not rows and num_ranks(run) != 1:
        return None
    total = sum(number(row, "number") for row in rows)
    num_bytes = sum(number(row, "num_bytes") for row in rows)
    detail = words["from_each_rank"].format(size=format_bytes(num_bytes)) if rows else words["single_rank"]
    return Tile(words["collectives_per_update"], format_number(total), detail)


def _parameters(run: RunData, words: Words) -> Tile | None:
    count = number(run.summary, "num_parameters")
    checks = number(run.summary, "sync_checks")
    detail = words["equal_on_all"].format(checks=_count(checks, "check", words)) if checks > 0 else ""
    return Tile(words["parameters"], f"{count:,.0f}", detail) if math.isfinite(count) else None


def _collective_records(run: RunData) -> list[dict[str, Any]]:
    rows = run.summary.get("collectives")
    kept = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [row for row in kept if math.isfinite(number(row, "number")) and math.isfinite(number(row, "num_bytes"))]


def _mesh_text(mesh: object) -> str:
    if isinstance(mesh, dict):
        return ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    return str(mesh or "")


def _latest(run: RunData, key: str) -> float:
    values = [number(run.summary, key), *(number(step, key) for step in run.steps[-1:])]
    return next((value for value in values if math.isfinite(value)), math.nan)


def _count(value: float, noun: str, words: Words) -> str:
    key = f"{noun}_one" if value == 1 else f"{noun}_many"
    return words[key].format(number=f"{value:,.0f}" if math.isfinite(value) else "?")


def _duration(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else ""


def _text(value: float, form: str = "") -> str:
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "infinite"
    return format(value, form) if form else f"{value:,.0f}" if abs(value) >= 100 else format_number(value)

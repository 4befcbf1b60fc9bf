"""The report of a run: one HTML file that needs nothing else, on a phone, on paper and without a network."""

from __future__ import annotations

import base64
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convmesh.errors import RunFolderError
from convmesh.report import facts, figures
from convmesh.report.run_folder import RunData, read_run

if TYPE_CHECKING:
    from jinja2 import Environment

REPORT_NAME = "report.html"
_MAX_ROWS = 200


def write_report(run_dir: Path) -> Path:
    """Writes ``report.html`` into a run folder.

    Works on any state of a run: going, killed, failed, resumed or finished.

    Args:
        run_dir: The folder of the run.

    Returns:
        The path of the report.

    Raises:
        RunFolderError: If the folder holds no run, or can't be written.
    """
    page = render_report(read_run(run_dir))
    path = run_dir / REPORT_NAME
    unfinished = run_dir / f".{REPORT_NAME}.{os.getpid()}"
    try:
        unfinished.write_text(page, "utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RunFolderError(
            f"the report can't be written to '{path}'", got=error.strerror, fix="Make room or grant access"
        ) from error
    return path


def render_report(run: RunData) -> str:
    """The report as HTML.

    Args:
        run: What the run folder tells.

    Returns:
        The page. All text that comes from the run is escaped.
    """
    environment = _environment()
    script = environment.get_template("report.js.j2").render()
    return environment.get_template("report.html.j2").render(_context(run), script=script, script_hash=_hash(script))


def _context(run: RunData) -> dict[str, Any]:
    return {
        "title": facts.title(run),
        "status": facts.status(run),
        "started": facts.started(run),
        "run_name": run.run_dir.resolve().name,
        "tiles": facts.headline(run),
        "remarks": facts.remarks(run),
        "training_charts": figures.training_charts(run),
        "rank_charts": figures.rank_charts(run),
        "heat_map": figures.class_heat_map(run),
        "collectives": facts.collective_rows(run),
        "epochs": facts.epoch_rows(run)[-_MAX_ROWS:],
        "checkpoints": facts.checkpoint_rows(run)[-_MAX_ROWS:],
        "config_text": run.config_text,
        "versions": sorted(run.versions.items()),
        "events": [
            ("warning" if event.get("level") == "warning" else "info", str(event.get("text", "")))
            for event in run.events[-_MAX_ROWS:]
        ],
        "num_left_out": max(0, len(run.events) - _MAX_ROWS),
    }


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("convmesh.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

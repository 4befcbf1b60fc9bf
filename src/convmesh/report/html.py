"""The report of a run: one HTML file that needs nothing else, on a phone, on paper and without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convmesh.report import facts, figures
from convmesh.report.page import environment, script_hash, write_page
from convmesh.report.run_folder import RunData, read_run

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
    return write_page(render_report(read_run(run_dir)), run_dir / REPORT_NAME)


def render_report(run: RunData) -> str:
    """The report as HTML.

    Args:
        run: What the run folder tells.

    Returns:
        The page. All text that comes from the run is escaped.
    """
    script = environment().get_template("report.js.j2").render()
    template = environment().get_template("report.html.j2")
    return template.render(_context(run), script=script, script_hash=script_hash(script))


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

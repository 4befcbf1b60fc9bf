"""``convmesh report``: the page of a run, made anew from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convmesh.errors import RunFolderError


def report(run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Write report.html of a run again, also of one that runs or was killed."""
    if not (run_dir / "metrics.jsonl").exists():
        raise RunFolderError(f"{run_dir} is not the folder of a run", fix="Give a folder that holds a metrics.jsonl")
    from convmesh.report.html import write_report

    typer.echo(f"Report: {write_report(run_dir)}")

"""``convmesh compare``: what changed from one run to another, in settings, plan, time, memory and result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from convmesh.cli.report import LanguageOption, wide_console
from convmesh.errors import RunFolderError

_Folder = Annotated[Path, typer.Argument(help="A run folder, or the folder of a profile.")]


def compare(
    run_a: _Folder,
    run_b: _Folder,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.html", help="Also write a page with pictures.")
    ] = None,
    language: LanguageOption = "en",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Tell what changed from RUN_A to RUN_B: settings, plan, time with its spread, memory, result."""
    from convmesh.report.comparison import compare_sides
    from convmesh.report.comparison_page import write_comparison
    from convmesh.report.comparison_sides import read_sides
    from convmesh.report.comparison_view import print_comparison
    from convmesh.report.profile_text import texts
    from convmesh.training.metrics import finite

    words = texts(language, "comparison")
    if run_a.resolve() == run_b.resolve():
        raise RunFolderError(f"both folders are the same: {run_a}", fix="Give the folders of two runs")
    before, after = read_sides(run_a, run_b)
    if output is not None:
        write_comparison(before, after, output, language=language)
    comparison = compare_sides(before, after)
    if as_json:
        typer.echo(json.dumps(finite(comparison.as_dict()), indent=2, ensure_ascii=False))
        return
    print_comparison(comparison, wide_console(140), language=language)
    if output is not None:
        typer.echo(f"\n{words['page'].format(path=output)}")

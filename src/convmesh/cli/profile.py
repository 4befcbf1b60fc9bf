"""``convmesh profile``: where the time of a run goes, rank by rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from convmesh.profiling.events import Trace

app = typer.Typer(
    help="Show where the time of a run goes: compute, communication, waiting, rank by rank.", no_args_is_help=True
)

Language = Annotated[str, typer.Option(metavar="en|zh", help="Language of the report.")]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


@app.command("import")
def import_(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Kineto traces of PyTorch (.json, .json.gz), folders of them, or profile folders of MindSpore and of "
            "Ascend NPUs, one or more ranks each.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the profile and its report go.")],
    language: Language = "en",
    json_: Json = False,
) -> None:
    """Read profiles that PyTorch or MindSpore have written, and report on them."""
    from convmesh.profiling.importing.find import import_profiles
    from convmesh.profiling.store import save_trace

    def say(path: Path) -> None:
        typer.echo(f"Reading {path}", err=True)

    trace = import_profiles(paths, on_file=say)
    save_trace(trace, output)
    _report(trace, output, language=language, as_json=json_)


@app.command("show")
def show(
    folder: Annotated[Path, typer.Argument(help="A folder with a profile.json, or a run folder that has one.")],
    language: Language = "en",
    json_: Json = False,
) -> None:
    """Report again on a profile that was captured or imported."""
    from convmesh.profiling.store import INDEX_NAME, load_trace

    inside = folder / "profile"
    found = inside if not (folder / INDEX_NAME).exists() and inside.is_dir() else folder
    _report(load_trace(found), found, language=language, as_json=json_)


def _report(trace: Trace, folder: Path, *, language: str, as_json: bool) -> None:
    from rich.console import Console

    from convmesh.profiling.analysis import analyse
    from convmesh.report.profile_page import write_profile_page
    from convmesh.report.profile_terminal import print_profile

    analysis = analyse(trace)
    page = write_profile_page(analysis, folder, language=language)
    if as_json:
        typer.echo(json.dumps(analysis.summary(), indent=2))
        return
    print_profile(analysis, Console())
    typer.echo(f"Report: {page}")

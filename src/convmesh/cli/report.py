"""``convmesh report``: the page of a run, made anew from its files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convmesh.errors import RunFolderError

if TYPE_CHECKING:
    from rich.console import Console

    from convmesh.planner.cluster import Cluster

LanguageOption = Annotated[str, typer.Option(metavar="en|zh", help="Language of the report.")]
RunLanguageOption = Annotated[
    str | None, typer.Option("--language", metavar="en|zh", help="Language of the report [default: of the run file].")
]
LinksOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="FILE|PRESET",
        help="Hold collectives against what this cluster file promises, and predict advice by it.",
    ),
]


def report(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    language: RunLanguageOption = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A profile of another run, as `convmesh profile` makes it [default: its own]."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|PRESET",
            help="Predict the run from this cluster file, and tell what collectives reached of what it promises "
            "[default: what the plan of the run predicts].",
        ),
    ] = None,
) -> None:
    """Write report.html of a run again, also of one that runs or was killed, and sum it up."""
    if not (run_dir / "metrics.jsonl").exists():
        raise RunFolderError(f"{run_dir} is not the folder of a run", fix="Give a folder that holds a metrics.jsonl")
    from convmesh.report.html import language_of, read_report, write_report_of
    from convmesh.report.profile_text import texts
    from convmesh.report.run_terminal import print_report
    from convmesh.training.advice import advise

    language = language or language_of(run_dir)
    texts(language)
    links = read_cluster(cluster)
    found = read_report(run_dir, profile_dir=profile)
    advised = None
    if found.analysis is not None and found.profile_dir is not None:
        advised = advise(found.analysis, found.profile_dir, cluster=links).advised
    page = write_report_of(found, language=language, cluster=links, advised=advised)
    print_report(found, wide_console(), language=language, cluster=links, advised=advised)
    typer.echo(f"\nReport: {page}")


def wide_console(width: int = 120) -> Console:
    """A console for tables; where it is no terminal, it is this wide.

    Tables are wide: a file or pipe has room for them where a narrow terminal has not.
    """
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width)


def read_cluster(name: str | None) -> Cluster | None:
    """The cluster file or preset of an option; None if it was not given."""
    if name is None:
        return None
    from convmesh.planner.cluster_file import load_cluster

    return load_cluster(name)

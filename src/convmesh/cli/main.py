"""``convmesh``: registers the commands and turns errors into sentences."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from convmesh.cli import config, data, profile
from convmesh.cli.calibrate import calibrate
from convmesh.cli.check import check
from convmesh.cli.compare import compare
from convmesh.cli.doctor import doctor
from convmesh.cli.graph import graph
from convmesh.cli.plan import plan
from convmesh.cli.report import report
from convmesh.cli.train import train
from convmesh.cli.verify import verify
from convmesh.errors import ConvMeshError
from convmesh.version import __version__

app = typer.Typer(
    help="Split convolutional networks over many devices, on MindSpore or PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train)
app.command("graph")(graph)
app.command("check")(check)
app.command("plan")(plan)
app.command("calibrate")(calibrate)
app.command("verify")(verify)
app.command("report")(report)
app.command("compare")(compare)
app.command("doctor")(doctor)
app.add_typer(profile.app, name="profile")
app.add_typer(data.app, name="data")
app.add_typer(config.app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"convmesh {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, help="Print the version.")] = False,
) -> None:
    """Split convolutional networks over many devices, on MindSpore or PyTorch."""


def main() -> None:
    """Runs the command line; a user's mistake ends with a sentence and exit code 2."""
    sys.path.insert(0, os.getcwd())  # As with `python -m`: a factory may stand in a file right here.
    try:
        app()
    except ConvMeshError as error:
        print(f"convmesh: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

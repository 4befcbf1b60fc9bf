"""``convmesh config``: what may stand in a run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from convmesh.errors import ConfigError

app = typer.Typer(help="What may stand in a run file.", no_args_is_help=True)

_Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead.")]


@app.command("schema")
def schema(output: _Output = None) -> None:
    """Print the JSON Schema of the run file, for editors and other tools."""
    from convmesh.config import config_schema

    _put(json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n", output)


@app.command("reference")
def reference(
    output: _Output = None,
    language: Annotated[str, typer.Option("--language", metavar="en|zh", help="Language of the page.")] = "en",
) -> None:
    """Print every setting with its values, default and meaning, as Markdown."""
    from convmesh.config.reference import config_reference

    _put(config_reference(language), output)


def _put(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"'{output}' can't be written", got=error.strerror or str(error)) from error

"""What all pages share: templates with escaping, a hash that lets just our own script run, and writing in one piece."""

from __future__ import annotations

import base64
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convmesh.errors import RunFolderError

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def environment() -> Environment:
    """The templates; whatever is put into them is escaped, and what is missing is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("convmesh.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render_page(template: str, **context: Any) -> str:
    """A page with our script in it; all text in the context is escaped.

    Args:
        template: Its file name.
        context: What it needs, the script and its hash apart.

    Returns:
        The page.
    """
    script = environment().get_template("report.js.j2").render()
    return environment().get_template(template).render(context, script=script, script_hash=script_hash(script))


def script_hash(script: str) -> str:
    """The hash of a script as a content security policy names it."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def write_page(page: str, path: Path) -> Path:
    """Writes a page so that nobody ever sees half of it.

    Args:
        page: Its HTML.
        path: The file.

    Returns:
        The path.

    Raises:
        RunFolderError: If it can't be written.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(page, "utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RunFolderError(
            f"the report can't be written to '{path}'", got=error.strerror, fix="Make room or grant access"
        ) from error
    return path

"""Files that commands write: looked at before what takes long."""

from __future__ import annotations

import os
from pathlib import Path

from convmesh.errors import ConfigError


def refuse_unwritable(path: Path, *, what: str, option: str) -> None:
    """Refuses a file that can't be written.

    Args:
        path: The file.
        what: What it is, for the sentence.
        option: The option that names it.

    Raises:
        ConfigError: If it is a folder, or its folder is missing or may not be written.
    """
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{what} '{path}' can't be written",
            got="a folder" if path.is_dir() else f"no folder '{folder}' that may be written",
            fix=f"Give {option} a file in a folder that exists",
        )


def refuse_existing(path: Path, *, option: str) -> None:
    """Refuses a file that is there: someone may have written it by hand.

    Args:
        path: The file.
        option: The option that names it.

    Raises:
        ConfigError: If it exists.
    """
    if path.exists():
        raise ConfigError(f"'{path}' is there already and stays as it is", fix=f"Give {option} the name of a new file")

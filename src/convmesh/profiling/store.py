"""Profiles on disk: a folder with ``profile.json`` and one compressed file of columns per rank.

Files are read without ``pickle``, so that a profile from elsewhere can't run code.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.errors import ProfileError
from convmesh.profiling.events import COLUMNS, About, RankEvents, Trace

SCHEMA_VERSION = 1
INDEX_NAME = "profile.json"


def save_trace(trace: Trace, folder: Path) -> Path:
    """Writes a profile.

    Args:
        trace: What the ranks did.
        folder: Where to; made if missing. Events of the same ranks are replaced.

    Returns:
        The path of its ``profile.json``.

    Raises:
        ProfileError: If the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for events in trace.ranks:
            save_rank(events, folder)
        return write_index(folder, ranks=[events.rank for events in trace.ranks], about=trace)
    except OSError as error:
        raise ProfileError(f"the profile can't be written to '{folder}'", got=error.strerror) from None


def save_rank(events: RankEvents, folder: Path) -> Path:
    """Writes the events of one rank; see ``save_trace``."""
    names = np.frombuffer(json.dumps(events.names).encode(), np.uint8)
    path = folder / _file_name(events.rank)
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    np.savez_compressed(unfinished, names=names, **{name: getattr(events, name) for name in COLUMNS})
    unfinished.replace(path)
    return path


def load_trace(folder: Path) -> Trace:
    """Reads a profile.

    Args:
        folder: As written by ``save_trace``.

    Returns:
        What the ranks did.

    Raises:
        ProfileError: If it is missing, damaged or of another version.
    """
    index = _read_index(folder)
    try:
        ranks = tuple(load_rank(folder / _file_name(int(rank)), rank=int(rank)) for rank in index["ranks"])
        mesh = {str(axis): int(size) for axis, size in index["mesh"].items()}
        remarks = tuple(str(remark) for remark in index["remarks"])
        source, engine = str(index["source"]), str(index["engine"])
        figures = {str(name): float(value) for name, value in index.get("figures", {}).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"'{folder / INDEX_NAME}' is damaged", got=repr(error)) from None
    return Trace(ranks=ranks, source=source, engine=engine, mesh=mesh, remarks=remarks, figures=figures)


def load_rank(path: Path, *, rank: int) -> RankEvents:
    """Reads the events of one rank.

    Args:
        path: As written by ``save_rank``.
        rank: Its number.

    Returns:
        The events.

    Raises:
        ProfileError: If the file is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            names = tuple(str(name) for name in json.loads(file["names"].tobytes()))
            return RankEvents(rank=rank, names=names, **{name: file[name] for name in COLUMNS})
    except FileNotFoundError:
        raise ProfileError(f"the events of rank {rank} are missing", expected=str(path)) from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ProfileError(f"'{path}' is damaged", got=f"{type(error).__name__}: {error}") from None


def _file_name(rank: int) -> str:
    return f"rank_{rank:05d}.npz"


def write_index(folder: Path, *, ranks: Sequence[int], about: About) -> Path:
    """Writes ``profile.json``; see ``save_trace``."""
    path = folder / INDEX_NAME
    index = {
        "schema_version": SCHEMA_VERSION,
        "source": about.source,
        "engine": about.engine,
        "mesh": dict(about.mesh),
        "remarks": list(about.remarks),
        "figures": dict(about.figures),
        "ranks": list(ranks),
    }
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    unfinished.write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    unfinished.replace(path)
    return path


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX_NAME
    try:
        index = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ProfileError(
            f"'{folder}' holds no profile",
            expected=f"a {INDEX_NAME} in it",
            fix="Make one with: convmesh profile CONFIG, or convmesh profile import PATH -o DIR",
        ) from None
    except (OSError, ValueError) as error:
        raise ProfileError(f"'{path}' can't be read", got=str(error), fix="Profile or import again") from None
    if not isinstance(index, dict) or index.get("schema_version") != SCHEMA_VERSION:
        found = index.get("schema_version") if isinstance(index, dict) else type(index).__name__
        raise ProfileError(
            f"'{path}' is of another version", got=found, expected=SCHEMA_VERSION, fix="Profile again with this version"
        )
    return index

"""The cache folder, locks between processes, and files that are whole or absent."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from convmesh.errors import DataError


class CacheError(DataError):
    """The cache folder can't be written or locked."""


def cache_root() -> Path:
    """Where fetched data and indexes are kept: the variable CONVMESH_DATA, or ``~/.cache/convmesh``."""
    return Path(os.environ.get("CONVMESH_DATA") or Path.home() / ".cache" / "convmesh").expanduser()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock that other processes wait for; it ends with the process, however that ends.

    Args:
        path: The lock file; it is made if it isn't there, and stays.

    Raises:
        CacheError: If the folder can't be written or locked.
    """
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            handle.close()
            raise
    except OSError as error:
        raise CacheError(
            f"the cache folder {path.parent} can't be written or locked",
            got=error.strerror,
            fix="Set the variable CONVMESH_DATA to a folder that can",
        ) from None
    with handle:
        yield


@contextlib.contextmanager
def staging_folder(root: Path, name: str) -> Iterator[Path]:
    """A temporary folder on the same file system as ``root``; call it while holding the lock of ``name``.

    Left-overs of killed processes are removed first. A full disk becomes a sentence.

    Args:
        root: Where the finished thing will be.
        name: What is being made.

    Yields:
        An empty folder, removed at the end.

    Raises:
        DataError: If a file can't be written.
    """
    prefix = f".{name}-"
    for leftover in root.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    try:
        yield folder
    except OSError as error:
        raise DataError(f"{name} could not be prepared in {root}", got=error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(new: Path, target: Path) -> None:
    """Renames a finished folder to its final name; an old one with that name goes first.

    Args:
        new: A finished folder inside a staging folder.
        target: Its final name on the same file system.
    """
    if target.exists():
        target.rename(new.with_name(new.name + ".old"))
    new.rename(target)

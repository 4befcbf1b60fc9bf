"""Reads pickles of arrays and plain containers without executing anything else that they hold."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.errors import DataError


class _Reconstruct:
    """What NumPy's pickles call to make an array before its state is set."""

    __slots__ = ()

    def __call__(self, subtype: type, shape: tuple[int, ...], dtype: Any) -> Any:
        if subtype is not np.ndarray:
            raise pickle.UnpicklingError(f"an array of the type {subtype!r} is not allowed")
        return np.ndarray.__new__(np.ndarray, (0,), "b")


class _Encode:
    """What Python 2 pickles call to make bytes."""

    __slots__ = ()

    def __call__(self, text: str, encoding: str = "latin1") -> bytes:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"the encoding {encoding!r} is not allowed")
        return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(),
    ("_codecs", "encode"): _Encode(),
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed") from None


def load_arrays(path: Path) -> Any:
    """Reads a pickle that may hold arrays, numbers, text, bytes, lists, tuples and dicts, and nothing else.

    Args:
        path: The file. Text of Python 2 becomes bytes.

    Returns:
        Its content.

    Raises:
        DataError: If it asks for anything else, or is damaged.
    """
    try:
        with path.open("rb") as file:
            return _ArrayUnpickler(file, encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise DataError(
            f"the file {path} is not a pickle of arrays", got=error, fix="Take it from the official archive again"
        ) from None

"""Sizes as people write them: "25MiB", "32 GB", 4096."""

from __future__ import annotations

import re

from convmesh.errors import ConfigError

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """Reads a number of bytes.

    Args:
        size: An integer, or a number with a unit: B, KB, MB, GB, TB (powers of 1000), KiB to TiB (powers of 1024).

    Returns:
        The size in bytes, rounded down.

    Raises:
        ConfigError: If ``size`` is negative or not of this form.
    """
    match = _SIZE.fullmatch(str(size))
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None or isinstance(size, bool):
        raise ConfigError("a size is not a number of bytes", got=repr(size), expected='like 26214400 or "25MiB"')
    return int(float(match.group(1)) * factor) if "." in match.group(1) else int(match.group(1)) * factor


def read_bytes(size: int | str) -> int:
    """``parse_bytes`` for use by pydantic, which wants a ValueError where it fails."""
    try:
        return parse_bytes(size)
    except ConfigError as error:
        raise ValueError(str(error.expected)) from error


def format_bytes(num_bytes: float) -> str:
    """Writes a number of bytes for people, in powers of 1024.

    Args:
        num_bytes: The size in bytes.

    Returns:
        For example ``"25.0 MiB"``; whole bytes below 1 KiB.
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Writes a duration for people.

    Args:
        seconds: The duration in seconds.

    Returns:
        For example ``"1 h 02 min"``, ``"3 min 05 s"`` or ``"4.2 s"``.
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"

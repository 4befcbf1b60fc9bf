"""Metrics: records of a run and where they go."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from convmesh.errors import RunFolderError

Record = Mapping[str, Any]


class MetricsSink(Protocol):
    """Takes the records of a run, one by one."""

    def write(self, record: Record) -> None:
        """Takes one record; see the documentation of ``metrics.jsonl`` for its kinds."""
        ...

    def close(self) -> None:
        """Flushes and releases what the sink holds."""
        ...


class JsonLinesSink:
    """Appends each record as one line of JSON; numbers that are not finite become null.

    Args:
        path: The file; created if missing, continued if not.

    Raises:
        RunFolderError: If the file can't be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._failure(error) from None

    def write(self, record: Record) -> None:
        """Appends a record.

        Raises:
            RunFolderError: If the disk is full.
        """
        line = json.dumps(finite(record), allow_nan=False) + "\n"
        try:
            self._file.write(line.encode())
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> RunFolderError:
        return RunFolderError(
            f"the metrics file {self._path} can't be written",
            got=error.strerror,
            fix="Free disk space, then go on with --resume; the checkpoints are intact",
        )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class CallbackSink:
    """Hands each record to a function.

    Args:
        callback: Called with every record.
    """

    def __init__(self, callback: Callable[[Record], None]) -> None:
        self._callback = callback

    def write(self, record: Record) -> None:
        """Calls the function."""
        self._callback(record)

    def close(self) -> None:
        """Does nothing: a function holds nothing."""


class Fanout:
    """Several sinks as one.

    Args:
        sinks: The sinks, written to in this order.
    """

    def __init__(self, *sinks: MetricsSink) -> None:
        self._sinks = list(sinks)

    def add(self, *sinks: MetricsSink) -> None:
        """Takes more sinks, which get what is written from now on."""
        self._sinks += sinks

    def write(self, record: Record) -> None:
        """Writes to every sink."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Closes every sink, the last one first: it may have something to say to those before it."""
        for sink in reversed(self._sinks):
            sink.close()


def finite(value: Any) -> Any:
    """Replaces every float that JSON can't write (NaN, infinities) by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value

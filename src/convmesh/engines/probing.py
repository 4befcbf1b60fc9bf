"""What the probes of all engines share: they run in processes of their own and leave what they find in a file.

A probe is started as ``python -m convmesh.engines.ENGINE.probe describe FILE`` or, on every rank of a launch,
``... collectives FILE``. It must never be imported by a process that wants to stay free of frameworks; this module is.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SMALL_BYTES = 1024
LARGE_BYTES = 4 * 2**20
"""Sizes at which collectives are timed: latency shows at the small one, bandwidth at the large one."""

_NUM_REPEATS = 9


class CollectiveLog:
    """Tries collectives and writes a line for each, so that a hang loses only what comes after it.

    Args:
        path: The file of lines; one rank writes it.
        writes: Whether this rank is the one.
    """

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._path = path
        self._writes = writes

    def attempt(self, name: str, make: Callable[[int], Callable[[], Any]]) -> None:
        """Runs a collective at both sizes and notes its times, or why it failed.

        Args:
            name: Its name, for people.
            make: Gets a number of bytes, returns a function that runs the collective on that many and waits for it; the
                function raises if the result is wrong.
        """
        found: dict[str, Any] = {"name": name, "works": True, "error": ""}
        try:
            for key, num_bytes in (("small_seconds", SMALL_BYTES), ("large_seconds", LARGE_BYTES)):
                found[key] = _median_seconds(make(num_bytes))
        except Exception as error:  # whatever a framework throws is the finding
            found |= {"works": False, "error": shorten(str(error)) or type(error).__name__}
        if self._writes:
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(found) + "\n")


def run_probe(
    arguments: list[str],
    *,
    describe: Callable[[], Mapping[str, Any]],
    collectives: Callable[[Path], None],
) -> None:
    """The command line of a probe.

    Args:
        arguments: ``describe FILE`` or ``collectives FILE``.
        describe: Tells the framework's version and devices, and tries one computation.
        collectives: Tries all collectives, into a file of lines.
    """
    what, path = arguments
    if what == "describe":
        Path(path).write_text(json.dumps(dict(describe())), encoding="utf-8")
    else:
        collectives(Path(path))


def shorten(text: str, limit: int = 160) -> str:
    """The beginning of a message of several lines as one line, without rules and blanks."""
    line = " ".join(part for part in (line.strip(" -\t\r") for line in text.splitlines()) if part)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _median_seconds(run: Callable[[], Any]) -> float:
    run()
    run()
    times = []
    for _ in range(_NUM_REPEATS):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)

"""Telling a tracker from a thread of its own: it may be slow, hang or fail, and training does not notice."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from convmesh.errors import brief
from convmesh.training.metrics import Record
from convmesh.training.sinks.tracker import Tracker, scalars_of

PATIENCE_SECONDS = 60.0
"""How long the end of a run waits for what is still on its way to a tracker."""

OnEvent = Callable[[str, str], None]
"""Takes a level (``"info"`` or ``"warning"``) and a text; called from any thread."""


class BackgroundSink:
    """Tells a tracker what its records hold; a tracker that fails is told no more.

    Args:
        name: Of the sink, as run files name it.
        open_: Opens the tracker.
        on_event: Told where the run is to be found, and once of a failure.
        patience_seconds: How long ``close`` waits at most.
    """

    def __init__(
        self, name: str, open_: Callable[[], Tracker], *, on_event: OnEvent, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self._name = name
        self._open = open_
        self._on_event = on_event
        self._patience_seconds = patience_seconds
        self._records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._ended = False
        # A daemon: an unreachable server must not keep a finished run from ending.
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Takes a record; returns at once."""
        if not self._ended:
            self._records.put(record)

    def close(self) -> None:
        """Waits until the tracker has been told everything and has ended the run, but not for ever."""
        if self._ended:
            return
        self._records.put(None)
        self._thread.join(self._patience_seconds)
        if self._thread.is_alive():
            self._ended = True
            self._on_event("warning", f"{self._what} does not answer; what it was not told is in metrics.jsonl")

    @property
    def _what(self) -> str:
        return f"the sink '{self._name}'"

    def _work(self) -> None:
        try:
            self._tell()
        # Libraries exit, too, where they find no key for their server.
        except (Exception, SystemExit) as error:
            if not self._ended:
                self._on_event("warning", f"{self._what} failed and is told no more: {brief(error)}")
        finally:
            self._ended = True

    def _tell(self) -> None:
        tracker = self._open()
        self._on_event("info", f"{self._what} writes to {tracker.place}")
        try:
            while (record := self._records.get()) is not None:
                scalars = scalars_of(record)
                if scalars:
                    tracker.log(scalars, update=int(record["update"]))
        finally:
            tracker.close()

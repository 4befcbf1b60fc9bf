"""What a person sees while a run goes on: a moving display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from convmesh.report.run_folder import number, parse_metric_line, section
from convmesh.report.scales import format_number
from convmesh.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from typing import BinaryIO

Record = Mapping[str, Any]

_SHORTEST_PAUSE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 60.0
_PAUSE_SHARE = 0.02
_READ_BYTES = 2**20


class RecordTaker(Protocol):
    """Takes the records of a run one by one, as `Display` does."""

    def write(self, record: Record) -> None:
        """Takes one record."""
        ...


class Display:
    """Shows a run from its metric records.

    On a terminal one line with a bar and one with numbers move at the bottom, and what ends (epochs, evaluations,
    events) scrolls above them. Elsewhere, as in a log file, steps become plain lines: the first, the last, and between
    them one every 5 seconds at first, every minute once a run is an hour old.

    Args:
        console: Where to write; it knows whether it is a terminal.
        clock: Seconds that pass; for tests.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._begun = clock()
        self._last_line: float | None = None
        self._epochs = math.nan
        self._num_updates = math.nan
        self._uses_scale = False
        self._step: Record = {}
        self._accuracy = math.nan
        self._live: Live | None = None

    def write(self, record: Record) -> None:
        """Shows one record; unknown kinds and missing numbers are passed over."""
        kind = record.get("kind")
        if kind == "start":
            self._start(record)
        elif kind == "step":
            self._take_step(record)
        elif kind == "epoch":
            self._say(self._epoch_text(record))
        elif kind == "eval":
            self._accuracy = number(record, "accuracy")
            self._say(self._eval_text(record))
            self._refresh()
        elif kind == "checkpoint" and not self._console.is_terminal:
            size = number(record, "num_bytes")
            about = f" ({format_bytes(size)})" if math.isfinite(size) else ""
            self._say(f"checkpoint {record.get('path', '')}{about}")
        elif kind == "event":
            warning = record.get("level") == "warning"
            self._say(f"{'warning: ' if warning else ''}{record.get('text', '')}", style="yellow" if warning else "")

    def close(self) -> None:
        """Takes the moving lines away; what scrolled stays. Can be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self, record: Record) -> None:
        config = section(record, "config")
        self._epochs = number(record, "epochs")
        if math.isnan(self._epochs):
            self._epochs = number(section(config, "train"), "epochs")
        self._num_updates = number(record, "num_updates")
        compute = record.get("compute") or section(config, "precision").get("compute")
        self._uses_scale = compute == "float16"
        self._last_line = None
        ranks = number(record, "num_ranks")
        parts = [
            _counted(ranks, "rank"),
            str(record.get("engine", "")),
            str(record.get("device", "")),
            _counted(self._num_updates, "update"),
            _counted(self._epochs, "epoch"),
        ]
        update = number(record, "update")
        head = f"going on after update {update:,.0f}" if update > 0 else "training"
        self._say(f"{head}: {', '.join(part for part in parts if part)}")
        if self._console.is_terminal and self._live is None:
            self._live = Live(self._panel(), console=self._console, refresh_per_second=8, transient=True)
            self._live.start()

    def _take_step(self, record: Record) -> None:
        self._step = record
        if math.isfinite(number(record, "num_updates")):
            self._num_updates = number(record, "num_updates")
        self._refresh()
        if self._live is None and self._line_is_due(record):
            self._last_line = self._clock()
            self._say(self._step_text(record))

    def _line_is_due(self, record: Record) -> bool:
        if self._last_line is None or number(record, "update") >= self._num_updates:
            return True
        pause = _PAUSE_SHARE * (self._clock() - self._begun)
        pause = min(_LONGEST_PAUSE_SECONDS, max(_SHORTEST_PAUSE_SECONDS, pause))
        return self._clock() - self._last_line >= pause

    def _say(self, text: str, *, style: str = "") -> None:
        # A Text object, never markup: names and messages of the user may hold brackets.
        # Plain lines are left whole: a log is searched line by line.
        plain = not self._console.is_terminal
        self._console.print(Text(text, style=style), soft_wrap=plain, highlight=False)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._panel())

    def _panel(self) -> RenderableType:
        update = number(self._step, "update")
        total = self._num_updates if self._num_updates > 0 else None
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        done = update if math.isfinite(update) else 0.0
        count = f"{done:,.0f}/{total:,.0f}" if total else f"{done:,.0f}"
        eta = number(self._step, "eta_seconds")
        left = f"  {format_seconds(eta)} left" if math.isfinite(eta) else ""
        bar.add_row(
            Text(self._epoch_of(self._step) or "starting", style="bold"),
            ProgressBar(total=total, completed=done),
            Text(count + left),
        )
        return Group(bar, Text("  ".join(self._numbers(self._step)), style="cyan", overflow="ellipsis", no_wrap=True))

    def _numbers(self, record: Record) -> list[str]:
        parts = []
        if record:
            parts.append(f"loss {_fixed(number(record, 'loss'))}")
        if math.isfinite(self._accuracy):
            parts.append(f"accuracy {100 * self._accuracy:.2f} %")
        speed = number(record, "images_per_second")
        if math.isfinite(speed):
            parts.append(f"{speed:,.0f} images/s" if speed >= 10 else f"{speed:.2g} images/s")
        if self._uses_scale and math.isfinite(number(record, "loss_scale")):
            parts.append(f"scale {format_number(number(record, 'loss_scale'))}")
        skipped = number(record, "skipped_updates")
        if skipped > 0:
            parts.append(f"skipped {skipped:,.0f}")
        return parts

    def _step_text(self, record: Record) -> str:
        update = number(record, "update")
        total = f"/{self._num_updates:,.0f}" if math.isfinite(self._num_updates) else ""
        place = f"update {update:,.0f}{total}" if math.isfinite(update) else ""
        eta = number(record, "eta_seconds")
        left = f"{format_seconds(eta)} left" if eta > 0 and math.isfinite(eta) else ""
        parts = [self._epoch_of(record), place, *self._numbers(record), left]
        return "  ".join(part for part in parts if part)

    def _epoch_of(self, record: Record) -> str:
        epoch = number(record, "epoch")
        total = f"/{self._epochs:.0f}" if math.isfinite(self._epochs) else ""
        return f"epoch {epoch + 1:.0f}{total}" if math.isfinite(epoch) else ""

    def _epoch_text(self, record: Record) -> str:
        parts = [f"{self._epoch_of(record)} done: training loss {_fixed(number(record, 'loss'))}"]
        speed, seconds = number(record, "images_per_second"), number(record, "seconds")
        if math.isfinite(speed):
            parts.append(f"{speed:,.0f} images/s")
        if math.isfinite(seconds):
            parts.append(format_seconds(seconds))
        for key, word in (("dropped_samples", "left out"), ("skipped_samples", "unreadable")):
            if number(record, key) > 0:
                parts.append(f"{number(record, key):,.0f} samples {word}")
        return ", ".join(parts)

    def _eval_text(self, record: Record) -> str:
        accuracy = number(record, "accuracy")
        shown = f"{100 * accuracy:.2f} %" if math.isfinite(accuracy) else "unknown"
        count = number(record, "num_samples")
        of = f" of {count:,.0f} samples" if math.isfinite(count) else ""
        return f"evaluation: accuracy {shown}{of}, loss {_fixed(number(record, 'loss'))}"


def follow_metrics(
    path: Path, display: RecordTaker, stop: threading.Event, *, offset: int = 0, poll_seconds: float = 0.1
) -> int:
    """Hands the records of a growing ``metrics.jsonl`` to a display until told to stop, then the rest of them.

    The file may appear later. A line counts once its end is written. If the file is cut shorter, as a resumed run may
    do with a line that a killed one left half written, reading goes on from its new end.

    Args:
        path: The file.
        display: Takes the records.
        stop: Set it once nothing more will be written.
        offset: Byte at which to begin: the size of the file before a run is resumed.
        poll_seconds: Pause between two looks at the file.

    Returns:
        The byte up to which records were read.
    """
    while True:
        stopping = stop.is_set()  # asked before reading: what was written before the stop is still read
        offset = _read_new_records(path, display, offset)
        if stopping:
            return offset
        stop.wait(poll_seconds)


def _read_new_records(path: Path, display: RecordTaker, offset: int) -> int:
    try:
        with path.open("rb") as file:
            offset = min(offset, file.seek(0, 2))
            file.seek(offset)
            return _take_lines(file, display, offset)
    except FileNotFoundError:
        return offset


def _take_lines(file: BinaryIO, display: RecordTaker, offset: int) -> int:
    unread = b""
    while chunk := file.read(_READ_BYTES):
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            offset += len(line) + 1
            record = parse_metric_line(line)
            if record is not None:
                display.write(record)
    return offset


def _fixed(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def _counted(value: float, noun: str) -> str:
    return f"{value:,.0f} {noun}{'' if value == 1 else 's'}" if math.isfinite(value) else ""

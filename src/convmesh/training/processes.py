"""Processes of a run: which rank is which process, and ranks that end when the command that started them is gone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from convmesh.errors import RunFolderError

STARTER = "CONVMESH_STARTER"
"""Variable that names the process that started the ranks."""

_WORKERS = frozenset(
    {"convmesh.training.worker", "convmesh.training.verify_worker", "convmesh.training.calibrate_worker"}
)
_POLL_SECONDS = 0.5
_END_SECONDS = 10.0


def name_this_process() -> str:
    """The number and start time of this process, which no later process shares."""
    return f"{os.getpid()}:{psutil.Process().create_time()}"


def end_with_starter() -> None:
    """Ends this process, from a thread, once the process named in ``CONVMESH_STARTER`` is gone.

    A command that is killed can't end its ranks. Left alone they would train on, and write into a folder in which the
    user has resumed the run.
    """
    starter = os.environ.get(STARTER)
    if starter is not None:
        threading.Thread(target=_watch, args=(starter,), daemon=True).start()


def _watch(starter: str) -> None:
    number, started = starter.split(":")
    while _is_alive(int(number), float(started)):
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_alive(number: int, started: float) -> bool:
    try:
        process = psutil.Process(number)
        return bool(process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def rank_process(note: Path) -> psutil.Process | None:
    """The living process of a rank, found by the file in which it noted its number.

    Args:
        note: That file, ``logs/rank_0.pid``.

    Returns:
        The process, or None if it has ended or has not noted its number yet.
    """
    try:
        process = psutil.Process(int(note.read_text()))
        # A number can be given to another process after the rank has ended.
        return None if _WORKERS.isdisjoint(process.cmdline()) else process
    except (OSError, ValueError, psutil.Error):
        return None


def wait_for_an_end(numbers: Iterable[int], *, seconds: float) -> None:
    """Waits until one of some living processes ends, and returns at once when it does.

    A launcher that finds a dead rank kills the others, so only a watcher that looks at once sees which one was first.

    Args:
        numbers: Process numbers.
        seconds: Longest wait.
    """
    if not hasattr(os, "pidfd_open"):  # Linux alone has it.
        time.sleep(seconds)
        return
    with contextlib.ExitStack() as opened:
        ends = select.poll()
        for number in numbers:
            try:
                descriptor = os.pidfd_open(number)
            except ProcessLookupError:
                return
            opened.callback(os.close, descriptor)
            ends.register(descriptor, select.POLLIN)
        ends.poll(seconds * 1000)


def await_earlier_ranks(logs: Path) -> None:
    """Waits until no rank of an earlier start is left in a run folder.

    Args:
        logs: The folder of the ranks' notes, in a run folder whose lock is taken.

    Raises:
        RunFolderError: If one is still there after some seconds.
    """
    deadline = time.monotonic() + _END_SECONDS
    while left := [process for process in map(rank_process, logs.glob("rank_*.pid")) if process]:
        if time.monotonic() > deadline:
            numbers = " ".join(str(process.pid) for process in left)
            raise RunFolderError(
                f"ranks of an earlier start still run in {logs.parent}", fix=f"End them with: kill -9 {numbers}"
            )
        time.sleep(_POLL_SECONDS)

"""Starting ranks on this machine and watching them: one death ends all, and the first cause is told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from convmesh.config import RunConfig
from convmesh.engines import load_launcher
from convmesh.engines.contract import LaunchRequest
from convmesh.errors import ConvMeshError, LaunchError
from convmesh.mesh import Mesh
from convmesh.training.checkpoint import find_checkpoints
from convmesh.training.processes import STARTER, name_this_process, rank_process, wait_for_an_end
from convmesh.training.run_folder import RunFolder

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 8.0
_LOG_LINES = 12
_PORT_TAKEN = ("address already in use", "eaddrinuse", "port is already", "bind failed")
# What a rank reports when another one left it in the middle of a collective: a consequence, not a cause.
_CONSEQUENCES = ("connection closed", "connection reset", "connection refused", "broken pipe", "gloo", "nccl", "mccl",
                 "allreduce", "allgather", "timed out", "timeout", "distributed", "collective")  # fmt: skip


@dataclass(frozen=True)
class LaunchPlan:
    """How the ranks of a run are started.

    Args:
        command: The command line of msrun or torchrun.
        environment: Variables added to those of this process.
        num_ranks: Ranks that it starts.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    num_ranks: int

    def __str__(self) -> str:
        import shlex

        settings = [
            f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items()) if name != "PATH"
        ]
        return " ".join([*settings, shlex.join(self.command)])


def plan_launch(
    run: RunConfig,
    *,
    folder: RunFolder,
    mesh: Mesh,
    device: str,
    port: int | None = None,
    worker: str = "convmesh.training.worker",
) -> LaunchPlan:
    """Decides how the ranks of a run are started; starts nothing.

    Args:
        run: The run.
        folder: Its folder.
        mesh: Its mesh.
        device: Its resolved device.
        port: The port to meet at; a free one by default.
        worker: The module that every rank runs.

    Returns:
        The command line and environment.
    """
    num_threads = threads_per_rank(mesh.num_ranks)
    launcher = load_launcher(run.engine)
    command = (sys.executable, "-m", worker, str(folder.root), str(mesh), device, str(num_threads))
    request = LaunchRequest(
        num_ranks=mesh.num_ranks, port=port or free_port(), log_dir=folder.logs / "launcher", command=command
    )
    return LaunchPlan(
        command=tuple(launcher.command(request)),
        environment=dict(launcher.environment(num_threads=num_threads)),
        num_ranks=mesh.num_ranks,
    )


def threads_per_rank(num_local_ranks: int) -> int:
    """Threads for each rank: the cores of this machine divided by its ranks, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // num_local_ranks)


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(plan: LaunchPlan, *, folder: RunFolder, lasts: bool = True) -> None:
    """Starts the ranks and waits until all are done.

    Args:
        plan: How they are started.
        folder: The run folder, prepared.
        lasts: Whether the folder stays after an error. If not, errors tell the ends of logs instead of where they are.

    Raises:
        LaunchError: If the ranks can't be started, or one of them died; it tells the first cause.
        ConvMeshError: What the first failing rank could not do.
        KeyboardInterrupt: If the user stopped the run; all ranks have ended.
    """
    (folder.logs / "launcher").mkdir(exist_ok=True)
    with (folder.logs / "launcher.log").open("ab") as log:
        try:
            process = subprocess.Popen(
                plan.command,
                env={**os.environ, **plan.environment, STARTER: name_this_process()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{plan.command[0]} can't be started", got=error.strerror) from None
    watch = _Watch(process, folder, plan.num_ranks, lasts=lasts)
    with _stopped_by_signals():
        try:
            watch.wait()
        finally:
            watch.end_all()


class _Watch:
    """The processes of a run, found by the files in which ranks note their process number."""

    def __init__(self, process: subprocess.Popen[bytes], folder: RunFolder, num_ranks: int, *, lasts: bool) -> None:
        self._process = process
        self._lasts = lasts
        self._folder = folder
        self._num_ranks = num_ranks
        self._silent: list[int] = []

    def wait(self) -> None:
        """Returns when all ranks are done; raises the first cause if one is not."""
        while True:
            living = self._living()
            finished = self._process.poll() is not None
            if self._all_done() and not self._errors():
                self._settle()
                return
            self._silent = self._silent or self._silently_dead()
            if finished or self._silent or self._errors() or self._folder.scheduler_error.exists():
                break
            wait_for_an_end(living, seconds=_POLL_SECONDS)
        self._await_others()
        raise self._cause()

    def end_all(self) -> None:
        """Kills what still runs of the launcher and its ranks."""
        processes = [process for process in map(self._rank_process, range(self._num_ranks)) if process]
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            processes += [*parent.children(recursive=True), parent]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(processes, timeout=2)

    def _settle(self) -> None:
        # Every rank has written its last byte; the launcher only has to notice.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_GRACE_SECONDS)

    def _await_others(self) -> None:
        if self._folder.scheduler_error.exists() and not self._silent and not self._errors():
            return  # Nobody can join without it.
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None and not self._all_ended():
            if any(not _is_consequence(error) for error in self._errors().values()):
                return
            time.sleep(_POLL_SECONDS)

    def _rank_process(self, rank: int) -> psutil.Process | None:
        return rank_process(self._folder.rank_file(rank, "pid"))

    def _living(self) -> list[int]:
        ranks = filter(None, map(self._rank_process, range(self._num_ranks)))
        return [self._process.pid, *(rank.pid for rank in ranks)]

    def _is_done(self, rank: int) -> bool:
        return self._folder.rank_file(rank, "done").exists()

    def _all_done(self) -> bool:
        return all(self._is_done(rank) for rank in range(self._num_ranks))

    def _all_ended(self) -> bool:
        return all(self._rank_process(rank) is None for rank in range(self._num_ranks))

    def _silently_dead(self) -> list[int]:
        started = [rank for rank in range(self._num_ranks) if self._folder.rank_file(rank, "pid").exists()]
        dead = [rank for rank in started if self._rank_process(rank) is None and not self._is_done(rank)]
        # A rank can end between the two looks; only a second look at its note decides.
        return [rank for rank in dead if not self._is_done(rank)]

    def _errors(self) -> dict[int, dict[str, Any]]:
        errors = {}
        for rank in range(self._num_ranks):
            with contextlib.suppress(OSError, ValueError):
                errors[rank] = json.loads(self._folder.rank_file(rank, "error").read_text())
        return errors

    def _cause(self) -> ConvMeshError:
        errors = sorted(self._errors().items(), key=lambda item: item[1]["time"])
        causes = [(rank, error) for rank, error in errors if not _is_consequence(error)]
        if causes or (errors and not self._silent):
            rank, error = (causes or errors)[0]
            return self._rank_failed(rank, error)
        if self._silent:
            rank = self._silent[0]
            return LaunchError(
                f"rank {rank} died without a word, as a process does that is killed or runs out of memory",
                got=_tail(self._folder.rank_file(rank, "log")),
                fix=f"Free memory or use smaller micro-batches, then {self._again()}",
            )
        scheduler = self._folder.scheduler_error
        said = scheduler.read_text() if scheduler.exists() else _tail(self._folder.logs / "launcher.log")
        if said and any(sign in said.lower() for sign in _PORT_TAKEN):
            return LaunchError("the port at which the ranks meet was taken by another program", fix="Start again")
        fix = f"See the logs in {self._folder.logs}" if self._lasts else "Start again, or look at: convmesh doctor"
        return LaunchError("the ranks could not be started", got=said, fix=fix)

    def _again(self) -> str:
        """What goes on from the last checkpoint, or from the start where there is none, as in a profile."""
        goes_on = self._lasts and find_checkpoints(self._folder.checkpoints)
        return f"go on with --resume --run-dir {self._folder.root}" if goes_on else "start again"

    def _rank_failed(self, rank: int, error: dict[str, Any]) -> ConvMeshError:
        if error["code"] == ConvMeshError.exit_code:
            return LaunchError(f"rank {rank}: {error['message'].rstrip('.')}")
        log = self._folder.rank_file(rank, "log")
        failed = f"rank {rank} failed with {error['message'].rstrip('.')}"
        return LaunchError(failed, fix=f"Its log is {log}") if self._lasts else LaunchError(failed, got=_tail(log))


def _is_consequence(error: dict[str, Any]) -> bool:
    if error["type"] == "OtherRankError":
        return True
    text = error["message"].lower()
    return error["code"] != ConvMeshError.exit_code and any(sign in text for sign in _CONSEQUENCES)


def _tail(path: Path) -> str | None:
    try:
        lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return None
    return "its last lines:\n    " + "\n    ".join(lines) + "\n" if lines else None


@contextlib.contextmanager
def _stopped_by_signals() -> Any:
    """Lets SIGTERM and SIGHUP end a run as Ctrl-C does, so that no rank outlives its launcher."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    earlier = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)

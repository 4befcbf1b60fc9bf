"""Ranks as real processes, started once per test session and handed many cases.

A pool starts its ranks through the engine's own launcher (`torchrun`, `msrun`); each rank runs `rank_server`, connects
back over loopback and waits for cases. A case is a function ``case(engine, world, **kwargs)`` in a module of the tests.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from convmesh.engines import load_launcher
from convmesh.engines.contract import LaunchRequest
from convmesh.training.launch import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0


class RanksFailedError(Exception):
    """A case raised on a rank, a rank died, or the time was up; the message holds what the ranks said."""


class RankPool:
    """Ranks of one engine, alive until closed or until a case goes wrong.

    Args:
        engine_name: ``"mindspore"`` or ``"torch"``.
        num_ranks: Ranks to start, on the CPU.
        without: Variables of the launcher's environment that are left out.
        num_threads: Threads that each rank computes with.
    """

    def __init__(
        self, engine_name: str, num_ranks: int, *, without: Collection[str] = (), num_threads: int = 1
    ) -> None:
        self.engine_name = engine_name
        self.num_ranks = num_ranks
        self._without = without
        self._num_threads = num_threads
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._log = Path(self._folder.name) / "launcher.log"
        self._connections: dict[int, Connection] = {}
        key = secrets.token_bytes(16)
        with Listener(("127.0.0.1", 0), authkey=key) as listener:
            self._process = self._start(listener.address[1], key)
            try:
                self._accept(listener)
            except BaseException:
                self.close()
                raise

    @property
    def alive(self) -> bool:
        """Whether the pool can take a case."""
        return bool(self._connections) and self._process.poll() is None

    def run(self, case: str, *, timeout_seconds: float = 60.0, **kwargs: Any) -> list[Any]:
        """Runs a case on all ranks.

        Args:
            case: ``"package.module:function"``.
            timeout_seconds: Time for all ranks together.
            **kwargs: Arguments of the function; picklable.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RanksFailedError: If a rank raised, died or was not done in time. Ranks that only waited for a failed one
                are ended, so the pool is closed.
        """
        for connection in self._connections.values():
            connection.send((case, kwargs))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(results) + len(errors) < self.num_ranks:
            pending = {self._connections[r]: r for r in range(self.num_ranks) if r not in results and r not in errors}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(
                    f"{case} was not done after {timeout_seconds:g} s on ranks {sorted(pending.values())}", errors
                )
            for connection in ready:
                rank = pending[connection]  # type: ignore[index]
                try:
                    ok, value = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    ok, value = False, "the rank died"
                (results if ok else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + 5.0)  # The others may wait for the one that failed.
        if errors:
            self._fail(f"{case} failed", errors)
        return [results[rank] for rank in range(self.num_ranks)]

    def close(self) -> None:
        """Ends the ranks and the launcher."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(None)
            connection.close()
        if self._connections:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=15)
        self._connections = {}
        self._kill()
        self._folder.cleanup()

    def _start(self, port: int, key: bytes) -> subprocess.Popen[bytes]:
        launcher = load_launcher(self.engine_name)
        server = (
            sys.executable, "-m", "tests.multiprocess.rank_server", self.engine_name, str(port), str(self._num_threads),
        )  # fmt: skip
        request = LaunchRequest(
            num_ranks=self.num_ranks, port=free_port(), log_dir=Path(self._folder.name) / "logs", command=server
        )
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "CONVMESH_TEST_KEY": key.hex(),
            **{k: v for k, v in launcher.environment(num_threads=self._num_threads).items() if k not in self._without},
        }
        with self._log.open("wb") as log:
            return subprocess.Popen(
                launcher.command(request),
                cwd=self._folder.name,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _accept(self, listener: Listener) -> None:
        deadline = time.monotonic() + START_SECONDS
        listener._listener._socket.settimeout(0.5)  # type: ignore[attr-defined]
        while len(self._connections) < self.num_ranks:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RanksFailedError(f"{self.num_ranks} ranks did not start.\n{self._logs()}")
            try:
                connection = listener.accept()
            except TimeoutError:
                continue
            self._connections[connection.recv()] = connection

    def _fail(self, what: str, errors: dict[int, str]) -> None:
        texts = [f"--- rank {rank}\n{text}" for rank, text in sorted(errors.items())]
        message = "\n".join([what, *texts, *([] if texts else [self._logs()])])
        for connection in self._connections.values():
            connection.close()
        self._connections = {}
        self._kill()
        raise RanksFailedError(message)

    def _logs(self) -> str:
        files = [self._log, *sorted(Path(self._folder.name).rglob("*.log"))]
        return "\n".join(
            f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in dict.fromkeys(files)
        )

    def _kill(self) -> None:
        # torchrun puts every rank into a session of its own, so the launcher's process group does not hold them.
        import psutil

        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

"""The run folder: one run, one folder, one process that may write it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from convmesh.config import RunConfig, dump_config, load_config
from convmesh.errors import ConvMeshError, RunFolderError, raise_all
from convmesh.training.processes import await_earlier_ranks

# What may change when a run is resumed: how it is computed and watched, never what is computed.
_MAY_CHANGE = {
    "train": {
        "epochs",
        "device",
        "channels_last",
        "eval_every_epochs",
        "eval_batch",
        "log_every_steps",
        "checkpoint_every_steps",
        "keep",
        "check_sync_every",
        "max_updates",
        "profile",
        "sinks",
        "project",
    },
    "data": {"num_workers", "path", "on_error", "channels"},
}

_FREE_SPACE = "Free disk space or mend its permissions; what was saved before is intact"


class RunFolder:
    """Paths of a run folder and the lock that keeps a second run out.

    Args:
        root: The folder.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.config = self.root / "config.yaml"
        self.metrics = self.root / "metrics.jsonl"
        self.plan = self.root / "plan.yaml"
        self.summary = self.root / "summary.json"
        self.versions = self.root / "versions.json"
        self.checkpoints = self.root / "checkpoints"
        self.logs = self.root / "logs"
        self.report = self.root / "report.html"
        self.scheduler_error = self.logs / "scheduler.error"
        self._lock: IO[str] | None = None

    def prepare(self, run: RunConfig, *, resume: bool) -> None:
        """Makes the folder for a new run, or opens it for the same run to go on; takes the lock.

        Args:
            run: The run, as it shall be saved.
            resume: Whether the folder may hold an earlier part of this run.

        Raises:
            RunFolderError: If the folder holds another run, is in use, or can't be written.
            MistakeList: If a resumed run differs from the earlier one in several settings.
        """
        try:
            for folder in (self.root, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._accept(run, resume=resume)
            await_earlier_ranks(self.logs)
            for old in (*self.logs.glob("rank_*"), *self.logs.glob("*.error"), self.logs / "launcher.log"):
                old.unlink(missing_ok=True)
            self.summary.unlink(missing_ok=True)
            write_atomically(self.config, dump_config(run))
        except OSError as error:
            raise RunFolderError(
                f"the run folder {self.root} can't be written", got=error.strerror or str(error)
            ) from None

    def rank_file(self, rank: int, kind: str) -> Path:
        """The file in which a rank notes one kind of thing: log, pid, error, done."""
        return self.logs / f"rank_{rank}.{kind}"

    def release(self) -> None:
        """Gives the lock back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        self._lock = (self.root / "run.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise RunFolderError(
                f"another run is using the folder {self.root}", fix="Wait for it, or give another --run-dir"
            ) from None

    def _accept(self, run: RunConfig, *, resume: bool) -> None:
        if not self.config.exists():
            if resume:
                raise RunFolderError(
                    f"there is no run in {self.root} to resume", fix="Leave out --resume to start one there"
                )
            return
        if not resume:
            raise RunFolderError(
                f"the folder {self.root} already holds a run",
                fix="Add --resume to go on with it, or give another --run-dir",
            )
        try:
            earlier = load_config(self.config)
        except ConvMeshError as error:
            raise RunFolderError(f"the run in {self.root} can't be resumed", got=str(error)) from None
        raise_all(changed_settings(earlier, run))


def changed_settings(earlier: RunConfig, now: RunConfig) -> list[ConvMeshError]:
    """Lists the settings in which a resumed run may not differ from the earlier one, but does."""
    mistakes: list[ConvMeshError] = []
    for section in ("model", "data", "precision", "optimizer", "schedule", "train"):
        before, after = vars(getattr(earlier, section)), vars(getattr(now, section))
        for name, value in before.items():
            if name not in _MAY_CHANGE.get(section, set()) and after[name] != value:
                mistakes.append(
                    RunFolderError(
                        f"the setting '{section}.{name}' is not that of the run to resume",
                        got=after[name],
                        expected=value,
                        fix="Set it back, or start a new run in another --run-dir",
                    )
                )
    return mistakes


def default_run_dir(config_path: Path, *, resume: bool, parent: Path = Path("runs")) -> Path:
    """Names a run folder after the run file: a new one, or the newest one to resume.

    Raises:
        RunFolderError: If there is none to resume.
    """
    if not resume:
        return parent / f"{config_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    earlier = sorted(path.parent for path in parent.glob(f"{config_path.stem}-*/config.yaml"))
    if not earlier:
        raise RunFolderError(f"there is no run of {config_path.stem} in {parent} to resume", fix="Give its --run-dir")
    return earlier[-1]


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file so that a reader or a crash sees the old or the new one, never a part.

    Raises:
        RunFolderError: If it can't be written, as when the disk is full; the old file stays.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunFolderError(f"{path} can't be written", got=error.strerror or str(error), fix=_FREE_SPACE) from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a mapping as JSON, atomically."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")

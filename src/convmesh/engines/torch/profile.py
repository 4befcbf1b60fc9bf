"""PyTorch's own profiler on one rank; implements `convmesh.profiling.framework.FrameworkProfiler`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from convmesh.profiling.events import RankEvents
from convmesh.profiling.importing.kineto import KinetoImport


class TorchProfiler:
    """``torch.profiler``, of the CPU and of a GPU.

    Args:
        folder: Where the trace is kept, as ``rank_N.json.gz``.
        rank: Number of this rank.
        device: What this rank computes on.
    """

    def __init__(self, folder: Path, *, rank: int, device: torch.device) -> None:
        self._folder = folder
        self._rank = rank
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._device = device
        self._profile = profile(activities=activities, profile_memory=device.type == "cuda", acc_events=True)

    def start(self) -> None:
        """Begins to profile."""
        self._wait()
        self._profile.start()

    def step(self) -> None:
        """Does nothing: the recorder knows the steps."""

    def stop(self, noted: RankEvents) -> RankEvents:
        """Ends profiling and reads the trace back; times are in seconds since 1970."""
        self._wait()
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank_{self._rank}.json.gz"
        self._profile.export_chrome_trace(str(path))
        return KinetoImport(path, rank=self._rank, steps_of=noted).read()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

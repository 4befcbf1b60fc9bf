"""MindSpore's own profiler on one rank; implements `convmesh.profiling.framework.FrameworkProfiler`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore.profiler import ProfilerActivity, ProfilerLevel, profile, tensorboard_trace_handler

from convmesh.errors import ProfileError
from convmesh.profiling.events import RankEvents
from convmesh.profiling.importing.ascend import read_ascend
from convmesh.profiling.importing.mindspore_cpu import read_mindspore_cpu


class MindSporeProfiler:
    """``mindspore.profiler``, of the device that this rank computes on.

    Args:
        folder: Where its files are kept, in ``rank_N``.
        rank: Number of this rank.
        device: ``"cpu"``, ``"cuda"`` or ``"ascend"``.
    """

    def __init__(self, folder: Path, *, rank: int, device: str) -> None:
        self._folder = folder / f"rank_{rank}"
        self._rank = rank
        self._device = device
        self._profile: Any = None

    def start(self) -> None:
        """Begins to profile."""
        ms.runtime.synchronize()
        activities = {
            "cpu": [ProfilerActivity.CPU],
            "cuda": [ProfilerActivity.CPU, ProfilerActivity.GPU],
            "ascend": [ProfilerActivity.CPU, ProfilerActivity.NPU],
        }[self._device]
        self._profile = profile(
            activities=activities,
            start_profile=False,
            # The first level that writes communication.json; the argument has no public name.
            experimental_config=ms.profiler._ExperimentalConfig(profiler_level=ProfilerLevel.Level1),
            on_trace_ready=tensorboard_trace_handler(str(self._folder)),
        )
        self._profile.start()

    def step(self) -> None:
        """Marks the end of a step."""
        self._profile.step()

    def stop(self, noted: RankEvents) -> RankEvents:
        """Ends profiling and reads its files back; times are in seconds since 1970."""
        ms.runtime.synchronize()
        self._profile.stop()
        found = sorted(self._folder.glob("*_ascend_ms"))
        if not found:
            raise ProfileError("MindSpore's profiler has written nothing", expected=f"a folder in {self._folder}")
        if self._device == "cpu":
            return read_mindspore_cpu(found[-1], steps_of=noted)
        events, _ = read_ascend(found[-1], rank=self._rank)
        return events

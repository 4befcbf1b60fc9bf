"""What an engine's own profiler must do; `convmesh.engines.contract.Engine.profiler` makes one."""

from __future__ import annotations

from typing import Protocol

from convmesh.profiling.events import RankEvents


class FrameworkProfiler(Protocol):
    """An engine's own profiler, on one rank."""

    def start(self) -> None:
        """Begins to profile."""
        ...

    def step(self) -> None:
        """Marks the end of a step."""
        ...

    def stop(self, noted: RankEvents) -> RankEvents:
        """Ends profiling, waiting for the device.

        Args:
            noted: What the recorder noted meanwhile, in seconds since 1970; its steps are those of the result.

        Returns:
            What the profiler tells, on the same clock.

        Raises:
            ProfileError: If it tells nothing that can be read.
        """
        ...

"""Profiling within a run: which steps are kept, and where they go.

The recorder (`convmesh.profiling.recorder`) is always on; here a window of steps is kept event by event and written
into the run folder. With ``detail`` the engine's own profiler runs too and tells every operator; the steps, the waiting
for data and, on a CPU, the collectives are those of the recorder, which knows their axes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from convmesh.config.schema import ProfileConfig
from convmesh.engines.contract import Engine, World
from convmesh.engines.cores import cores
from convmesh.mesh import Mesh
from convmesh.profiling.breakdown import axes_of
from convmesh.profiling.events import About, RankEvents
from convmesh.profiling.framework import FrameworkProfiler
from convmesh.profiling.merging import merged
from convmesh.profiling.recorder import RECORDER
from convmesh.profiling.store import save_rank, write_index
from convmesh.training.hand_over import HAND_OVER

FOLDER = "profile"
"""Name of the profile's folder within a run folder."""


class StepProfiler:
    """Keeps the events of a window of steps on one rank.

    Args:
        config: The window.
        engine: A started engine.
        world: Where this rank stands.
        run_folder: The run folder.
        hand_over: Measures what it takes to get a micro-batch from a worker; None where the steps show it.
    """

    def __init__(
        self,
        config: ProfileConfig,
        *,
        engine: Engine,
        world: World,
        run_folder: Path,
        hand_over: Callable[[], float] | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._world = world
        self._folder = run_folder / FOLDER
        self._hand_over = hand_over
        self._framework: FrameworkProfiler | None = None
        self._wall = 0.0
        self._num_steps = 0
        self._cpu_begun = 0.0
        self._reading_cpu_seconds = 0.0

    def before_step(self, update: int) -> None:
        """Begins the window if this is its first step; all ranks call it before each update."""
        if update != self._config.start:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._engine.all_gather(None)  # Ranks begin together, so that the first step is like the others.
        if self._config.detail:
            self._framework = self._engine.profiler(self._folder / "traces", rank=self._world.rank)
            self._framework.start()
        self._wall = time.time() - RECORDER.now()
        self._cpu_begun = time.process_time()
        RECORDER.start()

    def add_reading(self, cpu_seconds: float) -> None:
        """Notes how much of the waiting for data this rank's own processor spent; the rest was a disk or a worker."""
        if RECORDER.keeps_events:
            self._reading_cpu_seconds += cpu_seconds

    def after_step(self, update: int, *, begun: float, num_samples: int) -> None:
        """Notes a step, and ends the window if it was its last one; all ranks call it after each update.

        Args:
            update: Number of the update.
            begun: When it began, in the recorder's seconds.
            num_samples: Samples that this rank computed.
        """
        if not RECORDER.keeps_events:
            return
        memory = self._engine.memory_bytes()
        self._num_steps += 1
        RECORDER.add_step(update, start=begun, end=RECORDER.now(), num_samples=num_samples, memory_bytes=memory)
        if self._framework is not None:
            self._framework.step()
        if update + 1 >= self._config.start + self._config.steps:
            self.close()

    def close(self) -> None:
        """Ends the window, whatever it holds, and writes it; all ranks call it."""
        if not RECORDER.keeps_events:
            return
        events = RECORDER.stop(self._world.rank)
        cpu_seconds = time.process_time() - self._cpu_begun, self._reading_cpu_seconds
        if self._framework is not None:
            events = merged(events.shifted(self._wall), self._framework.stop(events.shifted(self._wall)))
        save_rank(events, self._folder)
        of_rank = self._engine.all_gather((*cpu_seconds, self._hand_over() if self._hand_over is not None else 0.0))
        if self._world.rank == 0:
            source = f"{self._engine.name} on {self._world.device}" + (", operators" if self._config.detail else "")
            write_index(
                self._folder,
                ranks=range(self._world.num_ranks),
                about=About(
                    source=source,
                    engine=self._engine.name,
                    mesh=self._world.mesh.sizes,
                    figures=self._figures(of_rank),
                    remarks=unseen_axes(events, self._world.mesh),
                ),
            )

    def _figures(self, of_rank: Sequence[tuple[float, float, float]]) -> dict[str, float]:
        """Of the machine and, per step of an average rank, of its processors; of handing over a micro-batch."""
        times = max(1, self._num_steps) * len(of_rank)
        return {
            "cores": len(cores()),
            "local_ranks": self._world.num_local_ranks,
            "cpu_seconds": sum(whole for whole, _, _ in of_rank) / times,
            "reading_cpu_seconds": sum(reading for _, reading, _ in of_rank) / times,
            HAND_OVER: sum(seconds for _, _, seconds in of_rank) / len(of_rank),
            # A GPU or NPU works later than the host notes it.
            "host_times": float(self._world.device != "cpu" and not self._config.detail),
        }


def unseen_axes(events: RankEvents, mesh: Mesh) -> tuple[str, ...]:
    """A remark on each axis of which a rank has noted no collective."""
    seen = axes_of(events)
    return tuple(
        f"no collective of the axis '{axis}' was seen: where they run within a compiled graph they count as compute"
        for axis, size in mesh.sizes.items()
        if size > 1 and axis not in seen and "" not in seen
    )

"""What the recorder costs: updates with it off, on as in every run, and keeping every event, in turn on the same ranks.

Run from the repository: ``python -m benchmarks.profile_overhead``. Writes ``benchmarks/results/profile_overhead.md``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.contenders.recorder_modes import MODES, cpu_of
from benchmarks.contenders.work import Work
from tests.multiprocess.ranks import RankPool

from convmesh.engines import is_installed

RESULTS = Path(__file__).parent / "results" / "profile_overhead.md"
NUM_RANKS = 2
_MODULE = "benchmarks.contenders.recorder_modes"


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        title: Its row in the table.
        work: The network and its images.
        num_turns: How often each mode has its turn.
        num_updates: Updates of a turn.
    """

    title: str
    work: Work
    num_turns: int
    num_updates: int


CASES = (
    Case("cnn-small, 32 px, 8 images", Work("cnn-small", 32, 8, {}), 100, 3),
    Case("cnn-small, a bucket per gradient", Work("cnn-small", 32, 8, {"strategy": {"bucket_bytes": 1}}), 100, 3),
    Case("resnet18, 64 px, 8 images", Work("resnet18", 64, 8, {}), 40, 1),
)


@dataclass(frozen=True)
class Measured:
    """What a case took.

    Args:
        seconds: Of an update of the slowest rank by mode, turn by turn; under ``"mode cpu"`` the processor's, of all
            ranks together.
        num_notes: Notes of an update.
        note_seconds: Of a single note, by mode.
    """

    seconds: Mapping[str, Sequence[float]]
    num_notes: int
    note_seconds: Mapping[str, float]

    def added(self, mode: str, clock: Callable[[str], str] = str) -> tuple[float, float, float]:
        """Seconds that a mode adds, in percent: median of the turns, and the interval in which it lies by 95 %."""
        own_T, other_T = np.array(self.seconds[clock(mode)]), np.array(self.seconds[clock("off")])
        percent_T = 100 * (own_T / other_T - 1)
        drawn = np.random.default_rng(0).integers(0, len(percent_T), (2000, len(percent_T)))
        low, high = np.percentile(np.median(percent_T[drawn], axis=1), (2.5, 97.5))
        return float(np.median(percent_T)), float(low), float(high)

    def own_percent(self, mode: str) -> float:
        """What the notes of an update take by themselves, in percent of it."""
        return 100 * self.num_notes * self.note_seconds[mode] / statistics.median(self.seconds["off"])


def measure(pool: RankPool, case: Case) -> Measured:
    """Runs a case on a pool."""
    pool.run(f"{_MODULE}:prepare", name=case.title, work=case.work, timeout_seconds=120)
    said = pool.run(
        f"{_MODULE}:run", name=case.title, num_turns=case.num_turns, num_updates=case.num_updates, timeout_seconds=200
    )
    notes = pool.run(f"{_MODULE}:note_seconds")
    pool.run(f"{_MODULE}:drop", name=case.title)
    return Measured(
        seconds={
            name: [together(times) for times in zip(*(rank[name] for rank in said), strict=True)]
            for mode in MODES
            for name, together in ((mode, max), (cpu_of(mode), sum))
        },
        num_notes=round(max(statistics.median(rank["notes"]) for rank in said)),
        note_seconds={mode: max(rank[mode] for rank in notes) for mode in MODES[1:]},
    )


def row(engine: str, case: Case, found: Measured) -> str:
    """A row of the table."""
    cells = [engine, case.title, f"{found.num_notes}", f"{1e3 * statistics.median(found.seconds['off']):.2f}"]
    for mode in MODES[1:]:
        cells.append(f"{found.own_percent(mode):.3f} %")
        for clock in (str, cpu_of):
            added, low, high = found.added(mode, clock)
            cells.append(f"{added:+.1f} % ({low:+.1f} to {high:+.1f})")
    return f"| {' | '.join(cells)} |"


def page(rows: Sequence[str]) -> str:
    """The page of results."""
    engines = ("torch", "mindspore")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in engines if is_installed(name))
    return "\n".join(
        [
            "# What the recorder costs",
            "",
            f"{NUM_RANKS} ranks with one thread each. Updates with the recorder off, with it on as in every run (sums "
            "by kind), and keeping every event as within `train.profile` (on PyTorch each layer too), in turns of "
            "a few updates, in an order that changes from turn to turn. *Own*: notes by themselves, timed apart, "
            "without the hooks on layers that make some. *Time*: what an update of the slowest rank takes longer than "
            "with the recorder off in the same turn. *Processor*: the same of the processors' seconds of all ranks, "
            "in which waiting for a core does not count. Both are medians of the turns, with the interval in which "
            "that median lies by 95 %. Made by `python -m benchmarks.profile_overhead`.",
            "",
            "| engine | network, images per rank | notes per update | off, ms | on: own | time | processor "
            "| events: own | time | processor |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"Ran on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; {versions}; "
            f"Python {platform.python_version()}.",
            "",
        ]
    )


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["torch", "mindspore"])
    options = parser.parse_args()
    rows = []
    for engine in filter(is_installed, options.engines):
        pool = RankPool(engine, NUM_RANKS)
        try:
            for case in CASES:
                rows.append(row(engine, case, measure(pool, case)))
                print(rows[-1], flush=True)
        finally:
            pool.close()
    RESULTS.write_text(page(rows), "utf-8")
    print(f"Written to {RESULTS}")


if __name__ == "__main__":
    main()

"""A profile of 256 ranks and 100 steps, analysed and reported in a process of its own: seconds and memory.

Run from the repository: ``python -m benchmarks.profile_scale``. Writes ``benchmarks/results/profile_scale.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.contenders.generated_profile import Recipe, generate

from convmesh.profiling.analysis import analyse
from convmesh.profiling.store import load_trace, save_trace
from convmesh.report.profile_page import TRACE_NAME, write_profile_page

RESULTS = Path(__file__).parent / "results" / "profile_scale.md"
SLOW_RANK = 77


def recipe(num_ranks: int, num_steps: int, num_layers: int) -> Recipe:
    """A run on data x channel of which one rank computes longer."""
    return Recipe(
        mesh={"data": num_ranks // 8, "channel": 8},
        num_steps=num_steps,
        num_layers=num_layers,
        extra_compute={SLOW_RANK: 0.1},
        jitter=0.01,
        warmup=2.0,
    )


def measure(folder: Path) -> dict[str, Any]:
    """Reads, analyses and reports a profile."""
    begun = time.perf_counter()
    trace = load_trace(folder)
    read = time.perf_counter()
    analysis = analyse(trace)
    analysed = time.perf_counter()
    page = write_profile_page(analysis, folder)
    written = time.perf_counter()
    return {
        "num_events": sum(events.num_events for events in trace.ranks),
        "read_seconds": read - begun,
        "analyse_seconds": analysed - read,
        "write_seconds": written - analysed,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "page_bytes": page.stat().st_size,
        "trace_bytes": (folder / TRACE_NAME).stat().st_size if (folder / TRACE_NAME).exists() else 0,
        "named": [[*straggler.ranks, straggler.phase] for straggler in analysis.stragglers],
    }


def page(found: dict[str, Any], *, num_ranks: int, num_steps: int, num_layers: int, folder_bytes: int) -> str:
    """The page of results."""
    named = ", ".join(f"rank {ranks[0]} for {phase}" for *ranks, phase in found["named"])
    seconds = {name: found[f"{name}_seconds"] for name in ("read", "analyse", "write")}
    trace = f"{found['trace_bytes'] / 1e6:.0f} MB" if found["trace_bytes"] else "left out, too large for its viewer"
    return "\n".join(
        [
            "# A large profile",
            "",
            f"{num_ranks} ranks, {num_steps} steps, {num_layers} layers, a collective per layer and axis: "
            f"{found['num_events']:,} events in {folder_bytes / 1e6:.0f} MB of files, generated. Rank {SLOW_RANK} "
            f"computes longer; named: {named}. Made by `python -m benchmarks.profile_scale`.",
            "",
            "| read | analyse | write page and trace | together | memory at most | page | trace for Perfetto |",
            "|---|---|---|---|---|---|---|",
            f"| {seconds['read']:.1f} s | {seconds['analyse']:.1f} s | {seconds['write']:.1f} s "
            f"| {sum(seconds.values()):.1f} s | {found['peak_bytes'] / 1e9:.2f} GB "
            f"| {found['page_bytes'] / 1e3:.0f} kB | {trace} |",
            "",
            f"Ran on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; NumPy {np.__version__}; "
            f"Python {platform.python_version()}.",
            "",
        ]
    )


def main() -> None:
    """Measures and writes; with a folder it measures in this process and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--measure", type=Path, help="a profile to measure in this process")
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure)))
        return
    sizes = {"num_ranks": options.ranks, "num_steps": options.steps, "num_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        save_trace(generate(recipe(**sizes)), Path(folder))
        folder_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        command = [sys.executable, "-m", "benchmarks.profile_scale", "--measure", folder]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    RESULTS.write_text(page(json.loads(said), **sizes, folder_bytes=folder_bytes), "utf-8")
    print(RESULTS.read_text("utf-8"))


if __name__ == "__main__":
    main()

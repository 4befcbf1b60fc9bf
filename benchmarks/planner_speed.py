"""How long planning takes, and how much memory: each case in a fresh process, with the graph in the cache.

Run: ``python -m benchmarks.planner_speed``. Writes ``benchmarks/results/planner_speed.md``; with ``--cases`` it
measures some of them and only prints.

*Tight* means that a rank may fill less than plain data parallelism needs, so that micro-batches, recomputation and
splits have to be searched; in the last case nothing fits, and all that there is has to be ruled out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "planner_speed.md"
CASES = (
    ("ResNet-152, traced anew", "trace", 8, 512, "a100-8x16", ""),
    ("ResNet-152", "resnet152", 8, 512, "a100-8x16", ""),
    ("ResNet-152, 4 GiB a rank", "resnet152", 8, 512, "a100-8x16", "4GiB"),
    ("ResNet-152", "resnet152", 128, 1024, "a100-8x16", ""),
    ("ResNet-152", "resnet152", 1024, 4096, "a100-8x16", ""),
    ("2,040 operators like DenseNet's", "dense", 8, 256, "a100-8", ""),
    ("the same, tight: 8 GiB a rank", "dense", 8, 256, "a100-8", "8GiB"),
    ("the same, tight: 2 GiB a rank", "dense", 8, 256, "a100-8", "2GiB"),
    ("the same, 1.2 GiB a rank", "dense", 8, 256, "a100-8", "1200MiB"),
)


def measure(case: int) -> dict[str, float | str]:
    """Plans one case in this process."""
    from convmesh.planner.cluster_file import load_cluster
    from convmesh.planner.prediction import Training
    from convmesh.planner.pricing import Pricer
    from convmesh.planner.search import search
    from convmesh.planner.seconds import CostModel
    from convmesh.training.auto_plan import describe
    from convmesh.units import parse_bytes

    _, network, num_ranks, global_batch, cluster, memory = CASES[case]
    graph = graph_of(network)
    begun, cpu = time.perf_counter(), time.process_time()
    if network == "trace":
        graph = graph_of("fresh")
    pricer = Pricer(
        graph, Training(global_batch=global_batch), CostModel(load_cluster(cluster)), bucket_bytes=25 * 2**20
    )
    found = search(pricer, num_ranks=num_ranks, memory_bytes=parse_bytes(memory) if memory else None)
    return {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "frameworks": ", ".join(name for name in ("torch", "mindspore") if name in sys.modules) or "none",
        "plan": "nothing fits" if found.chosen is None else describe(found.chosen),
    }


def graph_of(network: str) -> object:
    """The graph of a case, from the cache except for ``"fresh"``."""
    from convmesh.config import load_config
    from convmesh.training.run_graph import cached_graph, read_graph

    if network == "dense":
        from tests.graph_builder import dense_net

        return dense_net(58, num_blocks=5, size=32, growth=12)
    run = load_config(Path(__file__).parents[1] / "examples" / "resnet152_imagenet.yaml", overrides=("engine=torch",))
    read = read_graph if network == "fresh" else cached_graph
    return read(run, batch=2, image_shape_HWC=(224, 224, 3), num_classes=1000)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures cases, and writes the table if it was all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner_speed", description=__doc__)
    names = "; ".join(f"{number}: {name}, {ranks} ranks" for number, (name, _, ranks, *_) in enumerate(CASES))
    parser.add_argument("--cases", type=int, nargs="+", metavar="N", help=f"only these, printed: {names}")
    parser.add_argument("--one", type=int, metavar="N", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    numbers = range(len(CASES)) if chosen.cases is None else chosen.cases
    if any(not 0 <= number < len(CASES) for number in numbers):
        parser.error(f"there are the cases 0 to {len(CASES) - 1}")
    if chosen.one is not None:
        print(json.dumps(measure(chosen.one)))
        return
    rows = []
    for number in numbers:
        name, _, num_ranks, global_batch, cluster, _ = CASES[number]
        command = [sys.executable, "-m", "benchmarks.planner_speed", "--one", str(number)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append(
            f"| {name} | {num_ranks:,} | {global_batch:,} | {cluster} | {found['seconds']:.1f} | "
            f"{found['cpu_seconds']:.1f} | {found['peak_mib']:.0f} MiB | {found['frameworks']} | {found['plan']} |"
        )
        print(rows[-1], flush=True)
    if chosen.cases is None:
        RESULTS.write_text(_page(rows), encoding="utf-8")


def _page(rows: Sequence[str]) -> str:
    text = f"""# Planning

Each case in a fresh process, once, by `python -m benchmarks.planner_speed`; other work may share the cores, so seconds
of the processor stand beside those of the clock. Time starts with the graph in memory, but for the first row, which
reads the network with PyTorch; memory is that of the whole process. Where a rank may fill less than plain data
parallelism needs (*tight*), micro-batches, recomputation and splits have to be searched; in the last case nothing fits,
and all that there is has to be ruled out.

Python {platform.python_version()}, SciPy {version("scipy")}, NumPy {version("numpy")}, {os.cpu_count()} cores.

| network | devices | global batch | cluster | seconds | of processor | peak memory | frameworks loaded | plan |
|---|---|---|---|---|---|---|---|---|
"""
    return text + "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()

"""Images per second of data-parallel training: ConvMesh against what users of PyTorch and MindSpore write themselves.

Contenders take turns (A B A B ...) in one run, so that a slow minute of the machine hits both of them. Run from the
repository: ``python -m benchmarks.data_parallel``; ``--explore`` also measures ConvMesh with single settings changed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contenders.work import Work
from tests.multiprocess.ranks import RankPool

from convmesh.engines import is_installed

RESULTS = Path(__file__).parent / "results" / "data_parallel.md"
NUM_RANKS = 2
_TABLE = ("| | images/s | ratio | images per second of processor time | ratio |", "|---|---|---|---|---|")


OUR_ENVIRONMENT = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""What ConvMesh's launcher sets and a user's torchrun or msrun does not."""


@dataclass(frozen=True)
class Contender:
    """Something that trains.

    Args:
        title: Its row in the table.
        module: Module of its rank functions ``prepare``, ``run`` and ``drop``.
        kind: What ``prepare`` builds: "convmesh" or "plain".
        changes: Sections of the run file that differ.
    """

    title: str
    module: str
    kind: str
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)


RIVALS = {
    "torch": (
        Contender("ConvMesh on PyTorch", "benchmarks.contenders.torch_ranks", "convmesh"),
        Contender("plain PyTorch DDP", "benchmarks.contenders.torch_ranks", "plain"),
    ),
    "mindspore": (
        Contender("ConvMesh on MindSpore", "benchmarks.contenders.mindspore_ranks", "convmesh"),
        Contender("stock MindSpore data_parallel", "benchmarks.contenders.mindspore_ranks", "plain"),
    ),
}
"""Engine to ConvMesh and its rival on that engine; an engine whose module does not exist is left out."""

VARIANTS = {
    "contiguous memory format": {"train": {"channels_last": False}},
    "bfloat16 gradients": {"precision": {"gradient_reduction": "bfloat16"}},
    "float16 gradients": {"precision": {"gradient_reduction": "float16"}},
    "5 MiB buckets": {"strategy": {"bucket_bytes": 5 * 2**20}},
    "one bucket": {"strategy": {"bucket_bytes": 2**30}},
    "sharded optimizer": {"strategy": {"optimizer_sharding": True}},
    "bfloat16 compute": {"precision": {"compute": "bfloat16"}},
    "bfloat16 compute and gradients": {"precision": {"compute": "bfloat16", "gradient_reduction": "bfloat16"}},
}
"""Single changes to ConvMesh on PyTorch."""


@dataclass(frozen=True)
class Duel:
    """Images per second of two contenders, round by round.

    Args:
        titles: Their names.
        rates: By the clock.
        cpu_rates: By the processor's time of all ranks, which other work on the machine disturbs less.
    """

    titles: tuple[str, str]
    rates: tuple[list[float], list[float]]
    cpu_rates: tuple[list[float], list[float]]

    def rows(self) -> Iterator[str]:
        """Two rows of a Markdown table: medians and ranges of rate and ratio, by clock and by processor time."""
        for place, title in enumerate(self.titles):
            cells = [title]
            for rates in (self.rates, self.cpu_rates):
                ratios = [own / other for own, other in zip(rates[place], rates[1], strict=True)]
                cells += [spread(rates[place], 1), spread(ratios, 3) if place == 0 else "1"]
            yield f"| {' | '.join(cells)} |"


def spread(values: Sequence[float], digits: int) -> str:
    """Median and range."""
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def duel(
    pools: tuple[RankPool, RankPool],
    contenders: tuple[Contender, Contender],
    *,
    work: Work,
    num_rounds: int,
    num_updates: int,
) -> Duel:
    """Runs two contenders in turn, each on ranks of its pool, while the other's wait; who begins a round alternates."""
    names = ("first", "second")
    pool_of = dict(zip(names, pools, strict=True))
    module = contenders[0].module
    for name, contender in zip(names, contenders, strict=True):
        changed = Work(work.network, work.image_size, work.batch, contender.changes)
        pool_of[name].run(f"{module}:prepare", timeout_seconds=600, contender=contender.kind, name=name, work=changed)
    rates: dict[str, list[float]] = {name: [] for name in names}
    cpu_rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            answers = pool_of[name].run(f"{module}:run", timeout_seconds=600, name=name, num_updates=num_updates)
            num_images = work.batch * NUM_RANKS * num_updates
            rates[name].append(num_images / max(seconds for seconds, _ in answers))
            cpu_rates[name].append(num_images / max(cpu_seconds for _, cpu_seconds in answers))
    for name in names:
        pool_of[name].run(f"{module}:drop", name=name)
    return Duel(
        (contenders[0].title, contenders[1].title),
        (rates["first"], rates["second"]),
        (cpu_rates["first"], cpu_rates["second"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=4, help="updates of each contender per round")
    parser.add_argument("--batch", type=int, default=16, help="samples per rank")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--explore", action="store_true", help="also measure single changes to ConvMesh")
    parser.add_argument("--engines", nargs="*", default=list(RIVALS), choices=list(RIVALS))
    options = parser.parse_args()
    work = Work(options.network, options.image_size, options.batch, {})
    settings = {"work": work, "num_rounds": options.rounds, "num_updates": options.updates}
    lines = [*_header(work, options.rounds, options.updates), "", *_TABLE]
    for engine, (ours, rival) in RIVALS.items():
        if engine not in options.engines or not is_installed(engine) or not _exists(ours.module):
            continue
        pool = RankPool(engine, NUM_RANKS)
        rival_pool = RankPool(engine, NUM_RANKS, without=OUR_ENVIRONMENT)
        try:
            lines += _show(duel((pool, rival_pool), (ours, rival), **settings).rows())
            if options.explore and engine == "torch":
                lines += ["", "ConvMesh on PyTorch with one change, against itself without:", ""]
                lines += _TABLE
                for title, changes in VARIANTS.items():
                    changed = Contender(title, ours.module, ours.kind, changes)
                    lines += _show(list(duel((pool, pool), (changed, ours), **settings).rows())[:1])
        finally:
            pool.close()
            rival_pool.close()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines) + "\n")
    print(f"Written to {RESULTS}")


def _exists(module: str) -> bool:
    return (Path(__file__).parents[1] / (module.replace(".", "/") + ".py")).exists()


def _show(rows: Iterator[str] | list[str]) -> list[str]:
    kept = list(rows)
    print("\n".join(kept), flush=True)
    return kept


def _header(work: Work, num_rounds: int, num_updates: int) -> list[str]:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in RIVALS if is_installed(name))
    return [
        "# Data parallel training",
        "",
        f"{work.network} at {work.image_size} px, {work.batch} images per rank and update, {NUM_RANKS} ranks with one "
        f"thread each, SGD with momentum, float32. Contenders take turns: {num_rounds} "
        f"rounds of {num_updates} updates each; medians, with the range in brackets. The ratio is that of the rounds, "
        "against the rival below it.",
        "",
        f"Ran on: {_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start; {versions}; "
        f"Python {platform.python_version()}.",
    ]


def _processor() -> str:
    try:
        output = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in output.splitlines() if line.startswith("Model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()

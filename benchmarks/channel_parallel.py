"""Memory per rank and seconds per step of networks split along channels, against one device and data parallel.

One run measures one engine, network and number of ranks; its contenders take turns, so that a slow minute of the
machine hits all of them. What it finds is added to a file, from which the page of results is made. Run from the
repository: ``python -m benchmarks.channel_parallel --engine torch --network resnet50 --ranks 2``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contenders.channel_work import Memory, Network, Seconds
from benchmarks.data_parallel import spread
from tests.multiprocess.ranks import RankPool

RESULTS = Path(__file__).parent / "results" / "channel_parallel.md"
RECORDS = RESULTS.with_suffix(".jsonl")
NETWORKS = (
    Network("ResNet-50", "resnet50", image_size=128, global_batch=4),
    Network("Four convolutions of 32 channels", "wide_field", image_size=512, global_batch=2),
)
GOALS = {2: 0.6, 4: 0.35}
"""Ranks of the channel axis to the largest share of one device's activations."""
WITHIN = 1.15
"""Most that a step may take of its computation and its collectives, each on its own."""
AS_ONE_DEVICE = 1.3
"""Most that a step on PyTorch may take of one device's with the same cores."""

_MODULES = {
    "torch": "benchmarks.contenders.channel_ranks",
    "mindspore": "benchmarks.contenders.mindspore_channel_ranks",
}


@dataclass(frozen=True)
class Contender:
    """Ranks along one axis.

    Args:
        axis: "data" or "channel"; "one" for one device.
        num_ranks: Ranks.
        num_threads: Threads of each rank.
    """

    axis: str
    num_ranks: int = 1
    num_threads: int = 1

    @property
    def title(self) -> str:
        """Its row in the table."""
        if self.axis != "one":
            return f"{self.axis}={self.num_ranks}"
        return f"one device, {self.num_threads} thread{'s' if self.num_threads > 1 else ''}"

    def fits(self, network: Network) -> bool:
        """Whether every rank gets a sample."""
        return self.axis != "data" or network.global_batch % self.num_ranks == 0


def contenders(num_ranks: int) -> tuple[Contender, ...]:
    """One device with all cores, and ranks along either axis."""
    one = Contender("one", num_threads=os.cpu_count() or 1)
    return one, Contender("data", num_ranks), Contender("channel", num_ranks)


@dataclass
class Measured:
    """What was measured of a contender.

    Args:
        memory: Of each rank.
        seconds: Of the rank with the slowest step, round by round.
    """

    memory: list[Memory]
    seconds: list[Seconds] = field(default_factory=list)

    def most(self, name: str) -> int:
        """The largest value of a kind of memory over the ranks."""
        return max(int(getattr(memory, name)) for memory in self.memory)


def measure(
    network: Network, able: Sequence[Contender], *, num_rounds: int, num_steps: int, engine: str = "torch"
) -> dict[Contender, Measured]:
    """Trains a network on all contenders in turn.

    Args:
        network: What is trained.
        able: Contenders that can train it.
        num_rounds: How often each gets its turn.
        num_steps: Steps of a turn.
        engine: The engine.

    Returns:
        What was measured of each.
    """
    found: dict[Contender, Measured] = {}
    with ExitStack() as stack:
        pools: dict[Contender, RankPool] = {}
        for contender in able:
            pool = pools[contender] = RankPool(engine, contender.num_ranks, num_threads=contender.num_threads)
            stack.callback(pool.close)
            memory = pool.run(
                f"{_MODULES[engine]}:prepare",
                timeout_seconds=600,
                network=network,
                axis=contender.axis,
                num_threads=contender.num_threads,
            )
            found[contender] = Measured(memory)
        for number in range(num_rounds):
            for contender in list(pools) if number % 2 == 0 else list(pools)[::-1]:
                seconds = pools[contender].run(f"{_MODULES[engine]}:run", timeout_seconds=600, num_steps=num_steps)
                found[contender].seconds.append(max(seconds, key=lambda entry: entry.step))
    return found


def section(network: Network, found: dict[Contender, Measured]) -> Iterator[str]:
    """Markdown of one network; everything is compared with one device that has the same cores."""
    alone = next(measured for contender, measured in found.items() if contender.axis == "one")
    base = [entry.step for entry in alone.seconds]
    yield (
        "| | parameters | optimizer | activations | of one device's | resident | of one device's | seconds per step "
        "| ratio | computation | collectives alone | step of both |"
    )
    yield "|" + "---|" * 12
    for contender, measured in found.items():
        sizes = {name: measured.most(f"{name}_bytes") for name in ("parameter", "optimizer", "saved", "resident")}
        steps = [entry.step for entry in measured.seconds]
        cells = [
            contender.title,
            _mib(sizes["parameter"]),
            _mib(sizes["optimizer"]),
            _mib(sizes["saved"]) if sizes["saved"] else "",
            f"{sizes['saved'] / alone.most('saved_bytes'):.3f}" if sizes["saved"] else "",
            _mib(sizes["resident"]),
            f"{sizes['resident'] / alone.most('resident_bytes'):.2f}",
            spread(steps, 2),
            "1" if measured is alone else spread([own / other for own, other in zip(steps, base, strict=True)], 2),
            *_parts(contender, measured),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for contender, measured in found.items():
        if contender.axis == "channel":
            yield from _verdicts(contender, measured, alone)


def _parts(contender: Contender, measured: Measured) -> Iterator[str]:
    if contender.axis != "channel":
        yield from ("", "", "")
        return
    wire = statistics.median(entry.wire for entry in measured.seconds)
    yield spread([entry.compute for entry in measured.seconds], 2)
    yield f"{wire:.3f} for {_mib(measured.most('sent_bytes'))}"
    yield spread(_shares(measured), 2)


def _shares(measured: Measured) -> list[float]:
    return [entry.step / (entry.compute + entry.wire) for entry in measured.seconds]


def _verdicts(contender: Contender, measured: Measured, alone: Measured) -> Iterator[str]:
    def verdict(what: str, value: float, most: float) -> str:
        return f"- {contender.title}: {what} {value:.3f}, at most {most}: {'reached' if value <= most else 'missed'}."

    goal = GOALS.get(contender.num_ranks)
    if goal is not None:
        kind = "saved" if alone.most("saved_bytes") else "resident"
        what = "activations" if kind == "saved" else "resident memory"
        yield verdict(f"{what} of one device's", measured.most(f"{kind}_bytes") / alone.most(f"{kind}_bytes"), goal)
    yield verdict("step of computation and collectives", statistics.median(_shares(measured)), WITHIN)
    ratios = [own.step / one.step for own, one in zip(measured.seconds, alone.seconds, strict=True)]
    yield verdict("step of one device's", statistics.median(ratios), AS_ONE_DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(_MODULES), default="torch")
    parser.add_argument("--network", choices=[network.name for network in NETWORKS], default="resnet50")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="steps of each contender per round")
    options = parser.parse_args()
    network = next(entry for entry in NETWORKS if entry.name == options.network)
    able = [contender for contender in contenders(options.ranks) if contender.fits(network)]
    load = _load()
    found = measure(network, able, num_rounds=options.rounds, num_steps=options.steps, engine=options.engine)
    record = {
        "title": f"{options.engine}: {network.title}, {network.image_size} px, global batch {network.global_batch}, "
        f"{options.ranks} ranks",
        "ran_on": f"{os.cpu_count()} cores, {options.engine} {importlib.metadata.version(options.engine)}, load {load} "
        f"at the start and {_load()} at the end, {options.rounds} rounds of {options.steps} step(s)",
        "lines": list(section(network, found)),
        "measured": {
            contender.title: {
                "memory": [dataclasses.asdict(entry) for entry in measured.memory],
                "seconds": [dataclasses.asdict(entry) for entry in measured.seconds],
            }
            for contender, measured in found.items()
        },
    }
    print("\n".join([record["title"], record["ran_on"], *record["lines"]]), flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    with RECORDS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    RESULTS.write_text("\n".join(page([json.loads(line) for line in RECORDS.read_text().splitlines()])) + "\n")
    print(f"Written to {RESULTS}")


def page(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The page of results: the latest of each engine, network and number of ranks."""
    yield from _HEADER
    for title, record in sorted({record["title"]: record for record in records}.items()):
        yield from ("", f"## {title}", "", f"Ran on: {record['ran_on']}.", "", *record["lines"])


_HEADER = (
    "# Channel parallel training",
    "",
    "One device is the engine itself in one process with as many threads as there are cores; data is "
    "DistributedDataParallel, or on MindSpore `convmesh.reduce_gradients`; channel is `convmesh.parallelize` with the "
    "plan by rule, ranks with one thread each. float32, SGD with momentum, the same global batch everywhere; PyTorch "
    "in channels-last order. Memory is that of the rank with the most. Activations: what the forward keeps for the "
    "backward, counted by PyTorch's saved-tensor hooks; MindSpore does not tell. Resident: most that the process held "
    "over what it held before it built the network; also what a step holds for a moment, like a whole tensor gathered "
    "for one layer, and what kernels keep for themselves. No allocator counts on the CPU.",
    "",
    "Computation is a step whose collectives do nothing, on all ranks at once; collectives alone are those of one "
    "step, recorded and repeated one after the other, which is their bytes over their bandwidth at their sizes. Both "
    "took turns with the step. Step of both is the step's share of their sum. The ratio is that to one device with the "
    "same cores. Medians, with ranges in brackets. Made by `python -m benchmarks.channel_parallel` with `--engine`, "
    "`--network` and `--ranks`.",
)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()

"""Memory per rank and seconds per step of networks split along channels, against one device and data parallel.

All ranks of a network are started at once and take turns, so that a slow minute of the machine hits all of them. Run
from the repository: ``python -m benchmarks.channel_parallel``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.contenders.channel_ranks import Memory, Network
from benchmarks.data_parallel import spread
from tests.multiprocess.ranks import RankPool

RESULTS = Path(__file__).parent / "results" / "channel_parallel.md"
NETWORKS = (
    Network("ResNet-50", "resnet50", image_size=128, global_batch=4),
    Network("Four convolutions of 32 channels", "wide_field", image_size=512, global_batch=2),
)
GOALS = {2: 0.6, 4: 0.35}
"""Ranks of the channel axis to the largest share of one device's activations."""

_MODULE = "benchmarks.contenders.channel_ranks"


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


CONTENDERS = (
    Contender("one"),
    Contender("one", num_threads=2),
    Contender("data", 2),
    Contender("data", 4),
    Contender("channel", 2),
    Contender("channel", 4),
)


@dataclass
class Measured:
    """What was measured of a contender.

    Args:
        memory: Of each rank.
        seconds: Per step of the slowest rank, round by round.
    """

    memory: list[Memory]
    seconds: list[float] = field(default_factory=list)

    def most(self, name: str) -> int:
        """The largest value of a kind of memory over the ranks."""
        return max(int(getattr(memory, name)) for memory in self.memory)


def measure(
    network: Network, contenders: Sequence[Contender], *, num_rounds: int, num_steps: int
) -> dict[Contender, Measured]:
    """Trains a network on all contenders in turn.

    Args:
        network: What is trained.
        contenders: Those that can train it.
        num_rounds: How often each gets its turn.
        num_steps: Steps of a turn.

    Returns:
        What was measured of each.
    """
    found: dict[Contender, Measured] = {}
    with ExitStack() as stack:
        pools: dict[Contender, RankPool] = {}
        for contender in contenders:
            pool = pools[contender] = RankPool("torch", contender.num_ranks)
            stack.callback(pool.close)
            memory = pool.run(
                f"{_MODULE}:prepare",
                timeout_seconds=600,
                network=network,
                axis=contender.axis,
                num_threads=contender.num_threads,
            )
            found[contender] = Measured(memory)
        for number in range(num_rounds):
            for contender in list(pools) if number % 2 == 0 else list(pools)[::-1]:
                seconds = pools[contender].run(f"{_MODULE}:run", timeout_seconds=600, num_steps=num_steps)
                found[contender].seconds.append(max(seconds))
    return found


def section(network: Network, found: dict[Contender, Measured]) -> Iterator[str]:
    """Markdown of one network; the faster way to use one device is what others are compared with."""
    ways = [measured for contender, measured in found.items() if contender.axis == "one"]
    alone = min(ways, key=lambda measured: statistics.median(measured.seconds))
    yield f"## {network.title}, {network.image_size} px, global batch {network.global_batch}"
    yield ""
    yield (
        "| | parameters | optimizer | activations | of one device's | resident | of one device's "
        "| seconds per step | ratio | into collectives per step |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for contender, measured in found.items():
        sizes = {name: measured.most(f"{name}_bytes") for name in ("parameter", "optimizer", "saved", "resident")}
        ratios = [own / other for own, other in zip(measured.seconds, alone.seconds, strict=True)]
        cells = [
            contender.title,
            _mib(sizes["parameter"]),
            _mib(sizes["optimizer"]),
            _mib(sizes["saved"]),
            f"{sizes['saved'] / alone.most('saved_bytes'):.3f}",
            _mib(sizes["resident"]),
            f"{sizes['resident'] / alone.most('resident_bytes'):.2f}",
            spread(measured.seconds, 2),
            spread(ratios, 2) if measured is not alone else "1",
            _mib(measured.most("sent_bytes")) if contender.axis == "channel" else "",
        ]
        yield f"| {' | '.join(cells)} |"
    for contender in CONTENDERS:
        if not contender.fits(network):
            yield f"| {contender.title} | not possible: {network.global_batch} samples |{' |' * 8}"
    yield ""
    for contender, measured in found.items():
        if contender.axis == "channel" and contender.num_ranks in GOALS:
            share, goal = measured.most("saved_bytes") / alone.most("saved_bytes"), GOALS[contender.num_ranks]
            verdict = "reached" if share <= goal else "missed"
            yield f"- Goal for {contender.title}: at most {goal} of one device's activations; {share:.3f}: {verdict}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="steps of each contender per round")
    options = parser.parse_args()
    lines = _header(options.rounds, options.steps)
    for network in NETWORKS:
        able = [contender for contender in CONTENDERS if contender.fits(network)]
        found = measure(network, able, num_rounds=options.rounds, num_steps=options.steps)
        part = ["", *section(network, found)]
        print("\n".join(part), flush=True)
        lines += part
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text("\n".join([*lines, "", _load("end"), ""]))
    print(f"Written to {RESULTS}")


def _header(num_rounds: int, num_steps: int) -> list[str]:
    return [
        "# Channel parallel training",
        "",
        "One device is plain PyTorch in one process; data is DistributedDataParallel, channel is "
        "`convmesh.parallelize` with the plan by rule, ranks with one thread each. float32, channels-last, SGD with "
        "momentum, the same global batch everywhere. Memory is that of the rank with the most. Activations: what the "
        "forward keeps for the backward, counted by saved-tensor hooks. Resident: most that the process held over "
        "what it held before it built the network; also what a step holds for a moment, like a whole tensor gathered "
        "for one layer and the buffers of collectives. Into collectives: bytes that a rank gives to those of the "
        "channel axis. PyTorch on the CPU has no counting allocator. "
        f"{num_rounds} rounds of {num_steps} step(s) in turn; medians, with the range in brackets. The ratio is that "
        "of the rounds, against the faster of the two ways to use one device. "
        "Made by `python -m benchmarks.channel_parallel`.",
        "",
        "The times are of small sizes on a small machine: four ranks share two cores, collectives go through Gloo "
        "over loopback and take processor time from the computation, and other work ran on the machine, from which two "
        "threads that wait for each other suffer most.",
        "",
        f"Ran on: {os.cpu_count()} cores, CPU with Gloo; torch {importlib.metadata.version('torch')}, convmesh "
        f"{importlib.metadata.version('convmesh')}. {_load('start')}",
    ]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def _load(when: str) -> str:
    return f"Load at the {when}: {statistics.fmean(os.getloadavg()[:2]):.1f}."


if __name__ == "__main__":
    main()

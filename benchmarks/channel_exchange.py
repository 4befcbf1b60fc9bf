"""What exchanging channels through shared memory gains over Gloo, on ranks of one machine.

Run from the repository: ``python -m benchmarks.channel_exchange``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.multiprocess.ranks import RankPool

from convmesh.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "channel_exchange.md"
SIZES_BYTES = (2**16, 2**20, 2**22, 2**24)
RANKS = (2, 4)

Found = Mapping[tuple[str, str, int], Sequence[float]]


def measure(num_ranks: int, *, sizes_bytes: Sequence[int] = SIZES_BYTES, num_rounds: int = 11) -> Found:
    """Seconds by transport, collective and size, of the rank that took longest each time.

    Args:
        num_ranks: Ranks on the channel axis.
        sizes_bytes: Of the whole tensor.
        num_rounds: Measurements of each.

    Returns:
        One list per transport, collective and size.
    """
    pool = RankPool("torch", num_ranks)
    try:
        answers = pool.run(
            "benchmarks.contenders.exchange_ranks:measure",
            timeout_seconds=120,
            sizes_bytes=tuple(sizes_bytes),
            num_rounds=num_rounds,
        )
    finally:
        pool.close()
    return {key: [max(each) for each in zip(*(answer[key] for answer in answers), strict=True)] for key in answers[0]}


def table(by_ranks: Mapping[int, Found]) -> Iterator[str]:
    """Markdown: a row per number of ranks, collective and size.

    Args:
        by_ranks: Number of ranks to what was found.
    """
    yield "| ranks | collective | whole tensor | shared memory | Gloo | Gloo takes |"
    yield "|---|---|---|---|---|---|"
    for num_ranks, found in by_ranks.items():
        for name, kind, size in found:
            if name != "Gloo":
                continue
            ours, theirs = (found[way, kind, size] for way in ("shared memory", "Gloo"))
            ratio = statistics.median(theirs) / statistics.median(ours)
            cells = [str(num_ranks), kind, format_bytes(size), _spread(ours), _spread(theirs), f"{ratio:.1f} times"]
            yield f"| {' | '.join(cells)} |"


def _spread(seconds: Sequence[float]) -> str:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{1e3 * middle:.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f})"


def main() -> None:
    """Measures, and writes the page of results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    by_ranks = {num_ranks: measure(num_ranks, num_rounds=options.rounds) for num_ranks in RANKS}
    lines = [
        "# Channels through shared memory, and through Gloo",
        "",
        "One all-gather or reduce-scatter of float32 images of 64 channels on one machine, a thread per rank: "
        "the slowest rank's median, lowest and highest. The transports take turns. "
        "Made by `python -m benchmarks.channel_exchange`.",
        "",
        f"Ran on: {os.cpu_count()} cores, torch {importlib.metadata.version('torch')}.",
        "",
        *table(by_ranks),
        "",
    ]
    RESULTS.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

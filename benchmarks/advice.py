"""The advice loop: a run that is set up badly is profiled, and what the profile advises is applied.

The run has tiny buckets, micro-batches that are too small, files of unequal size dealt at random, and no loader
workers. Its profile predicts what each piece of advice gives, and what all together give. Then the run as it was, the
run with each piece alone, and the run file with all advice applied are measured in turn, round after round, in the same
ranks, each in the real training loop. Run from the repository: ``python -m benchmarks.advice``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contenders.bad_start import write_images
from tests.multiprocess.ranks import RankPool

from convmesh.config import RunConfig, dump_config, load_config, parse_config
from convmesh.config.load import plain_config, with_settings
from convmesh.profiling.analysis import Analysis, analyse
from convmesh.profiling.store import load_trace
from convmesh.training.advice import RUN_NAME, Advising, advise, foresight_of
from convmesh.training.foresight import Setting

RESULTS = Path(__file__).parent / "results" / "advice.md"
WORK = Path("runs/benchmark-advice")
NUM_RANKS = 2
_WARMUP = 4
GOAL, WITHIN = 1.3, 0.3
"""Times as many images per second as before; how far a predicted gain may be from the measured one."""

CONFIG: Mapping[str, Any] = {
    "engine": "torch",
    "model": {
        "factory": "benchmarks.contenders.bad_start:network",
        "args": {"bytes_per_second": 4e6, "width": 16, "depth": 20},
    },
    "data": {"source": "image_folder", "image_size": 32, "sampler": "random", "num_workers": 0},
    "strategy": {"bucket_bytes": 1, "accumulation": 8},
    "train": {"global_batch": 32, "device": "cpu"},
}


@dataclass
class Variant:
    """The run with some of the advice.

    Args:
        name: What was advised.
        run: The run.
        kind: What is changed, in a word.
        foretold: Seconds of a step by the profile of the bad run, in each round.
        seconds: Seconds of a step, in each round.
    """

    name: str
    run: RunConfig
    kind: str
    foretold: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def predicted(self) -> float:
        """Seconds, median over the rounds."""
        return statistics.median(self.foretold)

    @property
    def measured(self) -> float:
        """Seconds, median over the rounds."""
        return statistics.median(self.seconds)

    def gains(self, first: Variant) -> tuple[float, float]:
        """Predicted and measured share of a step that is saved, medians of what each round says for itself."""
        return _gain(self.foretold, first.foretold), _gain(self.seconds, first.seconds)


class Bench:
    """Ranks that run whatever they are given.

    Args:
        work: Where profiles go.
        steps: Updates that are profiled.
    """

    def __init__(self, work: Path, *, steps: int) -> None:
        self._work = work
        self._steps = steps
        self._pool = RankPool("torch", NUM_RANKS)

    def profile(self, run: RunConfig) -> tuple[Analysis, Path]:
        """Runs a few updates; what their profile says, and where it is."""
        folder = (self._work / "profiles" / str(time.time_ns())).absolute()
        folder.mkdir(parents=True)
        self._pool.run(
            "benchmarks.contenders.advice_ranks:profile", settings=plain_config(run), folder=folder,
            window=(_WARMUP, self._steps), timeout_seconds=120,
        )  # fmt: skip
        (folder / "profile" / RUN_NAME).write_text(dump_config(run), "utf-8")
        return analyse(load_trace(folder / "profile"), one_clock=True), folder / "profile"

    def close(self) -> None:
        """Ends the ranks."""
        self._pool.close()


def main() -> None:
    """Profiles, advises, applies, measures, writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="updates that are profiled")
    parser.add_argument("--rounds", type=int, default=7, help="how often everything is measured, in turn")
    parser.add_argument("--seconds", type=float, default=200.0, help="after so long no new round begins")
    parser.add_argument("--work", type=Path, default=WORK, help="where images and profiles go")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    begun, longest = time.monotonic(), 0.0
    bad, bench = bad_run(arguments.work), Bench(arguments.work, steps=arguments.steps)
    try:
        variants = variants_of(bad, advise(*bench.profile(bad)), arguments.work)
        for _ in range(arguments.rounds):
            since = time.monotonic()
            if since - begun + longest > arguments.seconds:
                break
            devices = measure(variants, bench)
            longest = max(longest, time.monotonic() - since)
    finally:
        bench.close()
    page = page_of(variants, devices)
    arguments.output.write_text(page, "utf-8")
    print(page)


def bad_run(work: Path) -> RunConfig:
    """The bad run, its images written."""
    images = (work / "images").absolute()
    if not images.exists():
        write_images(images, number=1600)
    return parse_config({**CONFIG, "data": {**CONFIG["data"], "path": str(images)}})


def variants_of(bad: RunConfig, advising: Advising, work: Path) -> list[Variant]:
    """The run as it was, with each piece of advice alone, and by the run file with all that goes together."""
    advised = advising.advised
    found = [Variant("as it was", bad, "none")]
    for piece in advised.pieces:
        if not piece.plan:
            name = f"{piece.kind}: `{piece.yaml}`"
            found.append(Variant(name, with_settings(bad, piece.changes), piece.kind))
    if advised.together:
        name = ", ".join(f"`{setting}: {value}`" for setting, value in advised.changes.items())
        advising.write(work / "better.yaml")
        found.append(Variant(f"together: {name}", load_config(work / "better.yaml"), "all together"))
    return found


def measure(variants: Sequence[Variant], bench: Bench) -> str:
    """One round: every variant in turn, and what the profile of the run as it was has predicted of all."""
    analysis, folder = bench.profile(variants[0].run)
    foresight = foresight_of(analysis, folder)
    for variant in variants:
        if variant is not variants[0]:
            analysis, _ = bench.profile(variant.run)
        variant.seconds.append(float(analysis.steady.step_RS.mean()))
        variant.foretold.append(foresight.seconds(Setting(run=variant.run, plan=foresight.setting.plan)))
    return foresight.cluster.name


def page_of(variants: Sequence[Variant], devices: str) -> str:
    """The page of results."""
    first, last = variants[0], variants[-1]
    cores = len(os.sched_getaffinity(0))
    lines = [
        "# The advice loop",
        "",
        "A run set up badly is profiled and advised on: tiny buckets, micro-batches that are too small, files of "
        "unequal size dealt at random, no loader workers, a disk that is made slow. All runs are measured in turn, in "
        f"the same ranks, {len(first.seconds)} rounds; shown are medians. Predictions come from profiles of the bad "
        f"run in the same rounds and the preset `{devices}`. Gains are shares of a "
        "step, each compared with the bad run of its own round. Made by `python -m benchmarks.advice`.",
        "",
        f"Ran on: {cores} cores, {NUM_RANKS} ranks, Gloo over loopback; torch {importlib.metadata.version('torch')}.",
        "",
        "| run | predicted ms | measured ms | range | predicted gain | measured gain | predicted / measured gain |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in variants:
        predicted, measured = variant.gains(first)
        gains = [f"{predicted:.1%}", f"{measured:.1%}", f"{predicted / measured:.2f}" if measured else "-"]
        cells = gains if variant is not first else ["", "", ""]
        span = f"{1e3 * min(variant.seconds):.0f} to {1e3 * max(variant.seconds):.0f}"
        lines.append(
            f"| {variant.name} | {1e3 * variant.predicted:.0f} | {1e3 * variant.measured:.0f} | {span} | "
            + " | ".join(cells)
            + " |"
        )
    speed = first.measured / last.measured
    lines += [
        "",
        f"With all advice that is applied together the run does {speed:.2f} times its images per second "
        f"(goal: {GOAL}). Goal for each predicted gain: within {WITHIN:.0%} of the measured one; reached by "
        f"{_names(variants, reached=True)}; missed by {_names(variants, reached=False)}.",
    ]
    return "\n".join(lines) + "\n"


def _names(variants: Sequence[Variant], *, reached: bool) -> str:
    first, *others = variants
    found = []
    for variant in others:
        predicted, measured = variant.gains(first)
        if (abs(predicted - measured) <= WITHIN * abs(measured)) == reached:
            found.append(variant.kind)
    return ", ".join(found) or "none"


def _gain(seconds: Sequence[float], before: Sequence[float]) -> float:
    return statistics.median(1 - after / now for after, now in zip(seconds, before, strict=True))


if __name__ == "__main__":
    main()

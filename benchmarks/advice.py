"""The advice loop: a run that is set up badly is profiled, and what the profile advises is applied.

The run has tiny buckets, micro-batches that are too small, files of unequal size dealt at random, and no loader
workers. Its profile predicts what each piece of advice gives, and what all together give; then the run is profiled
again with each piece alone and with the run file that ``--advice-config`` writes, all in turn, several times over. Run
from the repository: ``python -m benchmarks.advice``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contenders.bad_start import write_images

from convmesh.config import dump_config, parse_config

RESULTS = Path(__file__).parent / "results" / "advice.md"
WORK = Path("runs/benchmark-advice")
NUM_RANKS = 2
GOAL, WITHIN = 1.3, 0.3
"""Times as many images per second as before; how far a predicted gain may be from the measured one."""

CONFIG: Mapping[str, Any] = {
    "engine": "torch",
    "model": {
        "factory": "benchmarks.contenders.bad_start:network",
        "args": {"bytes_per_second": 1.2e7, "width": 16, "depth": 20},
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
        path: Its run file.
        kind: Of the piece of advice; empty for the run as it was and for all together.
        foretold: Seconds of a step by the profile of the bad run, in each round.
        seconds: Seconds of a step, in each round.
    """

    name: str
    path: Path
    kind: str = ""
    foretold: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def predicted(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.foretold)

    @property
    def measured(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.seconds)


def main() -> None:
    """Profiles, advises, applies, measures, writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25, help="updates that are profiled")
    parser.add_argument("--rounds", type=int, default=2, help="how often everything is measured, in turn")
    parser.add_argument("--seconds", type=float, default=200.0, help="after so long no new round begins")
    parser.add_argument("--cluster", help="a cluster file; else the preset for this machine")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    begun = time.monotonic()
    bad = prepare()
    cluster = ["--cluster", arguments.cluster] if arguments.cluster else []
    better = WORK / "better.yaml"
    told = profile(bad, steps=arguments.steps, more=[*cluster, "--advice-config", str(better)])
    variants = variants_of(bad, better, told)
    measure(variants, told, steps=arguments.steps)
    longest = time.monotonic() - begun
    for _ in range(1, arguments.rounds):
        since = time.monotonic()
        if since - begun + longest > arguments.seconds:
            break
        measure(variants, profile(bad, steps=arguments.steps, more=cluster), steps=arguments.steps)
        longest = max(longest, time.monotonic() - since)
    page = page_of(variants, told)
    arguments.output.write_text(page, "utf-8")
    print(page)


def prepare() -> Path:
    """Writes images and the bad run file."""
    images = WORK / "images"
    if not images.exists():
        write_images(images, number=1600)
    run = parse_config({**CONFIG, "data": {**CONFIG["data"], "path": str(images.absolute())}})
    path = WORK / "bad.yaml"
    path.write_text(dump_config(run), "utf-8")
    return path


def profile(config: Path, *, steps: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """Profiles a run in fresh ranks and returns its figures."""
    folder = WORK / "profiles" / f"{config.stem}-{time.time_ns()}"
    command = [sys.executable, "-m", "convmesh.cli.main", "profile", str(config), "--ranks", str(NUM_RANKS)]
    command += ["--warmup", "5", "--steps", str(steps), "--run-dir", str(folder), "--json", *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def step_seconds(told: Mapping[str, Any]) -> float:
    """Mean seconds of the steady steps."""
    return float(told["seconds_per_step"]["step"])


def measure(variants: Sequence[Variant], told: Mapping[str, Any], *, steps: int) -> None:
    """One round: every variant in turn, and what the profile of the run as it was has predicted of the others."""
    first, *others = variants
    advice = told["advice"]
    of_kind = {piece["kind"]: piece["predicted_seconds"] for piece in advice["pieces"]}
    first.seconds.append(step_seconds(told))
    first.foretold.append(advice["step_seconds"])
    for variant in others:
        variant.seconds.append(step_seconds(profile(variant.path, steps=steps)))
        if variant.kind in of_kind:
            variant.foretold.append(of_kind[variant.kind])
        elif not variant.kind:
            variant.foretold.append(advice["together"]["predicted_seconds"])


def variants_of(bad: Path, better: Path, told: Mapping[str, Any]) -> list[Variant]:
    """The run as it was, with each piece of advice alone, and with all that is applied together."""
    from convmesh.config import load_config
    from convmesh.config.load import with_settings

    advice = told["advice"]
    found = [Variant("as it was", bad)]
    for piece in advice["pieces"]:
        if not piece["plan"]:
            path = WORK / f"only-{piece['kind']}.yaml"
            path.write_text(dump_config(with_settings(load_config(bad), piece["changes"])), "utf-8")
            found.append(Variant(f"{piece['kind']}: `{piece['yaml']}`", path, piece["kind"]))
    together = advice["together"]
    if together["kinds"]:
        name = ", ".join(f"`{setting}: {value}`" for setting, value in together["changes"].items())
        found.append(Variant(f"together: {name}", better))
    return found


def page_of(variants: Sequence[Variant], told: Mapping[str, Any]) -> str:
    """The page of results."""
    first, last = variants[0], variants[-1]
    cores = len(os.sched_getaffinity(0))
    lines = [
        "# The advice loop",
        "",
        "A run set up badly is profiled and advised on: tiny buckets, micro-batches that are too small, files of "
        "unequal size dealt at random, no loader workers, a disk that is made slow. All runs are measured in turn, in "
        f"fresh ranks, {len(first.seconds)} rounds; shown are medians. Predictions come from profiles of the bad run "
        f"in the same rounds and the preset `{told['advice']['basis'].get('devices', '')}`. Gains are shares of a "
        "step. Made by `python -m benchmarks.advice`.",
        "",
        f"Ran on: {cores} cores, {NUM_RANKS} ranks, Gloo over loopback; torch {importlib.metadata.version('torch')}.",
        "",
        "| run | predicted ms | measured ms | range | predicted gain | measured gain | predicted / measured gain |",
        "|---|---|---|---|---|---|---|",
    ]
    now = first.predicted
    for variant in variants:
        predicted, measured = 1 - variant.predicted / now, 1 - variant.measured / first.measured
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
        f"(goal: {GOAL}). Goal for each predicted gain: within {WITHIN:.0%} of the measured one.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    WORK.mkdir(parents=True, exist_ok=True)
    main()

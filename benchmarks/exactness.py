"""Whether ResNets on meshes with a channel axis equal one device: ``convmesh verify`` of every case, in one table.

Run from the repository: ``python -m benchmarks.exactness``. Each case runs in processes of its own and leaves its
answer in ``runs/exactness``; a second call goes on where the first one stopped. ``--only torch`` or ``--only resnet18``
runs some.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

RESULTS = Path(__file__).parent / "results" / "exactness.md"
ANSWERS = Path("runs") / "exactness"
MESHES = ("data=1,channel=2", "data=1,channel=4", "data=2,channel=2")
LEARNING_RATE = 0.02
"""Small enough that three updates of a network with random weights don't multiply rounding by thousands."""
IMAGE_SIZE = 64
GLOBAL_BATCH = 16
NUM_CLASSES, SAMPLES_PER_CLASS = 10, 6


@dataclass(frozen=True)
class Case:
    """One verification.

    Args:
        engine: ``"torch"`` or ``"mindspore"``.
        network: Its name.
        mesh: The mesh.
        dtype: ``"float32"`` or ``"float64"``.
    """

    engine: str
    network: str
    mesh: str
    dtype: str

    @property
    def name(self) -> str:
        """A name for files, and for ``--only``."""
        return f"{self.engine}-{self.network}-{self.mesh.replace(',', '-').replace('=', '')}-{self.dtype}"


def all_cases() -> Iterator[Case]:
    """Every case, the quick ones first."""
    for network in ("resnet18", "resnet50"):
        for mesh in MESHES:
            yield Case("torch", network, mesh, "float32")
            yield Case("torch", network, mesh, "float64")
    for network in ("resnet18", "resnet50"):
        for mesh in MESHES:
            yield Case("mindspore", network, mesh, "float32")


def make_images(folder: Path, *, size: int = IMAGE_SIZE) -> Path:
    """A small image folder: smooth shapes in noise, of another frequency and colour for each class.

    Args:
        folder: Where to put it.
        size: Side of the images in pixels.

    Returns:
        The folder.
    """
    draw = np.random.default_rng(0)
    y_HW, x_HW = np.mgrid[0:size, 0:size] / size
    for part, number in (("train", SAMPLES_PER_CLASS), ("val", 1)):
        for label in range(NUM_CLASSES):
            path = folder / part / f"class{label}"
            path.mkdir(parents=True, exist_ok=True)
            for sample in range(number):
                phase_C = draw.uniform(0, 6, 3)
                wave_HWC = np.sin((2 + label) * (x_HW + y_HW)[..., None] * 3 + phase_C)
                pixels = 128 + 60 * wave_HWC + draw.normal(0, 25, (size, size, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path / f"{sample}.png")
    return folder


def verify(case: Case, *, steps: int, time_limit_seconds: float) -> dict[str, Any]:
    """Runs ``convmesh verify`` for one case.

    Args:
        case: The case.
        steps: Updates.
        time_limit_seconds: After which it is given up.

    Returns:
        What the command told, and ``seconds``; with ``error`` instead if it told nothing.
    """
    data = make_images(ANSWERS / "images")
    run = {
        "engine": case.engine,
        "model": {"name": case.network},
        "data": {"source": "image_folder", "path": str(data), "image_size": IMAGE_SIZE},
        "optimizer": {"learning_rate": LEARNING_RATE, "momentum": 0.9, "weight_decay": 1e-4},
        "train": {"global_batch": GLOBAL_BATCH, "device": "cpu"},
    }
    path = ANSWERS / f"{case.name}.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    command = [sys.executable, "-m", "convmesh.cli.main", "verify", str(path), "--mesh", case.mesh, "--json"]
    command += ["--steps", str(steps), "--dtype", case.dtype]
    begun = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit_seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {time_limit_seconds:g} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"error": (done.stderr.strip() or "no answer").splitlines()[-1]}
    return {**answer, "seconds": time.perf_counter() - begun}


def table(answers: dict[Case, dict[str, Any]]) -> str:
    """The table of all answers.

    Args:
        answers: What was told of each case.

    Returns:
        Markdown.
    """
    lines = [
        "| engine | network | mesh | type | rate | output | gradient | change | buffer | collectives | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, answer in answers.items():
        head = f"| {case.engine} | {case.network} | {case.mesh} | {case.dtype} |"
        if "error" in answer:
            lines.append(f"{head} | | | | | | {answer['error']} |")
            continue
        worst = {entry["kind"]: entry for entry in answer["worst"]}
        cells = [
            f"{worst[kind]['difference']:.0e} of {worst[kind]['allowed']:.0e}"
            for kind in ("output", "gradient", "change", "buffer")
        ]
        told = "as told" if all(entry["passed"] for entry in answer["collectives"]) else "NOT as told"
        verdict = "equal" if answer["passed"] else "inconclusive" if answer["inconclusive"] else "DIFFERS"
        rate = answer["conditions"]["learning_rate"]
        lines.append(f"{head} {rate:g} | {' | '.join(cells)} | {told} | {verdict} |")
    return "\n".join(lines)


def write_results(answers: dict[Case, dict[str, Any]], *, steps: int) -> None:
    """Writes the page of results.

    Args:
        answers: What was told of each case.
        steps: Updates.
    """
    num_equal = sum(bool(answer.get("passed")) for answer in answers.values())
    text = f"""# Split networks against one device

`convmesh verify` of ResNets split along channels: {steps} updates of {GLOBAL_BATCH} images of {IMAGE_SIZE}
pixels, on ranks and on one device from the same state. Each cell is the largest relative difference of that
kind of tensor and what is allowed for it: the tolerance of the data type, or ten times what rounding alone
changes between one-device runs, up to a thousandth (three for what the updates change of a parameter). In
float64 the run is as it is, at the learning rate that is told; in float32 the norms start with a shift of 3 and
the learning rate is 0.01. Made by `python -m benchmarks.exactness`.

Ran on: {_machine()}.

{table(answers)}

{num_equal} of {len(answers)} equal one device.
"""
    RESULTS.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was not answered yet, and writes the table of all that was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run only cases whose name holds this text")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1500, metavar="SECONDS", help="for each case")
    parser.add_argument("--again", action="store_true", help="run answered cases too")
    options = parser.parse_args(arguments)
    ANSWERS.mkdir(parents=True, exist_ok=True)
    answers = {}
    for case in all_cases():
        path = ANSWERS / f"{case.name}.json"
        if options.only in case.name and (options.again or not path.exists()):
            answer = verify(case, steps=options.steps, time_limit_seconds=options.limit)
            print(f"{case.name}: {_brief(answer)}", flush=True)
            if "error" not in answer:
                path.write_text(json.dumps(answer), encoding="utf-8")
            answers[case] = answer
        elif path.exists():
            answers[case] = json.loads(path.read_text(encoding="utf-8"))
    write_results(answers, steps=options.steps)
    print(f"written to {RESULTS}")
    return 0 if all(answer.get("passed") for answer in answers.values()) else 1


def _brief(answer: dict[str, Any]) -> str:
    if "error" in answer:
        return str(answer["error"])
    worst = max(answer["worst"], key=lambda entry: entry["difference"] / max(entry["allowed"], 1e-300))
    told = f"{worst['kind']} {worst['name']} {worst['difference']:.1e} of {worst['allowed']:.1e}"
    return f"{'passed' if answer['passed'] else 'NOT PASSED'} in {answer['seconds']:.0f} s, worst: {told}"


def _machine() -> str:
    found = []
    for package in ("torch", "mindspore", "convmesh"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"CPU, {platform.machine()}; {', '.join(found)}; Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())

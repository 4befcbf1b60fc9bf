"""The shipped examples: each is read, explains itself, and passes a dry run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from convmesh import api
from convmesh.cli.main import app
from convmesh.config import load_config
from convmesh.data.prepared import write_prepared
from convmesh.engines.contract import Observation
from convmesh.training.collectives import expected_collectives
from convmesh.training.verification import Subject

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
PLANS = sorted((Path(__file__).parents[2] / "examples" / "plans").glob("*.yaml"))
NOTHING_SEEN = Observation(
    losses=(), outputs=(), gradients={}, parameters={}, buffers={}, saved_bytes=None, peak_memory_bytes=0,
    parameter_bytes=(4,),
)  # fmt: skip
NEEDED = {"cnn_small_cifar10", "resnet18_cifar10", "resnet50_imagenet", "resnet152_imagenet", "digits"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Tiny stand-ins in the formats of the real data sets."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for label in ("n01", "n02"):
            folder = root / "imagenet" / part / label
            folder.mkdir(parents=True)
            for number in range(8):
                pixels = rng.integers(0, 255, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return root


def test_every_promised_example_is_there():
    assert {path.stem for path in EXAMPLES} >= NEEDED


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_read_and_commented(path):
    assert load_config(path).train.epochs > 0
    text = path.read_text()
    assert text.startswith("# ")
    assert "convmesh train examples/" + path.name in text
    assert text.count("#") >= 4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("engine", ["mindspore", "torch"])
def test_a_dry_run_passes(path, engine, data, monkeypatch):
    pytest.importorskip(engine)
    monkeypatch.setenv("CONVMESH_DATA", str(data / "cache"))
    command = ["train", str(path), "--engine", engine, "--ranks", "8", "--dry-run", "--set", "train.device=cpu"]
    source = load_config(path).data.source
    if source == "image_folder":
        command += ["--set", f"data.path={data / 'imagenet'}"]
    else:
        _prepare(source, data / "cache")
    if engine == "mindspore":
        command += ["--set", "precision.compute=float32"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output + str(result.exception)
    assert "nothing is wrong" in result.output
    assert re.search(r"mindspore\.parallel\.cluster\.run|torch\.distributed\.run", result.output)


@pytest.mark.parametrize("plan", PLANS, ids=lambda path: path.stem)
@pytest.mark.parametrize("engine", ["mindspore", "torch"])
def test_check_foretells_what_verify_counts(plan, engine, data, monkeypatch):
    pytest.importorskip(engine)
    monkeypatch.setenv("CONVMESH_DATA", str(data / "cache"))
    _prepare("cifar10", data / "cache")
    config = str(plan.parents[1] / "cnn_small_cifar10.yaml")
    command = ["check", config, "--plan", str(plan), "--engine", engine, "--json", "--set", "train.device=cpu"]
    result = CliRunner().invoke(app, command)
    told = {entry["kind"]: (entry["number"], entry["num_bytes"]) for entry in json.loads(result.output)["collectives"]}
    prepared = api.prepare(config, plan=str(plan), engine=engine, overrides=("train.device=cpu",))
    subject = Subject(prepared.run, prepared.mesh, prepared.device, prepared.plan)
    # Verify adds what an update sends besides: gradients and the norm, by all-reduces.
    expected = {
        entry.kind: (entry.number, entry.num_bytes)
        for entry in expected_collectives(subject, NOTHING_SEEN)["data"]
        if entry.kind != "all-reduce"
    }
    assert told == expected
    assert "all-to-all" in told


def _prepare(source, cache):
    folder = cache / source
    if folder.exists():
        return
    cache.mkdir(exist_ok=True)
    side, channels, num_train = (32, 3, 12_000) if source == "cifar10" else (8, 1, 400)
    arrays = {}
    for part, number in (("train", num_train), ("test", 40)):
        arrays[f"{part}_images"] = np.zeros((number, side, side, channels), np.uint8)
        arrays[f"{part}_labels"] = (np.arange(number) % 10).astype(np.int32)
    write_prepared(folder, arrays, class_names=[str(digit) for digit in range(10)], origin="test")

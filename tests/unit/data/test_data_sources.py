from __future__ import annotations

import gzip
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convmesh.data.sources import ArraySource
from convmesh.data.sources.cifar10 import find_layout, folder_source, read_split
from convmesh.data.sources.idx import idx_sources, read_idx
from convmesh.data.sources.safe_pickle import load_arrays
from convmesh.errors import DataError

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


@pytest.mark.parametrize("layout", ["binary", "python", "sheets"])
def test_all_forms_of_cifar10_decode_to_the_same_arrays(
    layout: str, write_cifar: Callable[[str], Path], cifar: Arrays
) -> None:
    folder = write_cifar(layout)
    assert find_layout(folder) == find_layout(folder.parent) == (folder, layout)
    for split in ("train", "test"):
        images, labels = read_split(folder, layout=layout, split=split)
        np.testing.assert_array_equal(images, cifar[f"{split}_images"])
        np.testing.assert_array_equal(labels, cifar[f"{split}_labels"])
        assert (str(images.dtype), str(labels.dtype)) == ("uint8", "int32")


def test_a_copy_for_another_process_decodes_again(write_cifar: Callable[[str], Path], cifar: Arrays) -> None:
    source = folder_source(write_cifar("binary"), layout="binary", split="train").subset(np.array([3, 5, 40]))
    pickled = pickle.dumps(source)
    assert len(pickled) < 5000, "pixels travel with it"
    copy = pickle.loads(pickled)  # noqa: S301
    np.testing.assert_array_equal(copy.read(np.array([2])), cifar["train_images"][[40]])


def test_a_missing_batch_is_named(write_cifar: Callable[[str], Path]) -> None:
    folder = write_cifar("binary")
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"is not whole \(got no data_batch_3\.bin\).*convmesh data fetch cifar10"):
        read_split(folder, layout="binary", split="train")


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("binary", "test_batch.bin"),
        ("python", "test_batch"),
        ("sheets", "test_batch.png"),
        ("sheets", "test_lables.json"),
    ],
)
def test_a_truncated_file_is_named(layout: str, name: str, write_cifar: Callable[[str], Path]) -> None:
    path = write_cifar(layout) / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(DataError, match=name):
        read_split(path.parent, layout=layout, split="test")


class _Malicious:
    def __init__(self, call: Any, *args: Any) -> None:
        self.reduced = (call, args)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    "payload",
    [
        lambda mark: _Malicious(os.mkdir, mark),
        lambda mark: _Malicious(eval, f"__import__('os').mkdir({mark!r})"),
        lambda mark: _Malicious(getattr, np.ndarray, "dump"),
        lambda mark: _Malicious(np.fromfile, mark),
        lambda mark: {b"data": [_Malicious(os.mkdir, mark)]},
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_malicious_pickle_executes_nothing(
    payload: Callable[[str], Any], protocol: int, tmp_path: Path, write_cifar: Callable[[str], Path]
) -> None:
    mark = tmp_path / "executed"
    folder = write_cifar("python")
    (folder / "test_batch").write_bytes(pickle.dumps(payload(str(mark)), protocol=protocol))
    with pytest.raises(DataError, match=r"is not a pickle of arrays.*is not allowed"):
        read_split(folder, layout="python", split="test")
    assert not mark.exists()


def test_pickles_of_arrays_and_containers_are_read(tmp_path: Path) -> None:
    content: dict[bytes, Any] = {
        b"a": np.arange(6, dtype=np.uint8).reshape(2, 3),
        b"b": [1, 2.5, b"x\xff", "text"],
        b"c": (None, True),
    }
    path = tmp_path / "batch"
    for protocol in (0, 2):
        path.write_bytes(pickle.dumps(content, protocol=protocol))
        loaded = load_arrays(path)
        np.testing.assert_array_equal(loaded[b"a"], content[b"a"])
        assert (loaded[b"b"], loaded[b"c"]) == (content[b"b"], content[b"c"])


def _write_idx(path: Path, array: Array, *, code: int = 8) -> None:
    head = struct.pack(">HBB", 0, code, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as file:
        file.write(head + array.astype(np.uint8).tobytes())


def _write_mnist(folder: Path, *, end: str = "", test_labels: Any = (0, 2)) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    train, test = rng.integers(0, 256, (6, 5, 4)), rng.integers(0, 256, (2, 5, 4))
    _write_idx(folder / f"train-images-idx3-ubyte{end}", train)
    _write_idx(folder / f"train-labels-idx1-ubyte{end}", np.array([0, 1, 2, 0, 1, 2]))
    _write_idx(folder / f"t10k-images-idx3-ubyte{end}", test)
    _write_idx(folder / f"t10k-labels-idx1-ubyte{end}", np.array(test_labels))
    return train, test


@pytest.mark.parametrize("end", ["", ".gz"])
def test_idx_files_raw_and_gzipped(end: str, tmp_path: Path) -> None:
    train_images, test_images = _write_mnist(tmp_path, end=end)
    train, test = idx_sources(tmp_path)
    np.testing.assert_array_equal(train.read(np.arange(6))[..., 0], train_images)
    np.testing.assert_array_equal(test.read(np.array([1]))[0, :, :, 0], test_images[1])
    assert train.shape_HWC == (5, 4, 1)
    assert train.class_names == test.class_names == ("0", "1", "2")
    assert test.labels_N.dtype == np.int32
    copy = pickle.loads(pickle.dumps(test))  # noqa: S301
    np.testing.assert_array_equal(copy.read(np.array([0, 1]))[..., 0], test_images)


def test_a_label_outside_the_classes_is_named(tmp_path: Path) -> None:
    _write_mnist(tmp_path, test_labels=(0, 7))
    with pytest.raises(
        DataError, match=r"test lies outside the classes \(got 7 at sample 1, 1 in all, expected 0 to 2\)"
    ):
        idx_sources(tmp_path)


def test_idx_labels_must_be_as_many_as_images(tmp_path: Path) -> None:
    _write_mnist(tmp_path, test_labels=(0, 1, 2))
    with pytest.raises(DataError, match=r"not one label per image \(got 2 images, 3 labels\)"):
        idx_sources(tmp_path)


def test_a_missing_idx_file_is_named(tmp_path: Path) -> None:
    _write_mnist(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(DataError, match=r"no test images in .*a file like t10k-images-idx3-ubyte"):
        idx_sources(tmp_path)


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b[:3], lambda b: b"", lambda b: b"<html>" + b])
def test_damaged_idx_files_are_named(end: str, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / f"train-images-idx3-ubyte{end}"
    _write_idx(path, np.zeros((4, 3, 3)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"the idx file .*{path.name} is damaged"):
        read_idx(path)


def test_idx_files_of_other_types_are_refused(tmp_path: Path) -> None:
    _write_idx(tmp_path / "a", np.zeros((2, 2)), code=13)
    with pytest.raises(DataError, match="expected an idx file of unsigned bytes"):
        read_idx(tmp_path / "a")


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 4, 4, 3), np.float32), r"wrong shape or type \(got float32"),
        (np.zeros((2, 4, 4), np.uint8), r"expected uint8 \(N, H, W, C\)"),
        (np.zeros((3, 4, 4, 1), np.uint8), "not one label per image"),
    ],
)
def test_arrays_that_are_no_images_are_refused(images: Array, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArraySource(lambda: images, labels_N=np.zeros(2, np.int32), class_names=("a",), name="mine")

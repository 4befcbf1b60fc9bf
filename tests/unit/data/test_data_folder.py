from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from convmesh.data.sources import folder_index
from convmesh.data.sources.base import CorruptImageError
from convmesh.data.sources.image_folder import folder_sources
from convmesh.data.transform import fit_image
from convmesh.errors import DataError


def test_labels_names_and_costs(images_folder: Path) -> None:
    train, evaluation = folder_sources(images_folder)
    assert train.class_names == evaluation.class_names == ("class0", "class1", "class2")
    assert train.labels_N.tolist() == [0] * 5 + [1] * 4 + [2] * 3
    assert evaluation.labels_N.tolist() == [0, 0, 1, 1, 2, 2]
    assert train.name_of(6) == str(images_folder / "train/class1/1.jpg")
    assert train.costs(np.array([6, 0])).tolist() == [
        os.path.getsize(images_folder / "train/class1/1.jpg"),
        os.path.getsize(images_folder / "train/class0/0.jpg"),
    ]
    part = train.subset(np.array([2, 6])).subset(np.array([1]))
    assert (part.name_of(0), part.labels_N.tolist()) == (train.name_of(6), [1])


def test_images_become_rgb(images_folder: Path) -> None:
    train, _ = folder_sources(images_folder)
    with train.opened(0) as grey:
        assert fit_image(grey, size=16).shape == (16, 16, 3)


def test_the_index_is_kept_until_a_class_folder_changes(
    images_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = folder_sources(images_folder)
    scans: list[Path] = []
    scan = folder_index._scan
    monkeypatch.setattr(folder_index, "_scan", lambda folder, classes: scans.append(folder) or scan(folder, classes))  # type: ignore[func-returns-value]
    again, _ = folder_sources(images_folder)
    assert not scans
    assert [again.name_of(i) for i in range(12)] == [first.name_of(i) for i in range(12)]
    assert sorted(path.suffix for path in (cache / "indexes").iterdir()) == [".lock", ".lock", ".npz", ".npz"]

    Image.new("RGB", (4, 4)).save(images_folder / "train/class2/new.png")
    os.utime(images_folder / "train/class2", ns=(1, 1))
    grown, _ = folder_sources(images_folder)
    assert scans == [images_folder / "train"]
    assert grown.labels_N.tolist() == [0] * 5 + [1] * 4 + [2] * 4


def test_a_damaged_index_is_made_again(images_folder: Path, cache: Path) -> None:
    folder_sources(images_folder)
    for path in (cache / "indexes").glob("*.npz"):
        path.write_bytes(path.read_bytes()[:50])
    train, _ = folder_sources(images_folder)
    assert train.num_samples == 12


def test_a_cache_that_cannot_be_made_costs_only_time(
    images_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CONVMESH_DATA", str(tmp_path / "file"))
    train, _ = folder_sources(images_folder)
    assert train.num_samples == 12


def test_names_that_are_not_ascii(images_folder: Path) -> None:
    odd = images_folder / "train/class1" / "图 é.png"
    Image.new("RGB", (4, 4)).save(odd)
    for _ in ("scanned", "from the cache"):
        train, _ = folder_sources(images_folder)
        assert str(odd) in [train.name_of(i) for i in range(train.num_samples)]


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"not an image", lambda b: b""])
def test_a_corrupt_image_is_named(images_folder: Path, damage: object) -> None:
    path = images_folder / "train/class1/1.jpg"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    train, _ = folder_sources(images_folder)

    def decode() -> None:
        with train.opened(6) as image:
            fit_image(image, size=8)

    with pytest.raises(CorruptImageError, match=r"train/class1/1\.jpg can't be read.*data.on_error: skip"):
        decode()


def test_a_file_deleted_after_indexing_is_named(images_folder: Path) -> None:
    train, _ = folder_sources(images_folder)
    (images_folder / "train/class1/1.jpg").unlink()
    with pytest.raises(CorruptImageError, match=r"class1/1\.jpg can't be read"), train.opened(6):
        pass


def test_wrong_layouts_are_explained(images_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds class folders, but not which images are for training.*val/<class>"):
        folder_sources(images_folder / "train")
    with pytest.raises(DataError, match="there are no images in"):
        folder_sources(tmp_path)
    (images_folder / "val").rename(images_folder / "later")
    with pytest.raises(DataError, match=r"no evaluation images.*Move some images of every class"):
        folder_sources(images_folder)


def test_classes_must_fit(images_folder: Path) -> None:
    (images_folder / "train/empty").mkdir()
    with pytest.raises(DataError, match=r"hold no image \(got empty\)"):
        folder_sources(images_folder)
    (images_folder / "train/empty").rmdir()
    (images_folder / "val/class1").rename(images_folder / "val/dog")
    with pytest.raises(DataError, match=r"are not among those of .*train \(got dog\)"):
        folder_sources(images_folder)


def test_evaluation_may_lack_a_class(images_folder: Path) -> None:
    for path in (images_folder / "val/class1").iterdir():
        path.unlink()
    (images_folder / "val/class1").rmdir()
    _, evaluation = folder_sources(images_folder)
    assert evaluation.labels_N.tolist() == [0, 0, 2, 2]

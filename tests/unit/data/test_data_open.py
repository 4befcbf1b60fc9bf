from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convmesh.config import RunConfig
from convmesh.data.open import even_subset, measured_statistics, open_data
from convmesh.data.prepared import write_prepared
from convmesh.data.sources.cifar10 import CLASS_NAMES
from convmesh.errors import ConfigError, DataError, MistakeList

MakeRun = Callable[..., RunConfig]
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def prepared(cache: Path, cifar: Arrays) -> Path:
    cache.mkdir()
    write_prepared(cache / "cifar10", cifar, class_names=CLASS_NAMES, origin="a test")
    return cache / "cifar10"


@pytest.mark.usefixtures("prepared")
def test_prepared_cifar10(make_run: MakeRun, cifar: Arrays) -> None:
    data = open_data(make_run("cifar10").data)
    assert (data.num_channels, data.image_shape_HWC, data.class_names) == (3, (32, 32, 3), CLASS_NAMES)
    assert data.train.labels_N.tolist() == cifar["train_labels"].tolist()
    assert data.eval.num_samples == 10


@pytest.mark.parametrize("layout", ["binary", "python", "sheets"])
def test_official_folders_are_read_directly(
    layout: str, write_cifar: Callable[[str], Path], make_run: MakeRun, cifar: Arrays
) -> None:
    data = open_data(make_run("cifar10", path=str(write_cifar(layout))).data)
    assert data.train.labels_N.tolist() == cifar["train_labels"].tolist()
    assert data.image_shape_HWC == (32, 32, 3)


def _normalised(scale: Any, pixel: int) -> list[float]:
    return [pixel * factor + offset for factor, offset in zip(scale.factor_C, scale.offset_C, strict=True)]


@pytest.mark.usefixtures("prepared")
def test_pixel_scales(make_run: MakeRun) -> None:
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    expected = [(128 / 255 - m) / s for m, s in zip(mean, std, strict=True)]
    by_default = open_data(make_run("cifar10").data).pixel_scale
    np.testing.assert_allclose(_normalised(by_default, 128), expected, rtol=1e-12)
    whole = open_data(
        make_run("cifar10", mean=[m * 255 for m in mean], std=[s * 255 for s in std], pixel_range="0-255").data
    )
    np.testing.assert_allclose(_normalised(whole.pixel_scale, 128), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean": [0.5] * 3, "std": [0.2] * 3, "pixel_range": "0-255"}, "those of pixels from 0 to 1, but .* is 0-255"),
        ({"mean": [125.0] * 3, "std": [60.0] * 3}, "those of pixels from 0 to 255, but data.pixel_range is 0-1"),
        (
            {"mean": [0.5], "std": [0.2] * 3},
            r"data.mean has not one number per channel .*\(got 1 numbers, expected 3\)",
        ),
        ({"mean": [0.5] * 3}, "belong together"),
        ({"num_train": 51}, r"data.num_train asks for more samples .*\(got 51, expected at most 50\)"),
        ({"path": "/nowhere"}, "there is no folder /nowhere"),
    ],
)
@pytest.mark.usefixtures("prepared")
def test_settings_that_do_not_fit_are_refused(settings: Any, message: str, make_run: MakeRun) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        open_data(make_run("cifar10", **settings).data)


@pytest.mark.usefixtures("prepared")
def test_several_mistakes_are_listed_together(make_run: MakeRun) -> None:
    run = make_run("cifar10", mean=[125.0], std=[60.0], num_train=51, num_eval=11)
    with pytest.raises(MistakeList) as caught:
        open_data(run.data)
    assert len(caught.value.errors) == 5


@pytest.mark.parametrize("source", ["cifar10", "digits"])
def test_missing_data_names_the_command(source: str, make_run: MakeRun) -> None:
    with pytest.raises(DataError, match=f"there is no data in .*Run: convmesh data fetch {source}"):
        open_data(make_run(source).data)


def test_half_fetched_data_is_refused(prepared: Path, make_run: MakeRun) -> None:
    (prepared / "manifest.json").rename(prepared / "kept")
    with pytest.raises(DataError, match=r"half fetched \(got no manifest\.json\).*convmesh data fetch cifar10"):
        open_data(make_run("cifar10").data)
    (prepared / "kept").rename(prepared / "manifest.json")
    images = prepared / "train_images.npy"
    images.write_bytes(images.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"train_images\.npy is damaged.*convmesh data fetch cifar10"):
        open_data(make_run("cifar10").data)
    (prepared / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json can't be read"):
        open_data(make_run("cifar10").data)


def test_image_folders(images_folder: Path, make_run: MakeRun) -> None:
    data = open_data(make_run("image_folder", path=str(images_folder), image_size=24, num_train=6).data)
    assert (data.num_channels, data.image_shape_HWC) == (3, (24, 24, 3))
    assert np.bincount(data.train.labels_N).tolist() == [3, 2, 1]
    assert data.pixel_scale.factor_C[0] == pytest.approx(1 / (255 * 0.229))
    with pytest.raises(ConfigError, match="images of a folder differ in size"):
        open_data(make_run("image_folder", path=str(images_folder)).data)
    with pytest.raises(ConfigError, match="image_folder needs the folder"):
        open_data(make_run("image_folder", image_size=24).data)


def test_subsets_take_their_share_of_every_class() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(3), [50, 30, 20])).astype(np.int32)
    ids = even_subset(labels, num_taken=10)
    assert np.bincount(labels[ids]).tolist() == [5, 3, 2]
    assert len(set(ids.tolist())) == 10
    assert ids.tolist() == sorted(ids.tolist())
    assert even_subset(labels, num_taken=100).tolist() == list(range(100))


def test_statistics_are_those_of_all_pixels() -> None:
    images = np.random.default_rng(0).integers(0, 200, (9, 5, 4, 2)).astype(np.uint8)
    mean, std = measured_statistics(images)
    np.testing.assert_allclose(mean, images.mean(axis=(0, 1, 2)) / 255, rtol=1e-12)
    np.testing.assert_allclose(std, images.std(axis=(0, 1, 2)) / 255, rtol=1e-12)
    assert measured_statistics(np.full((2, 2, 2, 1), 7, np.uint8))[1] == (1.0,)

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from convmesh.config import RunConfig
from convmesh.data.inspect import inspect_data
from convmesh.data.open import DataSets, open_data
from convmesh.data.prepared import write_prepared
from convmesh.data.randomness import mixed_bits, sample_uniforms
from convmesh.data.reader import EvalReader, TrainReader
from convmesh.data.sources import ArraySource
from convmesh.data.sources.cifar10 import CLASS_NAMES
from convmesh.data.transform import (
    NUM_RESIZED_CROP,
    crop_and_flip,
    fit_image,
    random_resized_crop,
    resized_crop_box,
    stretch_image,
)
from convmesh.engines.contract import Batch, PixelScale
from convmesh.errors import ConfigError, DataError
from convmesh.geometry import ChannelRegrouping

MakeRun = Callable[..., RunConfig]
Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


def _same(images: Array) -> Array:
    return images


def _datasets(num_train: int, num_eval: int = 11) -> DataSets:
    """Images whose every pixel is the number of the sample, in three classes."""

    def source(num: int) -> ArraySource:
        images = np.tile(np.arange(num, dtype=np.uint8)[:, None, None, None], (1, 6, 6, 1))
        labels = (np.arange(num) % 3).astype(np.int32)
        return ArraySource(partial(_same, images), labels_N=labels, class_names=("a", "b", "c"), name="mine")

    return DataSets(source(num_train), source(num_eval), ("a", "b", "c"), 1, (6, 6, 1), PixelScale((1.0,), (0.0,)))


def _read_all(reader: TrainReader | EvalReader) -> list[Batch]:
    keys = reader.keys(0) if isinstance(reader, TrainReader) else reader.keys()
    return [reader.read(key) for key in keys]


def _shown(batch: Batch) -> list[int]:
    """The samples of a batch that count."""
    return [int(i) for i, weight in zip(batch.images_NHWC[:, 0, 0, 0], batch.weights_N, strict=True) if weight]


@pytest.mark.parametrize("sampler", ["sequential", "random", "stratified"])
@pytest.mark.parametrize(("num_shards", "accumulation"), [(1, 1), (2, 2), (4, 1), (8, 1)])
def test_an_epoch_shows_every_sample_once(sampler: str, num_shards: int, accumulation: int, make_run: MakeRun) -> None:
    run = make_run("idx", sampler=sampler, path="x", strategy={"accumulation": accumulation})
    data = _datasets(27)
    seen: list[int] = []
    readers = [TrainReader(data, run, num_shards=num_shards, shard=shard) for shard in range(num_shards)]
    assert {reader.num_updates for reader in readers} == {4}
    for reader in readers:
        keys = reader.keys(1)
        assert sorted({update for _, update, _ in keys}) == [0, 1, 2, 3]
        for key in keys:
            batch = reader.read(key)
            _check_types(batch)
            seen += _shown(batch)
    assert sorted(seen) == list(range(27))
    assert [readers[0].global_count(1, update) for update in range(4)] == [8, 8, 8, 3]


def _check_types(batch: Batch) -> None:
    num = len(batch.labels_N)
    assert num > 0
    assert (batch.images_NHWC.dtype, batch.labels_N.dtype, batch.weights_N.dtype) == (np.uint8, np.int32, np.float32)
    assert batch.images_NHWC.shape == (num, 6, 6, 1)
    assert batch.images_NHWC.flags.c_contiguous
    shown = batch.images_NHWC[:, 0, 0, 0]
    np.testing.assert_array_equal(batch.labels_N[batch.weights_N > 0], shown[batch.weights_N > 0] % 3)


def test_a_shard_without_samples_gets_one_of_weight_zero(make_run: MakeRun) -> None:
    run = make_run("idx", path="x")
    readers = [TrainReader(_datasets(17), run, num_shards=8, shard=shard) for shard in range(8)]
    last = [[reader.read(key) for key in reader.keys(0) if key[1] == 2] for reader in readers]
    assert all(len(batches) == 1 for batches in last)
    assert sorted(batches[0].weights_N.tolist() for batches in last) == [[0.0]] * 7 + [[1.0]]


def test_keys_start_at_any_update(make_run: MakeRun) -> None:
    reader = TrainReader(_datasets(27), make_run("idx", path="x", strategy={"accumulation": 2}), num_shards=2, shard=0)
    keys = reader.keys(5)
    for first in range(5):
        assert reader.keys(5, first) == [key for key in keys if key[1] >= first]
    assert keys[0] == (5, 0, 0)


def test_dropped_samples_are_counted(make_run: MakeRun) -> None:
    reader = TrainReader(_datasets(27), make_run("idx", path="x", last_batch="drop"), num_shards=2, shard=0)
    assert (reader.num_updates, reader.num_dropped, len(reader.keys(0))) == (3, 3, 3)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 13])
def test_evaluation_is_exact_with_one_batch_size(num_shards: int, make_run: MakeRun) -> None:
    run = make_run("idx", path="x", train={"eval_batch": 4, "global_batch": 13 * num_shards})
    readers = [EvalReader(_datasets(20), run, num_shards=num_shards, shard=shard) for shard in range(num_shards)]
    batches = [batch for reader in readers for batch in _read_all(reader)]
    assert all(len(batch.labels_N) == len(batch.images_NHWC) == len(batch.weights_N) == 4 for batch in batches)
    assert sorted(i for batch in batches for i in _shown(batch)) == list(range(11))
    # A shard without samples runs along, with weights of 0.
    assert len({len(reader.keys()) for reader in readers}) == 1
    assert len(batches) == num_shards * math.ceil(math.ceil(11 / num_shards) / 4)


def test_evaluation_batch_is_the_micro_batch_by_default(make_run: MakeRun) -> None:
    reader = EvalReader(_datasets(20), make_run("idx", path="x", strategy={"accumulation": 2}), num_shards=2, shard=0)
    assert len(reader.read(reader.keys()[0]).labels_N) == 2


def test_batch_that_does_not_divide_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"Set 'train\.global_batch: 6 or 9'"):
        TrainReader(_datasets(20), make_run("idx", path="x"), num_shards=3, shard=0)


@pytest.fixture
def cifar_run(cache: Path, cifar: Arrays, make_run: MakeRun) -> RunConfig:
    cache.mkdir()
    write_prepared(cache / "cifar10", cifar, class_names=CLASS_NAMES, origin="a test")
    return make_run("cifar10", augment={"crop_padding": 4, "flip": True})


def _by_sample(run: RunConfig, *, num_shards: int, epoch: int) -> dict[int, bytes]:
    pixels: dict[int, bytes] = {}
    for shard in range(num_shards):
        reader = TrainReader(open_data(run.data), run, num_shards=num_shards, shard=shard)
        for key in reader.keys(epoch):
            batch, parts = reader.read(key), reader.sampler.micro_batches(epoch, key[1], shard)
            if parts:
                pixels.update(zip(parts[key[2]].tolist(), map(bytes, batch.images_NHWC), strict=True))
    return pixels


def test_augmentation_depends_on_seed_epoch_and_sample_alone(cifar_run: RunConfig) -> None:
    one = _by_sample(cifar_run, num_shards=1, epoch=0)
    assert len(one) == 50
    assert _by_sample(cifar_run, num_shards=4, epoch=0) == one
    other = _by_sample(cifar_run, num_shards=1, epoch=1)
    assert sum(other[i] != one[i] for i in one) > 40


def test_readers_travel_to_other_processes(cifar_run: RunConfig) -> None:
    reader = TrainReader(open_data(cifar_run.data), cifar_run, num_shards=2, shard=1)
    expected = reader.read((0, 2, 0))
    pickled = pickle.dumps(reader)
    assert len(pickled) < 10_000, "pixels travel with it"
    batch = pickle.loads(pickled).read((0, 2, 0))  # noqa: S301
    np.testing.assert_array_equal(batch.images_NHWC, expected.images_NHWC)


def _photo_run(make_run: MakeRun, folder: Path, **data: Any) -> RunConfig:
    return make_run("image_folder", path=str(folder), image_size=16, train={"global_batch": 4}, **data)


@pytest.mark.parametrize("augment", [{}, {"random_resized_crop": True, "flip": True}])
def test_photos(augment: Any, images_folder: Path, make_run: MakeRun) -> None:
    run = _photo_run(make_run, images_folder, augment=augment)
    reader = TrainReader(open_data(run.data), run, num_shards=1, shard=0)
    for key in reader.keys(0):
        batch = reader.read(key)
        assert batch.images_NHWC.shape == (4, 16, 16, 3)
        # Class c has grey levels from 80 c to 80 c + 40.
        np.testing.assert_array_equal(np.round((batch.images_NHWC.mean(axis=(1, 2, 3)) - 20) / 80), batch.labels_N)


def _corrupt(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"broken")


def test_a_corrupt_image_ends_training_with_its_name(images_folder: Path, make_run: MakeRun) -> None:
    _corrupt(images_folder, "train/class1/1.jpg", "val/class2/0.jpg")
    run = _photo_run(make_run, images_folder)
    train = TrainReader(open_data(run.data), run, num_shards=1, shard=0)
    evaluation = EvalReader(open_data(run.data), run, num_shards=1, shard=0)
    with pytest.raises(DataError, match=r"class1/1\.jpg can't be read"):
        _read_all(train)
    with pytest.raises(DataError, match=r"class2/0\.jpg can't be read"):
        _read_all(evaluation)


def test_corrupt_images_are_replaced_within_their_class_and_counted(images_folder: Path, make_run: MakeRun) -> None:
    _corrupt(images_folder, "train/class1/1.jpg", "train/class1/3.jpg", "train/class2/2.png")
    run = _photo_run(make_run, images_folder, on_error="skip")
    reader = TrainReader(open_data(run.data), run, num_shards=1, shard=0)
    batches = _read_all(reader)
    assert sum(batch.num_skipped for batch in batches) == 3
    for batch in batches:
        assert batch.weights_N.all()
        np.testing.assert_array_equal(np.round((batch.images_NHWC.mean(axis=(1, 2, 3)) - 20) / 80), batch.labels_N)


def test_a_class_without_a_readable_image_ends_training(images_folder: Path, make_run: MakeRun) -> None:
    _corrupt(images_folder, *(f"train/class2/{name}" for name in ("0.jpg", "1.jpg", "2.png")))
    run = _photo_run(make_run, images_folder, on_error="skip")
    reader = TrainReader(open_data(run.data), run, num_shards=1, shard=0)
    with pytest.raises(DataError, match="no image of the class 'class2' can be read"):
        _read_all(reader)


def test_corrupt_images_do_not_count_in_evaluation(images_folder: Path, make_run: MakeRun) -> None:
    _corrupt(images_folder, "val/class1/1.jpg")
    run = _photo_run(make_run, images_folder, on_error="skip")
    reader = EvalReader(open_data(run.data), run, num_shards=1, shard=0)
    batches = _read_all(reader)
    assert sum(float(batch.weights_N.sum()) for batch in batches) == 5
    assert [batch.num_skipped for batch in batches] == [1, 0]
    assert batches[0].weights_N.tolist() == [1, 1, 1, 0]


def test_arrays_of_another_size_are_resized(cifar_run: RunConfig, make_run: MakeRun) -> None:
    run = make_run("cifar10", image_size=40, augment={"random_resized_crop": True})
    data = open_data(run.data)
    for reader in (TrainReader(data, run, num_shards=1, shard=0), EvalReader(data, run, num_shards=1, shard=0)):
        assert reader.read((0, 0, 0)).images_NHWC.shape == (8, 40, 40, 3)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 5), st.booleans(), st.integers(0, 2**32))
def test_crop_and_flip_is_a_window_of_the_padded_image(padding: int, flip: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    images, uniforms = rng.integers(1, 256, (5, 6, 7, 2)).astype(np.uint8), rng.random((5, 3))
    before = images.copy()
    changed = crop_and_flip(images, padding=padding, flip=flip, uniforms_NK=uniforms)
    np.testing.assert_array_equal(images, before)
    for image, result, (row, column, mirror) in zip(images, changed, uniforms, strict=True):
        padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
        top, left = int(row * (2 * padding + 1)), int(column * (2 * padding + 1))
        window = padded[top : top + 6, left : left + 7]
        np.testing.assert_array_equal(result, window[:, ::-1] if flip and mirror < 0.5 else window)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 2**32))
def test_crop_boxes_lie_inside(width: int, height: int, seed: int) -> None:
    uniforms = np.random.default_rng(seed).random(NUM_RESIZED_CROP)
    left, upper, right, lower = resized_crop_box(width, height, uniforms)
    assert 0 <= left < right <= width
    assert 0 <= upper < lower <= height


def test_crop_boxes_have_the_right_areas_and_aspects() -> None:
    rng = np.random.default_rng(0)
    boxes = np.array([resized_crop_box(500, 400, rng.random(NUM_RESIZED_CROP)) for _ in range(2000)])
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    share, aspect = widths * heights / (500 * 400), widths / heights
    assert share.min() > 0.075
    assert 0.45 < share.mean() < 0.55
    assert 0.74 < aspect.min() < aspect.max() < 1.35


def test_resized_crop_is_the_same_from_a_jpeg_at_full_size(tmp_path: Path) -> None:
    """Decoding at a fraction changes little."""
    ramp = np.add.outer(np.arange(600), np.arange(800))[..., None] * np.array([0.1, 0.15, 0.05])
    Image.fromarray(ramp.astype(np.uint8)).save(tmp_path / "ramp.jpg", quality=95)
    uniforms = np.random.default_rng(1).random(NUM_RESIZED_CROP)
    with Image.open(tmp_path / "ramp.jpg") as file, Image.open(tmp_path / "ramp.jpg") as whole:
        drafted = random_resized_crop(file, size=64, uniforms_K=uniforms)
        expected = random_resized_crop(whole.convert("RGB"), size=64, uniforms_K=uniforms)
    assert np.abs(drafted.astype(int) - expected).max() <= 3


def test_fit_takes_the_centre() -> None:
    pixels = np.zeros((100, 300), np.uint8)
    pixels[:, 120:180] = 200
    fitted = fit_image(Image.fromarray(pixels), size=35)
    assert fitted.shape == (35, 35, 1)
    np.testing.assert_array_equal(fitted[:, 17], 200)
    assert (fitted[:, 0] == 0).all()
    same = np.arange(16, dtype=np.uint8).reshape(4, 4)
    np.testing.assert_array_equal(fit_image(Image.fromarray(same), size=4)[..., 0], same)
    assert stretch_image(Image.fromarray(pixels), size=10).shape == (10, 10, 1)


def test_uniforms_are_uniform_and_independent() -> None:
    numbers = sample_uniforms(np.arange(20_000), num_each=4, seed=1, epoch=2)
    assert 0 <= numbers.min() < numbers.max() < 1
    np.testing.assert_allclose(numbers.mean(axis=0), 0.5, atol=0.01)
    np.testing.assert_allclose(numbers.var(axis=0), 1 / 12, atol=0.003)
    others = [sample_uniforms(np.arange(20_000), num_each=4, seed=s, epoch=e) for s, e in ((2, 2), (1, 3), (2, 1))]
    table = np.concatenate([numbers, np.roll(numbers, 1, axis=0), *others], axis=1)
    correlation = np.corrcoef(table.T) - np.eye(table.shape[1])
    assert np.abs(correlation).max() < 0.04


def test_random_bits_stay_as_they_are() -> None:
    """Augmentation and order of old runs can be repeated."""
    assert mixed_bits(np.arange(2), seed=(1, 2)).tolist() == [7666244540766650632, 7865826419084920506]


@pytest.mark.parametrize(("sampler", "limit"), [("stratified", 1.0), ("random", 30.0)])
def test_inspection_counts_what_readers_show(
    sampler: str, limit: float, cifar_run: RunConfig, make_run: MakeRun
) -> None:
    run = make_run("cifar10", sampler=sampler)
    report = inspect_data(run, 4)
    shown = np.zeros_like(report.counts_RC)
    worst = 0.0
    for shard in range(4):
        reader = TrainReader(open_data(run.data), run, num_shards=4, shard=shard)
        for key in reader.keys(0):
            batch = reader.read(key)
            counts = np.bincount(batch.labels_N, weights=batch.weights_N, minlength=10)
            shown[shard] += counts.astype(int)
            worst = max(worst, float(np.abs(counts - counts.sum() * 0.1).max()))
    np.testing.assert_array_equal(report.counts_RC, shown)
    assert report.micro_batch_deviation == pytest.approx(worst)
    assert report.largest_deviation == pytest.approx(np.abs(shown - 5 / 4).max())
    assert report.largest_deviation < limit
    assert (report.num_updates, report.num_dropped, report.num_eval) == (7, 0, 10)
    assert report.costs_R.tolist() == report.samples_R.tolist() == shown.sum(axis=1).tolist()


def test_inspection_sums_file_sizes(images_folder: Path, make_run: MakeRun) -> None:
    report = inspect_data(_photo_run(make_run, images_folder), 2)
    total = sum(path.stat().st_size for path in (images_folder / "train").rglob("*.*"))
    assert (report.cost_unit, report.costs_R.sum()) == ("bytes", total)
    assert report.as_dict()["counts"] == report.counts_RC.tolist()


@pytest.mark.parametrize("channels", [{"pad_to": 4}, {"space_to_depth": 2, "pad": 1, "order": [*range(12, -1, -1)]}])
def test_channels_are_regrouped_after_everything_else(
    make_run: MakeRun, cifar: Arrays, cache: Path, channels: dict[str, Any]
) -> None:
    cache.mkdir()
    write_prepared(cache / "cifar10", cifar, class_names=CLASS_NAMES, origin="test")
    data = {"augment": {"crop_padding": 4, "flip": True}, "num_eval": 7}
    batches, sets = [], []
    for more in ({}, {"channels": channels}):
        run = make_run("cifar10", **data, **more)
        datasets = open_data(run.data)
        train = TrainReader(datasets, run, num_shards=1, shard=0)
        evaluation = EvalReader(datasets, run, num_shards=1, shard=0)
        batches.append([*_read_all(train), *_read_all(evaluation)])
        sets.append(datasets)
    plain, regrouped = sets
    regrouping = ChannelRegrouping.of(3, **channels)
    assert regrouped.regrouping == regrouping
    assert regrouped.num_channels == 3
    assert regrouped.image_shape_HWC == (32, 32, 3)
    for before, after in zip(*batches, strict=True):
        assert after.images_NHWC.shape[1:] == regrouped.network_shape_HWC
        moved = regrouping.images(before.images_NHWC.transpose(0, 3, 1, 2))
        np.testing.assert_array_equal(after.images_NHWC.transpose(0, 3, 1, 2), moved)
        scaled = before.images_NHWC * np.array(plain.pixel_scale.factor_C) + np.array(plain.pixel_scale.offset_C)
        got = after.images_NHWC * np.array(regrouped.pixel_scale.factor_C) + np.array(regrouped.pixel_scale.offset_C)
        np.testing.assert_array_equal(got.transpose(0, 3, 1, 2), regrouping.images(scaled.transpose(0, 3, 1, 2)))


@pytest.mark.parametrize(
    ("channels", "told"),
    [
        ({"pad_to": 2}, "data.channels: there are more channels already than channels are padded to (got 3 channels"),
        ({"order": [0, 1]}, "data.channels: the order of the channels does not hold every channel once (got missing 2"),
        ({"space_to_depth": 5}, "got 32x32 pixels, blocks of 5, expected multiples of 5). Use images of 30x30 pixels"),
    ],
)
def test_channels_that_do_not_fit_the_images_are_refused(
    make_run: MakeRun, cifar: Arrays, cache: Path, channels: dict[str, Any], told: str
) -> None:
    cache.mkdir()
    write_prepared(cache / "cifar10", cifar, class_names=CLASS_NAMES, origin="test")
    with pytest.raises(ConfigError) as error:
        open_data(make_run("cifar10", channels=channels).data)
    assert told in str(error.value)

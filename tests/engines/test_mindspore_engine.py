"""The MindSpore engine in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore")

import mindspore as ms
from mindspore import nn

from convmesh.config.schema import ModelConfig
from convmesh.engines import engine_of, load_engine
from convmesh.engines.contract import Batch, Engine, PixelScale
from convmesh.errors import CheckpointError, DataError, ModelError
from tests.multiprocess import mindspore_cases as cases

pytestmark = [pytest.mark.mindspore, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = load_engine("mindspore")
    engine.start(cases.single_world())
    yield engine
    engine.stop()


def new_network(engine: Engine, *, seed: int = 1, **model: Any) -> nn.Cell:
    config = ModelConfig(**{"name": "cnn-small", **model})
    return engine.build_network(config, num_classes=10, num_channels=3, seed=seed)


def mistakes() -> dict[str, Any]:
    return {
        "missing": ("no.such.module:thing", "can't be imported"),
        "fails": (f"{__name__}:failing_factory", "failed"),
        "other": (f"{__name__}:number_factory", "did not return a network"),
    }


def failing_factory() -> None:
    raise RuntimeError("no luck")


def number_factory() -> int:
    return 3


class Convolutions(nn.Cell):
    """A user's network whose output is not one score per class."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def construct(self, x: Any) -> Any:
        return self.conv(x)


class Scores(nn.Cell):
    """A user's network with layers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, 3)
        self.flatten = nn.Flatten()
        self.dense = nn.Dense(48, 5)

    def construct(self, x: Any) -> Any:
        return self.dense(self.flatten(self.norm(x)))


def test_the_seed_alone_decides_initial_weights(engine: Engine) -> None:
    from convmesh.engines.mindspore.state import export_network

    first, again, other = (export_network(new_network(engine, seed=seed)) for seed in (1, 1, 2))
    for name, value in first.items():
        np.testing.assert_array_equal(again[name], value)
    assert not np.array_equal(first["conv1.weight"], other["conv1.weight"])


@pytest.mark.parametrize("kind", ["missing", "fails", "other"])
def test_a_bad_factory_is_told_in_a_sentence(engine: Engine, kind: str) -> None:
    factory, sentence = mistakes()[kind]
    with pytest.raises(ModelError, match=sentence):
        engine.build_network(ModelConfig(factory=factory), num_classes=10, num_channels=3, seed=0)


def test_output_width(engine: Engine) -> None:
    assert engine.output_width(new_network(engine), image_shape_HWC=(8, 8, 3)) == 10
    with pytest.raises(ModelError, match="not one score per sample"):
        engine.output_width(Convolutions(), image_shape_HWC=(8, 8, 3))
    with pytest.raises(ModelError, match="8x8 image of 1 channels"):
        engine.output_width(new_network(engine), image_shape_HWC=(8, 8, 1))


def test_weights_are_read_and_misfits_listed(engine: Engine, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from convmesh.engines.mindspore.state import export_network

    arrays = export_network(new_network(engine, seed=7))
    save_file(arrays, tmp_path / "good.safetensors")
    loaded = new_network(engine, seed=1, weights=str(tmp_path / "good.safetensors"))
    np.testing.assert_array_equal(export_network(loaded)["fc.weight"], arrays["fc.weight"])
    arrays["head.weight"] = arrays.pop("fc.weight")
    arrays["fc.bias"] = arrays["fc.bias"][:3]
    save_file(arrays, tmp_path / "bad.safetensors")
    with pytest.raises(ModelError, match=r"fc\.weight.*head\.weight.*fc\.bias"):
        new_network(engine, weights=str(tmp_path / "bad.safetensors"))
    (tmp_path / "weights.pth").touch()
    with pytest.raises(ModelError, match="safetensors"):
        new_network(engine, weights=str(tmp_path / "weights.pth"))


def test_layers_get_the_names_of_torchvision() -> None:
    from convmesh.engines.mindspore.state import named_parameters

    assert engine_of(Scores()) == "mindspore"
    assert set(named_parameters(Scores())) == {"norm.weight", "norm.bias", "dense.weight", "dense.bias"}


def test_own_optimizers_go_through_arrays() -> None:
    from convmesh.engines.mindspore.state import export_optimizer, import_optimizer

    network = Scores()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    arrays = export_optimizer(optimizer, network)
    assert "momentum/norm.weight" in arrays
    arrays["momentum/dense.bias"] = np.arange(5, dtype=np.float32)
    import_optimizer(optimizer, network, arrays)
    np.testing.assert_array_equal(export_optimizer(optimizer, network)["momentum/dense.bias"], np.arange(5))
    del arrays["momentum/dense.bias"]
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: momentum/dense\.bias"):
        import_optimizer(optimizer, network, arrays)


def test_resumed_updates_are_the_same_bit_for_bit(engine: Engine) -> None:
    parts: dict[str, Any] = {"model": {"args": {"batch_norm": True}}, "optimizer": {"name": "adamw"}}
    parts["train"] = {"weight_average": 0.9}
    world = cases.single_world()
    whole = cases.train(engine, world, counts=(16, 16, 16, 5), **parts)
    begun = cases.train(engine, world, counts=(16, 16), **parts)
    resumed = cases.train(engine, world, counts=(16, 5), start=begun["state"], first_update=2, **parts)
    for kind in ("network", "optimizer", "average"):
        for name, value in getattr(whole["state"], kind).items():
            np.testing.assert_array_equal(getattr(resumed["state"], kind)[name], value, err_msg=name)
    assert resumed["evaluation"] == whole["evaluation"]
    assert resumed["state"].num_updates == 4


def test_another_learning_rate_compiles_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    step = engine.build_step(new_network(engine), cases.run_config(), pixel_scale=cases.SCALE)
    batches = cases.micro_batches(0, 16, num_shards=1, shard=0, accumulation=1)
    settings = {"global_count": 16, "loss_scale": 1.0}
    step.update(batches, learning_rate=0.1, update_index=0, **settings)
    # Dividing by a loss scale is another graph than not dividing; by another loss scale it is the same.
    step.update(batches, learning_rate=0.1, update_index=0, **{**settings, "loss_scale": 4.0})
    step.evaluate(batches[0])
    compiled: list[str] = []
    compile_cell = nn.Cell.compile

    def note(cell: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        before = len(cell.compile_cache)
        result = compile_cell(cell, *args, **kwargs)
        compiled.extend([type(cell).__name__] * (len(cell.compile_cache) - before))
        return result

    monkeypatch.setattr(nn.Cell, "compile", note)
    step.update(batches, learning_rate=0.05, update_index=1, **{**settings, "loss_scale": 2.0})
    step.evaluate(batches[0])
    step.update(batches, learning_rate=0.01, update_index=2, **settings)
    assert compiled == []


def test_a_state_that_does_not_fit_changes_nothing(engine: Engine) -> None:
    step = engine.build_step(new_network(engine), cases.run_config(), pixel_scale=cases.SCALE)
    state = step.export_state()
    state.network["conv1.weight"] = np.zeros_like(state.network["conv1.weight"])
    del state.optimizer["momentum/fc.bias"]
    with pytest.raises(CheckpointError, match=r"momentum/fc\.bias"):
        step.import_state(state)
    assert step.local_tensors()["conv1.weight"].any()


def test_images_must_have_the_channels_of_the_scale(engine: Engine) -> None:
    scale = PixelScale(factor_C=(1.0,), offset_C=(0.0,))
    step = engine.build_step(new_network(engine), cases.run_config(), pixel_scale=scale)
    images, labels = cases.global_batch(0, 4)
    with pytest.raises(DataError, match="number of channels"):
        step.evaluate(Batch(images, labels, np.ones(4, np.float32)))


class CountingReader:
    """Micro-batches that tell their key, and one that can't be read."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def read(self, key: tuple[int, int, int]) -> Batch:
        if key[1] == self.bad:
            raise DataError("an image is corrupt", got="photo.png", fix="Delete it")
        images = np.full((2, 4, 4, 3), key[1], np.uint8)
        return Batch(images, np.array([key[0], key[1]], np.int32), np.array([1, 0], np.float32), num_skipped=key[2])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_micro_batches_come_in_order(engine: Engine, num_workers: int) -> None:
    keys = [(3, update, update % 2) for update in range(9)]
    batches = list(engine.load(CountingReader(), keys, num_workers=num_workers))
    assert [int(batch.images_NHWC[0, 0, 0, 0]) for batch in batches] == list(range(9))
    assert [batch.labels_N.asnumpy().tolist() for batch in batches] == [[3, update] for update in range(9)]
    assert [batch.num_skipped for batch in batches] == [update % 2 for update in range(9)]
    assert str(batches[0].images_NHWC.dtype) == "UInt8"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_of_a_reader_come_through(engine: Engine, num_workers: int) -> None:
    batches = engine.load(CountingReader(bad=2), [(0, update, 0) for update in range(4)], num_workers=num_workers)
    next(batches)
    next(batches)
    with pytest.raises(DataError, match=r"photo\.png") as caught:
        next(batches)
    assert caught.value.fix == "Delete it"


def test_an_early_end_leaves_nothing_waiting(engine: Engine) -> None:
    batches = engine.load(CountingReader(), [(0, update, 0) for update in range(1000)], num_workers=0)
    next(batches)
    batches.close()  # type: ignore[attr-defined]


def test_single_rank_gathers_itself(engine: Engine) -> None:
    assert engine.all_gather({"a": 0.1}) == [{"a": 0.1}]
    assert engine.peak_memory_bytes() > 10**7
    assert engine.versions()["mindspore"] == ms.__version__

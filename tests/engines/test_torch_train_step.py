"""One rank of PyTorch: precision, overflow, evaluation, averages, randomness, state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import nn

from convmesh.engines.contract import Batch, PixelScale, TrainState, World
from convmesh.engines.torch.engine import TorchEngine, create_engine
from convmesh.engines.torch.storage import StorageOrder
from convmesh.errors import CheckpointError, DataError, ModelError
from convmesh.mesh import Mesh
from tests.multiprocess.torch_cases import SCALE, micro_batches, new_network, run_config

pytestmark = pytest.mark.torch

WORLD = World(rank=0, num_ranks=1, local_rank=0, num_local_ranks=1, mesh=Mesh({}), device="cpu", num_threads=1)


@pytest.fixture
def engine() -> Iterator[TorchEngine]:
    engine = create_engine()
    engine.start(WORLD)
    yield engine
    engine.stop()


def update(step: Any, number: int = 0, *, loss_scale: float = 1.0, count: int = 16, batch: Batch | None = None) -> Any:
    batches = micro_batches(number, count, num_shards=1, shard=0, accumulation=1)
    return step.update(
        [batch] if batch else batches,
        global_count=count,
        learning_rate=0.05,
        loss_scale=loss_scale,
        update_index=number,
    )


@pytest.mark.parametrize(("compute", "bound"), [("float16", 3e-3), ("bfloat16", 3e-2)])
def test_half_precision_is_near_float32_and_loss_scale_cancels(engine: TorchEngine, compute: str, bound: float) -> None:
    weights = {}
    for name, scale in (("float32", 1.0), (compute, 1024.0)):
        step = engine.build_step(new_network(), run_config(precision={"compute": name}), pixel_scale=SCALE)
        result = update(step, loss_scale=scale)
        assert not result.overflow
        weights[name] = step.local_tensors()["conv2.weight"]
    start = new_network().state_dict()["conv2.weight"].numpy()
    change = weights["float32"] - start
    error = np.linalg.norm(weights[compute] - weights["float32"]) / np.linalg.norm(change)
    assert 1e-6 < error < bound * 10


def test_a_skipped_update_leaves_no_trace(engine: TorchEngine) -> None:
    run = run_config(precision={"compute": "float16"}, train={"weight_average": 0.5})
    step = engine.build_step(new_network(batch_norm=True), run, pixel_scale=SCALE)
    update(step, 0)
    before = step.export_state()
    assert update(step, 1, loss_scale=1e38).overflow
    after = step.export_state()
    for part in ("network", "optimizer", "average"):
        for name, value in getattr(before, part).items():
            np.testing.assert_array_equal(getattr(after, part)[name], value, err_msg=name)
    assert after.num_updates == 1
    assert not update(step, 2).overflow


def test_finite_gradients_with_huge_squares_are_no_overflow(engine: TorchEngine) -> None:
    step = engine.build_step(new_network(), run_config(optimizer={"clip_norm": 1.0}), pixel_scale=SCALE)
    result = update(step, loss_scale=1e22)
    assert not result.overflow
    reference = engine.build_step(new_network(), run_config(optimizer={"clip_norm": 1.0}), pixel_scale=SCALE)
    assert float(result.gradient_norm) == pytest.approx(float(update(reference).gradient_norm), rel=1e-3)


def test_evaluation_counts_each_real_sample_once(engine: TorchEngine) -> None:
    network = new_network(batch_norm=True)
    step = engine.build_step(network, run_config(train={"label_smoothing": 0.3}), pixel_scale=SCALE)
    update(step)
    buffers = step.local_tensors()
    (batch,) = micro_batches(5, 8, num_shards=1, shard=0, accumulation=1)
    padded = replace(batch, weights_N=np.array([1, 1, 1, 1, 1, 0, 0, 0], np.float32))
    sums = step.evaluate(padded)
    network.eval()
    x = torch.from_numpy(batch.images_NHWC[:5]).float() * torch.tensor(SCALE.factor_C) + torch.tensor(SCALE.offset_C)
    labels = torch.from_numpy(batch.labels_N[:5]).long()
    with torch.no_grad():
        scores = network(x.permute(0, 3, 1, 2))
    assert float(sums.num_samples) == 5
    assert float(sums.num_correct) == int((scores.argmax(1) == labels).sum())
    expected = F.cross_entropy(scores, labels, reduction="sum").item()
    assert float(sums.loss_sum) == pytest.approx(expected, rel=1e-5), "evaluation has no label smoothing"
    for name, value in step.local_tensors().items():
        np.testing.assert_array_equal(value, buffers[name])


def test_evaluation_uses_the_weight_average(engine: TorchEngine) -> None:
    decay = 0.75
    step = engine.build_step(new_network(), run_config(train={"weight_average": decay}), pixel_scale=SCALE)
    average = step.local_tensors()
    for number in range(3):
        update(step, number)
        now = step.local_tensors()
        average = {name: decay * value + (1 - decay) * now[name] for name, value in average.items()}
    state = step.export_state()
    for name, value in average.items():
        np.testing.assert_allclose(state.average[name], value, rtol=1e-5, atol=1e-7)
    plain = engine.build_step(new_network(), run_config(), pixel_scale=SCALE)
    plain.import_state(TrainState(network=average))
    (batch,) = micro_batches(9, 8, num_shards=1, shard=0, accumulation=1)
    assert float(step.evaluate(batch).loss_sum) == pytest.approx(float(plain.evaluate(batch).loss_sum), rel=1e-5)


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.dropout, self.fc = nn.Flatten(), nn.Dropout(0.5), nn.Linear(432, 10)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        return self.fc(self.dropout(self.flatten(x_NCHW)))


def test_dropout_depends_on_seed_and_update_alone(engine: TorchEngine) -> None:
    def weights(seed: int, number: int) -> np.ndarray:
        torch.manual_seed(1)
        step = engine.build_step(WithDropout(), run_config(train={"seed": seed}), pixel_scale=SCALE)
        torch.manual_seed(number * 17 + seed)
        (batch,) = micro_batches(0, 16, num_shards=1, shard=0, accumulation=1)
        update(step, number, batch=batch)
        return step.local_tensors()["fc.weight"]

    np.testing.assert_array_equal(weights(0, 3), weights(0, 3))
    assert (weights(0, 3) != weights(0, 4)).any()
    assert (weights(0, 3) != weights(1, 3)).any()


def test_norm_and_bias_do_not_decay_unless_told(engine: TorchEngine) -> None:
    def norm_change(**optimizer: Any) -> float:
        network = new_network(batch_norm=True)
        step = engine.build_step(network, run_config(optimizer={"weight_decay": 0.5, **optimizer}), pixel_scale=SCALE)
        update(step)
        return float(step.local_tensors()["bn1.weight"].mean())

    assert norm_change(decay_norm_and_bias=True) < norm_change() - 0.02


def test_a_single_value_per_channel_is_a_sentence(engine: TorchEngine) -> None:
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 10))
    step = engine.build_step(network, run_config(), pixel_scale=SCALE)
    with pytest.raises(ModelError, match="last_batch: drop"):
        update(step, count=1)


def test_channels_that_do_not_fit_the_scale_are_refused(engine: TorchEngine) -> None:
    step = engine.build_step(new_network(), run_config(), pixel_scale=PixelScale((1.0,), (0.0,)))
    with pytest.raises(DataError, match="got 3, expected 1"):
        update(step)


def test_a_network_without_parameters_is_refused(engine: TorchEngine) -> None:
    with pytest.raises(ModelError, match="no trainable parameter"):
        engine.build_step(nn.Flatten(), run_config(), pixel_scale=SCALE)


def test_a_state_that_does_not_fit_changes_nothing(engine: TorchEngine) -> None:
    step = engine.build_step(new_network(), run_config(optimizer={"name": "adamw"}), pixel_scale=SCALE)
    update(step)
    before = step.export_state()
    bad = TrainState(
        network={**{name: value * 2 for name, value in before.network.items() if name != "fc.bias"}, "x": np.ones(1)},
        optimizer={f"momentum/{name}": value for name, value in before.network.items()},
    )
    with pytest.raises(CheckpointError) as caught:
        step.import_state(bad)
    text = str(caught.value)
    for part in (
        "the checkpoint lacks 1 tensor: fc.bias",
        "unexpected tensor: x",
        "exp_avg/conv1.weight",
        "momentum/",
    ):
        assert part in text
    for name, value in step.local_tensors().items():
        np.testing.assert_array_equal(value, before.network[name])


def test_exported_arrays_are_plain_copies(engine: TorchEngine) -> None:
    step = engine.build_step(new_network(), run_config(), pixel_scale=SCALE)
    update(step)
    state = step.export_state()
    weight = state.network["conv2.weight"]
    assert weight.flags.c_contiguous
    assert weight.shape == (64, 32, 3, 3)
    kept = weight.copy()
    update(step, 1)
    np.testing.assert_array_equal(weight, kept)
    assert step.optimizer_bytes() == 4 * step.num_parameters() == 4 * 66_362


@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (8, 5, 1, 1), (1, 3, 2, 5), (7,), (), (3, 4)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_storage_order_cuts_and_joins_any_memory_format(shape: tuple[int, ...], channels_last: bool) -> None:
    tensor = torch.arange(float(np.prod(shape))).reshape(shape)
    if channels_last and tensor.ndim == 4:
        tensor = tensor.to(memory_format=torch.channels_last)
    order = StorageOrder.of(tensor)
    flat = order.flatten(tensor)
    assert flat.data_ptr() == tensor.data_ptr()
    again = order.unflatten(flat, tensor.shape)
    assert torch.equal(again, tensor)
    assert again.stride() == tensor.stride() or 1 in shape


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("compute", ["float32", "float16", "bfloat16"])
def test_a_gpu_trains_as_the_cpu_does(compute: str) -> None:
    weights = {}
    for device in ("cpu", "cuda"):
        engine = create_engine()
        engine.start(replace(WORLD, device=device))
        network = new_network(batch_norm=True).to(device)
        run = run_config(precision={"compute": compute}, optimizer={"name": "adamw"}, train={"weight_average": 0.9})
        step = engine.build_step(network, run, pixel_scale=SCALE)
        keys = [(0, number, 0) for number in range(3)]
        for number, batch in enumerate(engine.load(_Updates(), keys, num_workers=1)):
            assert not update(step, number, batch=batch, loss_scale=8.0).overflow
        weights[device] = step.local_tensors()["conv2.weight"]
        resumed = engine.build_step(new_network(batch_norm=True).to(device), run, pixel_scale=SCALE)
        resumed.import_state(step.export_state())
        update(resumed, 3)
        update(step, 3)
        np.testing.assert_allclose(resumed.local_tensors()["fc.weight"], step.local_tensors()["fc.weight"], rtol=1e-3)
        engine.stop()
    error = np.linalg.norm(weights["cuda"] - weights["cpu"]) / np.linalg.norm(weights["cpu"])
    assert error < (1e-2 if compute == "float32" else 1e-1)


class _Updates:
    def read(self, key: tuple[int, int, int]) -> Batch:
        return micro_batches(key[1], 16, num_shards=1, shard=0, accumulation=1)[0]

"""The PyTorch engine in one process: networks, weights, loading, where ranks meet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

from convmesh.config.schema import ModelConfig
from convmesh.engines import engine_of
from convmesh.engines.contract import Batch, World
from convmesh.engines.torch.engine import TorchEngine, create_engine, first_host, meeting_point
from convmesh.engines.torch.loader import SHARED_BYTES
from convmesh.errors import DataError, EngineError, ModelError
from convmesh.mesh import Mesh
from convmesh.training.hand_over import hand_over_seconds

pytestmark = pytest.mark.torch

WORLD = World(rank=0, num_ranks=1, local_rank=0, num_local_ranks=1, mesh=Mesh({}), device="cpu", num_threads=1)


@pytest.fixture
def engine() -> Iterator[TorchEngine]:
    engine = create_engine()
    engine.start(WORLD)
    yield engine
    engine.stop()


def build(engine: TorchEngine, seed: int = 0, **model: Any) -> Any:
    return engine.build_network(ModelConfig(**model), num_classes=10, num_channels=3, seed=seed)


# Factories, as a user would write them.
def linear(num_out: int = 10) -> Any:
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, num_out))


def failing() -> Any:
    raise KeyError("no such file of settings")


def not_a_network() -> int:
    return 3


def without_flatten() -> Any:
    return torch.nn.Conv2d(3, 10, 1)


HERE = "tests.engines.test_torch_engine" if __name__.startswith("tests.") else __name__


def test_initial_weights_depend_on_the_seed_alone(engine: TorchEngine) -> None:
    torch.manual_seed(5)
    first = build(engine, seed=1, name="cnn-small")
    torch.manual_seed(6)
    drawn = torch.rand(1)
    torch.manual_seed(6)
    again, other = build(engine, seed=1, name="cnn-small"), build(engine, seed=2, name="cnn-small")
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert torch.equal(torch.rand(1), drawn), "the user's generator is left alone"


def test_data_decides_classes_and_channels_unless_told(engine: TorchEngine) -> None:
    assert build(engine, name="cnn-small").fc.out_features == 10
    assert build(engine, name="cnn-small", args={"num_classes": 4}).fc.out_features == 4


def test_a_users_factory_is_called_with_its_args(engine: TorchEngine) -> None:
    network = build(engine, factory=f"{HERE}:linear", args={"num_out": 7})
    assert engine.output_width(network, image_shape_HWC=(9, 8, 3)) == 7
    assert engine_of(network) == "torch"


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("no_such_package:net", "No module named 'no_such_package'"),
        (f"{HERE}:no_such_function", "no_such_function"),
        (f"{HERE}:failing", "no such file of settings"),
        (f"{HERE}:not_a_network", "got int"),
    ],
)
def test_a_factory_that_fails_is_a_sentence(engine: TorchEngine, factory: str, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        build(engine, factory=factory)


def test_outputs_that_are_no_scores_are_refused(engine: TorchEngine) -> None:
    with pytest.raises(ModelError, match=r"\(1, 10, 8, 8\)"):
        engine.output_width(without_flatten(), image_shape_HWC=(8, 8, 3))
    with pytest.raises(ModelError, match="8x8 image of 1 channels"):
        engine.output_width(without_flatten(), image_shape_HWC=(8, 8, 1))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_load_from_both_kinds_of_file(engine: TorchEngine, tmp_path: Path, suffix: str) -> None:
    state = build(engine, seed=7, name="cnn-small", args={"batch_norm": True}).state_dict()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": state, "epoch": 3}, path)
    else:
        save_file({name: value for name, value in state.items() if "num_batches" not in name}, path)
    network = build(engine, name="cnn-small", args={"batch_norm": True}, weights=str(path))
    for name, value in network.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_weights_that_do_not_fit_are_listed(engine: TorchEngine, tmp_path: Path) -> None:
    state = build(engine, name="cnn-small").state_dict()
    state["extra"] = state.pop("conv1.bias")
    state["fc.weight"] = torch.zeros(3, 80)
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(ModelError) as caught:
        build(engine, name="cnn-small", weights=str(tmp_path / "other.safetensors"))
    for text in ("lacks 1 tensor: conv1.bias", "1 unexpected tensor: extra", "fc.weight (3, 80) for (10, 80)"):
        assert text in str(caught.value)


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def test_pickled_code_is_never_executed(engine: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"conv1.weight": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(ModelError, match="can't be read"):
        build(engine, name="cnn-small", weights=str(tmp_path / "evil.pth"))
    assert not (tmp_path / "executed").exists()


class Counting:
    """Images filled with the update's number; update 5 is corrupt."""

    def read(self, key: tuple[int, int, int]) -> Batch:
        if key[1] == 5:
            raise DataError("image 5 is corrupt", fix="Delete it")
        images = np.full((2, 4, 4, 3), key[1], np.uint8)
        images.flags.writeable = False
        return Batch(images, np.array([1, 2], np.int32), np.array([1, 0], np.float32), num_skipped=key[1])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_micro_batches_come_in_order_whoever_reads_them(engine: TorchEngine, num_workers: int) -> None:
    keys = [(0, update, 0) for update in (3, 1, 2, 0)]
    batches = list(engine.load(Counting(), keys, num_workers=num_workers))
    assert [int(batch.images_NHWC[0, 0, 0, 0]) for batch in batches] == [3, 1, 2, 0]
    assert [batch.num_skipped for batch in batches] == [3, 1, 2, 0]
    assert batches[0].images_NHWC.dtype == torch.uint8
    assert batches[0].num_real == 1
    assert list(engine.load(Counting(), [], num_workers=num_workers)) == []


class Sized:
    """Images of so many bytes, filled with the update's number."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def read(self, key: tuple[int, int, int]) -> Batch:
        images = np.full((1, 1, self._num_bytes, 1), key[1], np.uint8)
        return Batch(images, np.array([key[1]], np.int32), np.ones(1, np.float32))


@pytest.mark.parametrize("num_bytes", [SHARED_BYTES - 1, SHARED_BYTES])
def test_small_and_large_micro_batches_come_from_workers_alike(engine: TorchEngine, num_bytes: int) -> None:
    batches = list(engine.load(Sized(num_bytes), [(0, update, 0) for update in range(3)], num_workers=1))
    for update, batch in enumerate(batches):
        assert batch.images_NHWC.shape == (1, 1, num_bytes, 1)
        assert (batch.images_NHWC == update).all()
        assert (batch.labels_N.dtype, batch.labels_N.tolist()) == (torch.int64, [update])
        assert (batch.weights_N.dtype, batch.weights_N.tolist()) == (torch.float32, [1])


def test_handing_over_a_micro_batch_is_measured(engine: TorchEngine) -> None:
    batch = Sized(100).read((0, 1, 0))
    seconds = hand_over_seconds(engine, batch, accumulation=2)
    assert 0 < seconds < 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_readers_error_arrives_as_it_was_raised(engine: TorchEngine, num_workers: int) -> None:
    batches = engine.load(Counting(), [(0, 4, 0), (0, 5, 0)], num_workers=num_workers)
    next(batches)
    with pytest.raises(DataError) as caught:
        next(batches)
    assert str(caught.value) == "image 5 is corrupt. Delete it."
    assert caught.value.fix == "Delete it"


def test_one_rank_gathers_its_own_value(engine: TorchEngine) -> None:
    assert engine.all_gather({"a": 1}) == [{"a": 1}]


def test_memory_and_versions_are_told(engine: TorchEngine) -> None:
    assert engine.peak_memory_bytes() > 50 * 2**20
    assert engine.versions()["torch"] == torch.__version__


def test_stop_leaves_pytorch_as_it_was() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    engine = create_engine()
    engine.start(WORLD)
    assert torch.are_deterministic_algorithms_enabled()
    engine.stop()
    engine.stop()
    assert torch.are_deterministic_algorithms_enabled() is before


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("node7", "node7"), ("a1,b2", "a1"), ("gpu[03-05,9],x1", "gpu03"), ("r[1-2]-ib", "r1-ib")],
)
def test_the_first_host_of_a_slurm_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_ranks_meet_where_torchrun_or_slurm_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EngineError, match="where to meet"):
        meeting_point()
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu[2-3]")
    monkeypatch.setenv("SLURM_JOB_ID", "40007")
    assert meeting_point() == ("gpu2", "29507")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert meeting_point() == ("127.0.0.1", "1234")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_a_sentence() -> None:
    world = World(rank=0, num_ranks=1, local_rank=0, num_local_ranks=1, mesh=Mesh({}), device="cuda", num_threads=1)
    with pytest.raises(EngineError, match="no CUDA GPU"):
        create_engine().start(world)


def test_an_unreachable_port_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        mesh = Mesh({"data": 2})
        world = World(rank=0, num_ranks=2, local_rank=0, num_local_ranks=2, mesh=mesh, device="cpu", num_threads=1)
        begun = time.monotonic()
        with pytest.raises(EngineError, match=r"could not join the others at 127\.0\.0\.1"):
            create_engine().start(world)
        assert time.monotonic() - begun < 60

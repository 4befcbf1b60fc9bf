"""The networks of both engines are the same functions, and train alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore")
pytest.importorskip("torch")

import torch
from mindspore import Tensor

from convmesh.engines import load_engine
from convmesh.engines.mindspore.state import export_network, import_network
from convmesh.errors import ModelError
from convmesh.models import mindspore as ours
from convmesh.models import torch as theirs
from tests.multiprocess import mindspore_cases as cases

pytestmark = [pytest.mark.mindspore, pytest.mark.torch, pytest.mark.timeout(240)]

NETWORKS: list[tuple[str, dict[str, Any], int]] = [
    ("cnn-small", {}, 12),
    ("cnn-small", {"batch_norm": True}, 13),
    ("resnet18", {}, 65),
    ("resnet18", {"small_images": True}, 16),
    ("resnet50", {}, 64),
]


def torch_arrays(network: Any) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in network.state_dict().items()}


@pytest.fixture(autouse=True)
def _started() -> None:
    load_engine("mindspore").start(cases.single_world())


@pytest.mark.parametrize(("name", "args", "size"), NETWORKS)
def test_forward_agrees(name: str, args: dict[str, Any], size: int) -> None:
    torch.manual_seed(3)
    reference = theirs.build(name, num_classes=7, **args).eval()
    generator = np.random.default_rng(0)
    arrays = torch_arrays(reference)
    for key, value in arrays.items():
        if key.endswith(("running_mean", "running_var")):
            arrays[key] = value + generator.uniform(0.0, 0.5, value.shape).astype(np.float32)
    reference.load_state_dict({key: torch.from_numpy(np.asarray(value)) for key, value in arrays.items()})
    network = ours.build(name, num_classes=7, seed=0, **args)
    network.set_train(False)
    import_network(network, arrays)
    x = generator.standard_normal((2, 3, size, size)).astype(np.float32)
    with torch.no_grad():
        expected = reference(torch.from_numpy(x)).numpy()
    got = network(Tensor(x)).asnumpy()
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-4


@pytest.mark.parametrize("name", ["cnn-small", "resnet18", "resnet50"])
def test_same_names_shapes_and_spread(name: str) -> None:
    torch.manual_seed(0)
    expected = torch_arrays(theirs.build(name, num_classes=10))
    got = export_network(ours.build(name, num_classes=10, seed=0))
    names = {key for key in expected if not key.endswith("num_batches_tracked")}
    assert set(got) == names
    for key in names:
        assert got[key].shape == expected[key].shape
        if expected[key].size > 2000:
            assert got[key].std() == pytest.approx(expected[key].std(), rel=0.1)


def test_unknown_names_and_arguments_are_told() -> None:
    with pytest.raises(ModelError, match="Did you mean resnet50"):
        ours.build("resnet51")
    with pytest.raises(ModelError, match="small_images"):
        ours.build("resnet18", small_image=True)


@pytest.mark.parametrize(
    ("optimizer", "args"),
    [({}, {}), ({"name": "adamw", "learning_rate": 1e-3}, {}), ({"clip_norm": 0.5}, {"batch_norm": True})],
    ids=["sgd", "adamw", "clipped"],
)
def test_both_engines_train_alike(optimizer: dict[str, Any], args: dict[str, Any]) -> None:
    parts: dict[str, Any] = {"optimizer": optimizer, "model": {"args": args}, "train": {"label_smoothing": 0.1}}
    run = cases.run_config(**parts)
    steps = {}
    start = None
    for name in ("mindspore", "torch"):
        engine = load_engine(name)
        engine.start(cases.single_world())
        network = engine.build_network(run.model, num_classes=10, num_channels=3, seed=1)
        steps[name] = engine.build_step(network, run, pixel_scale=cases.SCALE)
    start = steps["torch"].export_state()
    steps["mindspore"].import_state(start)
    for update in range(3):
        batches = cases.micro_batches(update, 16, num_shards=1, shard=0, accumulation=2)
        settings = {"global_count": 16, "learning_rate": 1e-3 if optimizer else 0.05, "loss_scale": 1.0}
        losses = [float(step.update(batches, update_index=update, **settings).loss_sum) for step in steps.values()]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    got, expected = (steps[name].local_tensors() for name in ("mindspore", "torch"))
    for key, value in got.items():
        assert np.linalg.norm(value - expected[key]) / (np.linalg.norm(expected[key]) or 1.0) < 1e-4, key

"""Networks of MindSpore that take regrouped images compute and learn what they did before, and keep their own state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore")

import mindspore as ms
from mindspore import Tensor, nn, ops

import convmesh
from convmesh.config import parse_config
from convmesh.data.channels import regroup_images, regroup_scale
from convmesh.engines.contract import Batch, PixelScale
from convmesh.engines.mindspore.collectives import DataAxis
from convmesh.engines.mindspore.regroup import regroup_channels, regrouped_of
from convmesh.engines.mindspore.state import export_network, import_network
from convmesh.engines.mindspore.trace import trace
from convmesh.engines.mindspore.train_step import MindSporeTrainStep
from convmesh.errors import ConvMeshError
from convmesh.geometry import ChannelRegrouping

pytestmark = pytest.mark.mindspore

PAD = {"pad_mode": "pad", "has_bias": True}
LAYERS: dict[str, tuple[Callable[[], nn.Cell], tuple[int, ...], dict[str, Any]]] = {
    "stem": (lambda: nn.Conv2d(3, 8, 7, 2, pad_mode="pad", padding=3), (3, 16, 12), {"space_to_depth": 2}),
    "same": (lambda: nn.Conv2d(3, 8, 3, 4, pad_mode="same", has_bias=True), (3, 16, 12), {"space_to_depth": 4}),
    "dilated": (
        lambda: nn.Conv2d(2, 6, 3, (2, 4), padding=(1, 1, 2, 2), dilation=(2, 3), **PAD),
        (2, 12, 16),
        {"space_to_depth": 2},
    ),
    "depthwise": (lambda: nn.Conv2d(3, 6, 3, 2, padding=1, group=3, **PAD), (3, 8, 8), {"space_to_depth": 2, "pad": 3}),
    "padded": (lambda: nn.Conv2d(3, 8, 3, padding=1, **PAD), (3, 7, 5), {"pad_to": 4, "order": [3, 1, 0, 2]}),
    "one-dimensional": (
        lambda: nn.Conv1d(3, 8, 5, 2, padding=2, **PAD), (3, 12), {"space_to_depth": 2, "num_dims": 1}
    ),
    "volumes": (
        lambda: nn.Conv3d(1, 4, 3, 2, padding=1, **PAD), (1, 6, 8, 4), {"space_to_depth": 2, "num_dims": 3}
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def graph_mode() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")


class Wrapped(nn.Cell):
    def __init__(self, first: nn.Cell) -> None:
        super().__init__()
        self.first = first
        self.act = nn.Tanh()

    def construct(self, x: Tensor) -> Tensor:
        return self.act(self.first(x))


class Weighed(nn.Cell):
    """A scalar of a network's output."""

    def __init__(self, network: nn.Cell, weights: np.ndarray) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.weights = Tensor(weights)

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.network(x)
        return ops.reduce_sum(y * self.weights), y


def gradients_of(network: nn.Cell, x: np.ndarray, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    weights = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    parameters = ms.ParameterTuple(network.trainable_params())
    step = ops.value_and_grad(Weighed(network, weights), 0, parameters, has_aux=True)
    (_, y), (of_x, of_parameters) = step(Tensor(x))
    named = {p.name: gradient.asnumpy() for p, gradient in zip(parameters, of_parameters, strict=True)}
    return {"output": y.asnumpy(), "input": of_x.asnumpy(), **named}


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_the_original(name: str) -> None:
    make, shape, settings = LAYERS[name]
    before, after = Wrapped(make()), Wrapped(make())
    import_network(after, export_network(before))
    regrouping = ChannelRegrouping.of(shape[0], **settings)
    regroup_channels(after, regrouping, image_shape=shape)
    kept = regrouped_of(after)
    assert kept is not None
    graph = trace(after, (2, regrouping.num_regrouped, *regrouping.sizes(shape[1:])))
    assert [node.kind for node in graph] == ["input", "convolution", "elementwise"]
    assert graph.node("first").attributes == kept.attributes
    x = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    moved = convmesh.regroup_images(Tensor(x), regrouping).asnumpy()
    np.testing.assert_array_equal(moved, regrouping.images(x))
    expected = gradients_of(before, x, graph.node("first").shape)
    got = gradients_of(after, moved, graph.node("first").shape)
    weight = got["first.weight"].reshape(kept.convolution.regrouped_shape)
    assert not weight[~kept.convolution.is_weight].any()
    filled = [place for place, origin in enumerate(regrouping.origins) if origin is not None]
    of_x = got.pop("input")[:, filled]
    np.testing.assert_allclose(of_x, regrouping.images(expected["input"])[:, filled], rtol=2e-5, atol=2e-5)
    for key, value in kept.to_original(got).items():
        np.testing.assert_allclose(value, expected[key], rtol=2e-5, atol=2e-5, err_msg=key)


def network_of() -> nn.Cell:
    ms.set_seed(1)
    convolution = nn.Conv2d(3, 8, 7, 2, pad_mode="pad", padding=3)
    return nn.SequentialCell(convolution, nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Dense(128, 5))


def test_many_steps_are_those_of_the_original() -> None:
    # With SGD on the ranks of tests/multiprocess.
    run = parse_config(
        {
            "engine": "mindspore",
            "model": {"name": "resnet18"},
            "data": {"source": "digits"},
            "optimizer": {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.1, "clip_norm": 0.5},
            "train": {"global_batch": 6, "weight_average": 0.9, "device": "cpu"},
        }
    )
    regrouping = ChannelRegrouping.of(3, space_to_depth=2, pad_to=16, order=[*range(15, -1, -1)])
    before, after = network_of(), network_of()
    import_network(after, export_network(before))
    regroup_channels(after, regrouping, image_shape=(3, 8, 8))
    axis = DataAxis()
    scale = PixelScale((0.01, 0.02, 0.03), (-1.0, 0.5, -0.2))
    one = MindSporeTrainStep(before, run, pixel_scale=scale, axis=axis)
    two = MindSporeTrainStep(after, run, pixel_scale=regroup_scale(scale, regrouping), axis=axis)
    draw = np.random.default_rng(0)
    for update in range(8):
        images = draw.integers(0, 256, (6, 8, 8, 3)).astype(np.uint8)
        labels, weights = draw.integers(0, 5, 6).astype(np.int32), np.ones(6, np.float32)
        told = [
            step.update(
                [Batch(pixels, labels, weights)],
                global_count=6,
                learning_rate=0.01,
                loss_scale=1.0,
                update_index=update,
            )
            for step, pixels in ((one, images), (two, regroup_images(images, regrouping)))
        ]
        np.testing.assert_allclose(told[1].loss_sum, told[0].loss_sum, rtol=1e-5)
        np.testing.assert_allclose(float(told[1].gradient_norm), float(told[0].gradient_norm), rtol=1e-4)
    kept = regrouped_of(after)
    assert kept is not None
    assert not export_network(after)["0.weight"][~kept.convolution.is_weight].any()
    assert two.num_parameters() == one.num_parameters()
    expected, got = one.export_state(), two.export_state()
    for part in ("network", "optimizer", "average"):
        assert getattr(got, part).keys() == getattr(expected, part).keys()
        for name, value in getattr(expected, part).items():
            difference = np.linalg.norm(getattr(got, part)[name] - value)
            assert difference <= 1e-4 * max(np.linalg.norm(value), 1e-3), (part, name)
    # A state goes from one to the other and back.
    two.import_state(expected)
    for name, value in two.export_state().optimizer.items():
        np.testing.assert_array_equal(value, expected.optimizer[name], err_msg=name)


class Twice(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def construct(self, x: Tensor) -> Tensor:
        return self.conv(x) + ops.mean(x)


@pytest.mark.parametrize(
    ("make", "settings", "told"),
    [
        (lambda: nn.SequentialCell(nn.Conv2d(3, 4, 3)), {"space_to_depth": 2}, "got stride 1x1, blocks of 2"),
        (lambda: nn.SequentialCell(nn.Pad(((0, 0), (0, 0), (1, 1), (1, 1)), "REFLECT"), nn.Conv2d(3, 4, 3)),
         {"pad_to": 4}, "which is no convolution"),
        (lambda: nn.SequentialCell(nn.Conv2dTranspose(3, 4, 3)), {"pad_to": 4}, "got a transposed convolution"),
        (Twice, {"pad_to": 4}, "several operators use them"),
    ],
)  # fmt: skip
def test_what_cannot_be_exact_is_refused_by_name(
    make: Callable[[], nn.Cell], settings: dict[str, Any], told: str
) -> None:
    network = make()
    with pytest.raises(ConvMeshError, match=told):
        regroup_channels(network, ChannelRegrouping.of(3, **settings), image_shape=(3, 8, 8))
    assert regrouped_of(network) is None


def test_checkpoints_of_ones_own_loop_hold_the_original(tmp_path: Path) -> None:
    network, before = network_of(), network_of()
    regrouping = convmesh.ChannelRegrouping.of(3, space_to_depth=2)
    convmesh.regroup_channels(network, regrouping, (2, 3, 8, 8))
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    path = convmesh.save_checkpoint(tmp_path, network, optimizer, update=1)
    assert convmesh.load_checkpoint(path, before, nn.Momentum(before.trainable_params(), 0.1, 0.9)) == 1
    network.set_train(False)
    before.set_train(False)
    moved = convmesh.regroup_images(Tensor(x), regrouping)
    np.testing.assert_allclose(network(moved).asnumpy(), before(Tensor(x)).asnumpy(), rtol=1e-5, atol=1e-5)
    assert convmesh.gather_state(network)["0.weight"].shape == (8, 3, 7, 7)
    convmesh.load_checkpoint(path, network, optimizer)
    with pytest.raises(ConvMeshError, match="regrouped images already"):
        convmesh.regroup_channels(network, regrouping, (2, 3, 8, 8))

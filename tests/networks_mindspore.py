"""Networks as users write them, on MindSpore; `tests.networks_torch` has the same under the same names.

They agree with their twins to the last digit of what MindSpore can do: the same padding, eps and momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops


def conv(num_in: int, num_out: int, kernel: int, *, stride: int = 1, group: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(
        num_in, num_out, kernel, stride=stride, pad_mode="pad", padding=kernel // 2, group=group, has_bias=bias
    )


def batch_norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-5, momentum=0.9)


class Vgg(nn.Cell):
    """Convolutions with bias, max-pooling, and a dense head of two layers over flattened pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.SequentialCell(
            conv(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2, 2), conv(8, 12, 3), nn.ReLU(), nn.MaxPool2d(2, 2)
        )
        self.head = nn.SequentialCell(
            nn.Flatten(), nn.Dense(12 * 4 * 4, 24), nn.ReLU(), nn.Dropout(p=0.5), nn.Dense(24, 10)
        )

    def construct(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class InvertedResidual(nn.Cell):
    """MobileNetV2's block: 1x1, depthwise 3x3, 1x1, and a shortcut where shapes allow it."""

    def __init__(self, num_in: int, num_out: int, *, stride: int) -> None:
        super().__init__()
        width = 4 * num_in
        self.shortcut = stride == 1 and num_in == num_out
        self.expand = conv(num_in, width, 1, bias=False)
        self.bn1 = batch_norm(width)
        self.depthwise = conv(width, width, 3, stride=stride, group=width, bias=False)
        self.bn2 = batch_norm(width)
        self.project = conv(width, num_out, 1, bias=False)
        self.bn3 = batch_norm(num_out)
        self.act = nn.ReLU6()

    def construct(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.expand(x)))
        y = self.act(self.bn2(self.depthwise(y)))
        y = self.bn3(self.project(y))
        return x + y if self.shortcut else y


class MobileNet(nn.Cell):
    """A stem, three inverted residuals, mean over pixels, dense."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 4, 3, stride=2, bias=False)
        self.blocks = nn.SequentialCell(
            InvertedResidual(4, 4, stride=1), InvertedResidual(4, 8, stride=2), InvertedResidual(8, 8, stride=1)
        )
        self.fc = nn.Dense(8, 10)

    def construct(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.fc(x.mean((2, 3)))


class DenseLayer(nn.Cell):
    """DenseNet's layer: its new channels are appended to its input."""

    def __init__(self, num_in: int, growth: int) -> None:
        super().__init__()
        self.bn = batch_norm(num_in)
        self.conv = conv(num_in, growth, 3, bias=False)

    def construct(self, x: Tensor) -> Tensor:
        return ops.concat((x, self.conv(ops.relu(self.bn(x)))), axis=1)


class DenseNet(nn.Cell):
    """Three layers that concatenate, a transition with average pooling, dense."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8, 3, bias=False)
        self.layers = nn.SequentialCell(DenseLayer(8, 4), DenseLayer(12, 4), DenseLayer(16, 4))
        self.transition = conv(20, 10, 1, bias=False)
        self.pool = nn.AvgPool2d(2, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Dense(10, 10)

    def construct(self, x: Tensor) -> Tensor:
        x = self.pool(self.transition(self.layers(self.stem(x))))
        return self.fc(ops.flatten(self.avgpool(x)))


class ShuffleUnit(nn.Cell):
    """ShuffleNet V2's unit: half of the channels pass, then channels are shuffled in two groups."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.conv1 = conv(half, half, 1, bias=False)
        self.bn1 = batch_norm(half)
        self.conv2 = conv(half, half, 3, group=half, bias=False)
        self.bn2 = batch_norm(half)

    def construct(self, x: Tensor) -> Tensor:
        passed, y = ops.chunk(x, 2, axis=1)
        y = self.bn2(self.conv2(ops.relu(self.bn1(self.conv1(y)))))
        y = ops.concat((passed, y), axis=1)
        n, c, h, w = y.shape
        return y.reshape((n, 2, c // 2, h, w)).transpose((0, 2, 1, 3, 4)).reshape((n, c, h, w))


class ShuffleNet(nn.Cell):
    """A stem, a grouped convolution, two shuffle units, dense."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8, 3, bias=False)
        self.grouped = conv(8, 16, 3, stride=2, group=4, bias=False)
        self.units = nn.SequentialCell(ShuffleUnit(16), ShuffleUnit(16))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Dense(16, 10)

    def construct(self, x: Tensor) -> Tensor:
        x = self.units(self.grouped(self.stem(x)))
        return self.fc(ops.flatten(self.avgpool(x)))


class SqueezeExcite(nn.Cell):
    """Scales each channel by a function of all channels' means."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce = conv(width, squeezed, 1)
        self.expand = conv(squeezed, width, 1)

    def construct(self, x: Tensor) -> Tensor:
        scale = ops.sigmoid(self.expand(ops.relu(self.reduce(self.pool(x)))))
        return x * scale


class SqueezeExciteNet(nn.Cell):
    """Two convolutions with squeeze-excite and group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = conv(3, 8, 3)
        self.norm1 = nn.GroupNorm(4, 8)
        self.se1 = SqueezeExcite(8, 4)
        self.conv2 = conv(8, 12, 3, stride=2)
        self.norm2 = nn.GroupNorm(4, 12)
        self.se2 = SqueezeExcite(12, 4)
        self.fc = nn.Dense(12, 10)

    def construct(self, x: Tensor) -> Tensor:
        x = self.se1(self.norm1(self.conv1(x)))
        x = self.se2(self.norm2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class UNet(nn.Cell):
    """Two levels down by max-pooling, two up by transposed convolutions, skips by concatenation; a score per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = conv(3, 8, 3)
        self.down2 = conv(8, 12, 3)
        self.bottom = conv(12, 16, 3)
        self.up2 = nn.Conv2dTranspose(16, 12, 2, stride=2, pad_mode="valid", has_bias=True)
        self.merge2 = conv(24, 12, 3)
        self.up1 = nn.Conv2dTranspose(12, 8, 2, stride=2, pad_mode="valid", has_bias=True)
        self.merge1 = conv(16, 8, 3)
        self.head = conv(8, 2, 1)
        self.pool = nn.MaxPool2d(2, 2)
        self.relu = nn.ReLU()

    def construct(self, x: Tensor) -> Tensor:
        skip1 = self.relu(self.down1(x))
        skip2 = self.relu(self.down2(self.pool(skip1)))
        x = self.relu(self.bottom(self.pool(skip2)))
        x = self.relu(self.merge2(ops.concat((self.up2(x), skip2), axis=1)))
        x = self.relu(self.merge1(ops.concat((self.up1(x), skip1), axis=1)))
        return self.head(x)


class Swish(nn.Cell):
    """x sigmoid(x), written by hand."""

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.sigmoid(x)


class HardSwish(nn.Cell):
    """x relu6(x + 3) / 6, written by hand."""

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.relu6(x + 3) / 6


class SwishNet(nn.Cell):
    """Convolutions with activations of the user's own, and a scale per channel that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = conv(3, 8, 3)
        self.act1 = Swish()
        self.conv2 = conv(8, 8, 3)
        self.act2 = HardSwish()
        self.conv3 = conv(8, 8, 3)
        self.act3 = Swish()
        self.gamma = Parameter(Tensor(np.full((8, 1, 1), 0.5), ms.float32), name="gamma")
        self.fc = nn.Dense(8, 10)

    def construct(self, x: Tensor) -> Tensor:
        x = self.act1(self.conv1(x))
        x = x + self.gamma * self.act2(self.conv2(x))
        x = self.act3(self.conv3(x))
        return self.fc(x.mean((2, 3)))


NETWORKS: Mapping[str, Callable[[], nn.Cell]] = {
    "vgg": Vgg,
    "mobilenet": MobileNet,
    "densenet": DenseNet,
    "shufflenet": ShuffleNet,
    "squeeze_excite": SqueezeExciteNet,
    "unet": UNet,
    "swish": SwishNet,
}
"""All take images of shape (N, 3, 16, 16)."""

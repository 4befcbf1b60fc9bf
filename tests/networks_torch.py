"""Networks as users write them, on PyTorch; `tests.networks_mindspore` has the same under the same names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Vgg(nn.Module):
    """Convolutions with bias, max-pooling, and a dense head of two layers over flattened pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(12 * 4 * 4, 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: 1x1, depthwise 3x3, 1x1, and a shortcut where shapes allow it."""

    def __init__(self, num_in: int, num_out: int, *, stride: int) -> None:
        super().__init__()
        width = 4 * num_in
        self.shortcut = stride == 1 and num_in == num_out
        self.expand = nn.Conv2d(num_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.depthwise = nn.Conv2d(width, width, 3, stride=stride, padding=1, groups=width, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.project = nn.Conv2d(width, num_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(num_out)
        self.act = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.expand(x)))
        y = self.act(self.bn2(self.depthwise(y)))
        y = self.bn3(self.project(y))
        return x + y if self.shortcut else y


class MobileNet(nn.Module):
    """A stem, three inverted residuals, mean over pixels, dense."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.blocks = nn.Sequential(
            InvertedResidual(4, 4, stride=1), InvertedResidual(4, 8, stride=2), InvertedResidual(8, 8, stride=1)
        )
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.fc(x.mean((2, 3)))


class DenseLayer(nn.Module):
    """DenseNet's layer: its new channels are appended to its input."""

    def __init__(self, num_in: int, growth: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(num_in)
        self.conv = nn.Conv2d(num_in, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.bn(x)))], dim=1)


class DenseNet(nn.Module):
    """Three layers that concatenate, a transition with average pooling, dense."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.layers = nn.Sequential(DenseLayer(8, 4), DenseLayer(12, 4), DenseLayer(16, 4))
        self.transition = nn.Conv2d(20, 10, 1, bias=False)
        self.pool = nn.AvgPool2d(2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.transition(self.layers(self.stem(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class ShuffleUnit(nn.Module):
    """ShuffleNet V2's unit: half of the channels pass, then channels are shuffled in two groups."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.conv1 = nn.Conv2d(half, half, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(half)
        self.conv2 = nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False)
        self.bn2 = nn.BatchNorm2d(half)

    def forward(self, x: Tensor) -> Tensor:
        passed, y = x.chunk(2, dim=1)
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(y)))))
        y = torch.cat([passed, y], dim=1)
        n, c, h, w = y.shape
        return y.reshape(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class ShuffleNet(nn.Module):
    """A stem, a grouped convolution, two shuffle units, dense."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.grouped = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4, bias=False)
        self.units = nn.Sequential(ShuffleUnit(16), ShuffleUnit(16))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.units(self.grouped(self.stem(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class SqueezeExcite(nn.Module):
    """Scales each channel by a function of all channels' means."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce = nn.Conv2d(width, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sigmoid(self.expand(F.relu(self.reduce(self.pool(x)))))
        return x * scale


class SqueezeExciteNet(nn.Module):
    """Two convolutions with squeeze-excite and group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, 8)
        self.se1 = SqueezeExcite(8, 4)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(4, 12)
        self.se2 = SqueezeExcite(12, 4)
        self.fc = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.se1(self.norm1(self.conv1(x)))
        x = self.se2(self.norm2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class UNet(nn.Module):
    """Two levels down by max-pooling, two up by transposed convolutions, skips by concatenation; a score per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 8, 3, padding=1)
        self.down2 = nn.Conv2d(8, 12, 3, padding=1)
        self.bottom = nn.Conv2d(12, 16, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(16, 12, 2, stride=2)
        self.merge2 = nn.Conv2d(24, 12, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.merge1 = nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 2, 1)
        self.pool = nn.MaxPool2d(2)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.relu(self.down1(x))
        skip2 = self.relu(self.down2(self.pool(skip1)))
        x = self.relu(self.bottom(self.pool(skip2)))
        x = self.relu(self.merge2(torch.cat([self.up2(x), skip2], dim=1)))
        x = self.relu(self.merge1(torch.cat([self.up1(x), skip1], dim=1)))
        return self.head(x)


class Swish(nn.Module):
    """x sigmoid(x), written by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class HardSwish(nn.Module):
    """x relu6(x + 3) / 6, written by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x * F.relu6(x + 3) / 6


class SwishNet(nn.Module):
    """Convolutions with activations of the user's own, and a scale per channel that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.act1 = Swish()
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.act2 = HardSwish()
        self.conv3 = nn.Conv2d(8, 8, 3, padding=1)
        self.act3 = Swish()
        self.gamma = nn.Parameter(torch.full((8, 1, 1), 0.5))
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.conv1(x))
        x = x + self.gamma * self.act2(self.conv2(x))
        x = self.act3(self.conv3(x))
        return self.fc(x.mean((2, 3)))


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "vgg": Vgg,
    "mobilenet": MobileNet,
    "densenet": DenseNet,
    "shufflenet": ShuffleNet,
    "squeeze_excite": SqueezeExciteNet,
    "unet": UNet,
    "swish": SwishNet,
}
"""All take images of shape (N, 3, 16, 16)."""

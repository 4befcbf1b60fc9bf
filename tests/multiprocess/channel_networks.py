"""Small networks that need what others don't: every norm, random layers, one slope for all, operators without rule."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Norms(nn.Module):
    """Group norm, instance norm, layer norm over pixels and over everything, each after a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.group = nn.GroupNorm(4, 8)
        self.conv2 = nn.Conv2d(8, 12, 3, padding=1)
        self.instance = nn.InstanceNorm2d(12, affine=True)
        self.conv3 = nn.Conv2d(12, 8, 3, stride=2, padding=1)
        self.pixels = nn.LayerNorm((8, 8))
        self.conv4 = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.all = nn.LayerNorm((8, 4, 4))
        self.fc = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.instance(self.conv2(torch.tanh(self.group(self.conv1(x)))))
        x = self.all(self.conv4(torch.tanh(self.pixels(self.conv3(x)))))
        return self.fc(torch.tanh(x).flatten(1))


class RandomLayers(nn.Module):
    """Dropout of elements and of whole channels, on split and on whole tensors, and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.drop1 = nn.Dropout2d(0.3)
        self.conv2 = nn.Conv2d(8, 10, 3, padding=1)
        self.drop2 = nn.Dropout(0.4)
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.fc1 = nn.Linear(40, 12)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(12, 10)
        self.drop3 = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop2(torch.tanh(self.conv2(self.drop1(self.conv1(x)))))
        x = F.dropout(self.act(self.fc1(self.avgpool(x).flatten(1))), 0.5, self.training)
        return self.drop3(self.fc2(x))


class Slopes(nn.Module):
    """A slope per channel, one for all, a scalar that scales, a shift per channel, and a mask over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.slopes = nn.PReLU(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.slope = nn.PReLU()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8).view(1, 8, 1, 1))
        self.mask = nn.Conv2d(8, 1, 3, padding=1)
        self.conv3 = nn.Conv2d(8, 10, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slopes(self.conv1(x))
        x = x + self.scale * self.slope(self.conv2(x)) + self.shift
        x = x * torch.sigmoid(self.mask(x))
        return self.conv3(x).mean((2, 3))


class Scales(nn.Module):
    """A scalar and one slope that every rank uses for its own channels, so that their gradients are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.slope = nn.PReLU()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8).view(1, 8, 1, 1))
        self.conv2 = nn.Conv2d(8, 10, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.slope(self.conv1(x)) * self.scale + self.shift).mean((2, 3))


class Tied(nn.Module):
    """One convolution that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(torch.tanh(self.conv1(x)))
        x = self.bn(torch.tanh(self.conv2(x)))
        return self.fc(torch.tanh(self.conv2(x)).mean((2, 3)))


class CumulativeSum(nn.Module):
    """An operator that ConvMesh has no rule for."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(x, 1)


class Opaque(nn.Module):
    """An operator without a rule between two convolutions, in a module of its own or as a function."""

    def __init__(self, *, own_module: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.unknown = CumulativeSum() if own_module else None
        self.conv2 = nn.Conv2d(8, 10, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv1(x))
        x = torch.cumsum(x, 1) if self.unknown is None else self.unknown(x)
        return self.conv2(x).mean((2, 3))


class FixedReshape(nn.Module):
    """A reshape to numbers that hold for all channels only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).view(-1, 8 * 16 * 16))


class DenseHead(nn.Module):
    """Convolutions, and a head of dense layers that hold most of the parameters.

    Args:
        plain: Whether to leave out batch norm and dropout, for which it matters how samples lie on ranks.
    """

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        p = 0.0 if plain else 0.5
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Identity() if plain else nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(48, 25), nn.PReLU(), nn.Dropout(p),
            nn.Linear(25, 18), nn.ReLU(), nn.Dropout(p / 2), nn.Linear(18, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


EXTRA = {
    "dense_head": DenseHead,
    "dense_head_plain": lambda: DenseHead(plain=True),
    "norms": Norms,
    "random": RandomLayers,
    "slopes": Slopes,
    "scales": Scales,
    "tied": Tied,
    "opaque_module": lambda: Opaque(own_module=True),
    "opaque_function": lambda: Opaque(own_module=False),
    "fixed_reshape": FixedReshape,
}
"""All take images of shape (N, 3, 16, 16)."""

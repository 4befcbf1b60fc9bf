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


class Softmaxes(nn.Module):
    """Softmax over channels as a function, a method and a module, and its logarithm, the same function over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 9, 3, padding=1)
        self.conv2 = nn.Conv2d(9, 10, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(10, 12, 1)
        self.softmax = nn.Softmax(dim=1)
        self.conv4 = nn.Conv2d(12, 10, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = x * F.softmax(3 * x, dim=1) + x.softmax(-1)
        x = F.log_softmax(self.conv2(x), dim=1)
        x = self.softmax(input=self.conv3(x))
        return self.conv4(x).log_softmax(1).mean((2, 3))


class LayerNorms(nn.Module):
    """Layer norm over channels, and over channels and pixels, as a function with own, with no, and as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 7, 3, stride=2, padding=1)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 7 * 8 * 8).view(7, 8, 8))
        self.bias = nn.Parameter(torch.linspace(-1, 1, 7 * 8 * 8).view(7, 8, 8))
        self.conv2 = nn.Conv2d(7, 9, 3, padding=1)
        self.conv3 = nn.Conv2d(9, 10, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(10)
        self.fc1 = nn.Linear(10, 12)
        self.fc2 = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(self.conv1(x), (7, 8, 8), self.weight, self.bias, eps=1e-4)
        x = F.layer_norm(torch.tanh(self.conv2(x)), [9, 8, 8])
        x = self.norm(torch.tanh(self.conv3(x)).mean((2, 3)))
        return self.fc2(F.layer_norm(self.fc1(x), (12,)))


class Reductions(nn.Module):
    """Sums, means and maxima over channels, over channels and pixels, and of ties, in a loop and in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 10, 3, padding=1)
        self.conv2 = nn.Conv2d(10, 9, 3, padding=1)
        self.mix = nn.Conv2d(5, 8, 3, padding=1)
        self.conv3 = nn.Conv2d(8, 10, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for conv in (self.conv1, self.conv2):
            x = F.relu(conv(x))  # Many zeros, so that maxima are shared.
            found.append(x.amax(dim=1, keepdim=True) if conv is self.conv1 else torch.max(x, 1)[0].unsqueeze(1))
            found.append(x.mean(1, keepdim=True))
        found.append(torch.sum(x, dim=(1, 3), keepdim=True) / 9 * torch.ones_like(found[0]))
        if x.shape[2] > 4:
            y = self.conv3(F.relu(self.mix(torch.cat(found, dim=1))))
        top = torch.amax(y, dim=(1, 2, 3)) + y.sum(dim=[1, 2, 3]) / 100
        return y.mean((2, 3)) + top[:, None]


class Pieces(nn.Module):
    """Gated and residual pieces of channels, of equal and of unequal sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(8, 15, 3, padding=1)
        self.conv3 = nn.Conv2d(4, 5, 1)
        self.conv4 = nn.Conv2d(11, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = torch.tanh(self.bn(self.conv1(x))).chunk(2, dim=1)
        x = self.conv2(value * torch.sigmoid(gate))
        first, second, third = torch.split(x, [6, 4, 5], dim=1)
        return self.conv4(torch.cat([first, third + self.conv3(second)], dim=1)).mean((2, 3))


class Gates(nn.Module):
    """What is spread over channels: attention to pixels, a norm written by hand, shares, a scale that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 9, 3, padding=1)
        self.mask = nn.Conv2d(2, 1, 3, padding=1)
        self.sigmoid = nn.Sigmoid()
        self.conv2 = nn.Conv2d(9, 10, 3, stride=2, padding=1)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.conv3 = nn.Conv2d(10, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv1(x))
        gate = self.sigmoid(self.mask(torch.cat([x.mean(1, keepdim=True), torch.max(x, 1, keepdim=True)[0]], dim=1)))
        x = self.conv2(x * gate)
        x = x - x.mean(dim=1, keepdim=True)
        x = x * torch.rsqrt(self.scale * x.square().mean(1, keepdim=True) + 0.1)
        x = torch.exp(self.conv3(x))
        x = x / (x.square().sum((1, 2, 3)) + 1).sqrt().view(-1, 1, 1, 1)
        return (x / x.sum(1, keepdim=True)).mean((2, 3))


class AlongBlock(nn.Module):
    """Softmax, pieces, maximum and layer norm over channels in a residual block, its last sum for its output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(8, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.conv1(torch.tanh(F.layer_norm(x, x.shape[1:]))).chunk(2, dim=1)
        y = value.softmax(1) * gate
        y = self.conv2(y - y.amax(1, keepdim=True))
        return F.log_softmax(y, dim=1) + x


class AlongBlocks(nn.Module):
    """Two such blocks, to be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(AlongBlock(), AlongBlock())
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


EXTRA = {
    "along_blocks": AlongBlocks,
    "gates": Gates,
    "softmaxes": Softmaxes,
    "layer_norms": LayerNorms,
    "reductions": Reductions,
    "pieces": Pieces,
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

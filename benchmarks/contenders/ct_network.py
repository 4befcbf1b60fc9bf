"""A network as for slices of computed tomography: convolutions at full resolution, for both engines.

Legend: N samples, C channels, H rows, W columns.
"""

from __future__ import annotations

from typing import Any


def for_torch(num_channels: int = 1, width: int = 32, num_layers: int = 4, num_classes: int = 10) -> Any:
    """Convolutions of ``width`` channels with batch norm and ReLU at full resolution, and a linear classifier."""
    from torch import nn

    layers: list[Any] = []
    for number in range(num_layers):
        layers.append(
            nn.Sequential(
                nn.Conv2d(width if number else num_channels, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            )
        )
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))


def for_mindspore(num_channels: int = 1, width: int = 32, num_layers: int = 4, num_classes: int = 10) -> Any:
    """The same for MindSpore."""
    from mindspore import nn

    layers: list[Any] = []
    for number in range(num_layers):
        convolution = nn.Conv2d(
            width if number else num_channels, width, 3, pad_mode="pad", padding=1, weight_init="he_uniform"
        )
        layers.append(nn.SequentialCell(convolution, nn.BatchNorm2d(width, momentum=0.9), nn.ReLU()))
    return nn.SequentialCell(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dense(width, num_classes))

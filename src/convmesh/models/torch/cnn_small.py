"""A small convolutional network for small images: 66,362 parameters at 10 classes and 3 channels.

Three 3x3 convolutions of 32, 64 and 80 channels, each with ReLU; 2x2 max-pooling after the first two, the mean over all
pixels after the third, one dense layer. Takes any image of at least 4x4 pixels. Without batch norm by default, so that
a global batch gives the same numbers however it is split.

Architecture: our own. Licence: Apache-2.0; no weights are shipped.

Legend: N samples, C channels, H rows, W columns, K classes.
"""

from __future__ import annotations

from torch import Tensor, nn

from convmesh.models.torch.initial import init_weights

WIDTHS = (32, 64, 80)
"""Output channels of the three convolutions."""


class CnnSmall(nn.Module):
    """The small network.

    Args:
        num_classes: Outputs.
        num_channels: Channels of the images.
        batch_norm: Put a batch norm after each convolution, whose bias it replaces.
    """

    def __init__(self, *, num_classes: int = 10, num_channels: int = 3, batch_norm: bool = False) -> None:
        super().__init__()
        first, second, third = WIDTHS
        self.conv1 = nn.Conv2d(num_channels, first, kernel_size=3, padding=1, bias=not batch_norm)
        self.bn1 = nn.BatchNorm2d(first) if batch_norm else nn.Identity()
        self.conv2 = nn.Conv2d(first, second, kernel_size=3, padding=1, bias=not batch_norm)
        self.bn2 = nn.BatchNorm2d(second) if batch_norm else nn.Identity()
        self.conv3 = nn.Conv2d(second, third, kernel_size=3, padding=1, bias=not batch_norm)
        self.bn3 = nn.BatchNorm2d(third) if batch_norm else nn.Identity()
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(third, num_classes)
        init_weights(self)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Classifies images.

        Args:
            x_NCHW: Scaled images, at least 4x4 pixels.

        Returns:
            Scores, shape (N, K).
        """
        x_NCHW = self.maxpool(self.relu(self.bn1(self.conv1(x_NCHW))))
        x_NCHW = self.maxpool(self.relu(self.bn2(self.conv2(x_NCHW))))
        x_NCHW = self.relu(self.bn3(self.conv3(x_NCHW)))
        scores_NK: Tensor = self.fc(self.avgpool(x_NCHW).flatten(start_dim=1))
        return scores_NK

"""A small convolutional network for small images: 66,362 parameters at 10 classes and 3 channels.

Three 3x3 convolutions of 32, 64 and 80 channels, each with ReLU; 2x2 max-pooling after the first two, the mean over all
pixels after the third, one dense layer. Takes any image of at least 4x4 pixels. Without batch norm by default, so that
a global batch gives the same numbers however it is split.

Architecture: our own, in the manner of the CIFAR-10 network of K. He et al.
Licence: Apache-2.0, no weights are shipped.

Legend: N samples, C channels, H rows, W columns, K classes.
"""

from __future__ import annotations

from mindspore import Tensor, nn

from convmesh.models.mindspore.initial import init_weights
from convmesh.models.mindspore.layers import batch_norm as norm
from convmesh.models.mindspore.layers import convolution, dense

WIDTHS = (32, 64, 80)
"""Output channels of the three convolutions."""


class CnnSmall(nn.Cell):
    """The small network.

    Args:
        num_classes: Outputs.
        num_channels: Channels of the images.
        batch_norm: Put a batch norm after each convolution, whose bias it replaces.
        seed: Seed of the initial weights.
    """

    def __init__(
        self, *, num_classes: int = 10, num_channels: int = 3, batch_norm: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        first, second, third = WIDTHS
        self.conv1 = convolution(num_channels, first, 3, bias=not batch_norm)
        self.bn1 = norm(first) if batch_norm else nn.Identity()
        self.conv2 = convolution(first, second, 3, bias=not batch_norm)
        self.bn2 = norm(second) if batch_norm else nn.Identity()
        self.conv3 = convolution(second, third, 3, bias=not batch_norm)
        self.bn3 = norm(third) if batch_norm else nn.Identity()
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = dense(third, num_classes)
        init_weights(self, seed=seed)

    def construct(self, x_NCHW: Tensor) -> Tensor:
        """Classifies images.

        Args:
            x_NCHW: Scaled images, at least 4x4 pixels.

        Returns:
            Scores, shape (N, K).
        """
        x_NCHW = self.maxpool(self.relu(self.bn1(self.conv1(x_NCHW))))
        x_NCHW = self.maxpool(self.relu(self.bn2(self.conv2(x_NCHW))))
        x_NCHW = self.relu(self.bn3(self.conv3(x_NCHW)))
        return self.fc(self.flatten(self.avgpool(x_NCHW)))

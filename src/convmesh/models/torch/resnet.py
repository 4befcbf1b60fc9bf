"""Residual networks, version 1.5: ResNet-18, 50 and 152.

Paper: K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", 2015,
https://arxiv.org/abs/1512.03385. Version 1.5 puts the stride of a bottleneck on its 3x3 convolution
(https://catalog.ngc.nvidia.com/orgs/nvidia/resources/resnet_50_v1_5_for_pytorch). The option ``zero_init_residual``
is from P. Goyal et al., "Accurate, Large Minibatch SGD", 2017, https://arxiv.org/abs/1706.02677, section 5.1.
Parameter names are those of torchvision (https://github.com/pytorch/vision, BSD-3-Clause), so that its weights load.
Licence of this file: Apache-2.0; no weights are shipped.

Parameters at 1000 classes: 11,689,512, 25,557,032 and 60,192,808.

Legend: N samples, C channels, H rows, W columns, K classes.
"""

from __future__ import annotations

from torch import Tensor, nn

from convmesh.models.torch.initial import init_weights


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (the paper's figure 5, left).

    Args:
        num_in: Input channels.
        width: Channels of both convolutions.
        stride: Of the first convolution and the shortcut.
    """

    expansion = 1

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(num_in, width, stride)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Adds the block's residual to the (projected) input."""
        identity_NCHW = x_NCHW if self.downsample is None else self.downsample(x_NCHW)
        x_NCHW = self.relu(self.bn1(self.conv1(x_NCHW)))
        x_NCHW = self.bn2(self.conv2(x_NCHW))
        y_NCHW: Tensor = self.relu(x_NCHW + identity_NCHW)
        return y_NCHW


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolution and a shortcut (the paper's figure 5, right).

    Args:
        num_in: Input channels.
        width: Channels of the first two convolutions; the third has four times as many.
        stride: Of the 3x3 convolution and the shortcut.
    """

    expansion = 4

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = width * self.expansion
        self.conv1 = nn.Conv2d(num_in, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, num_out, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(num_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(num_in, num_out, stride)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Adds the block's residual to the (projected) input."""
        identity_NCHW = x_NCHW if self.downsample is None else self.downsample(x_NCHW)
        x_NCHW = self.relu(self.bn1(self.conv1(x_NCHW)))
        x_NCHW = self.relu(self.bn2(self.conv2(x_NCHW)))
        x_NCHW = self.bn3(self.conv3(x_NCHW))
        y_NCHW: Tensor = self.relu(x_NCHW + identity_NCHW)
        return y_NCHW


class ResNet(nn.Module):
    """A residual network of four stages.

    Args:
        block: The kind of block.
        num_blocks: Blocks per stage.
        num_classes: Outputs.
        num_channels: Channels of the images.
        small_images: Use a 3x3 stem without stride and max-pooling, as is usual for 32x32 images.
        zero_init_residual: Start each block as the identity: last batch norm's weight 0.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        num_blocks: tuple[int, int, int, int],
        *,
        num_classes: int = 1000,
        num_channels: int = 3,
        small_images: bool = False,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small_images else (7, 2)
        self.conv1 = nn.Conv2d(num_channels, 64, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = _stage(block, 64, 64, num_blocks[0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, num_blocks[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, num_blocks[2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, num_blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        init_weights(self)
        if zero_init_residual:
            _zero_last_norms(self)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Classifies images.

        Args:
            x_NCHW: Scaled images.

        Returns:
            Scores, shape (N, K).
        """
        x_NCHW = self.maxpool(self.relu(self.bn1(self.conv1(x_NCHW))))
        x_NCHW = self.layer4(self.layer3(self.layer2(self.layer1(x_NCHW))))
        scores_NK: Tensor = self.fc(self.avgpool(x_NCHW).flatten(start_dim=1))
        return scores_NK


def resnet18(
    *,
    num_classes: int = 1000,
    num_channels: int = 3,
    small_images: bool = False,
    zero_init_residual: bool = False,
) -> ResNet:
    """ResNet-18.

    Args:
        num_classes: Outputs.
        num_channels: Channels of the images.
        small_images: Use a 3x3 stem with stride 1 and no max-pooling, for images such as CIFAR-10's.
        zero_init_residual: Start every block as the identity.

    Returns:
        The network, with initial weights.
    """
    return ResNet(
        BasicBlock,
        (2, 2, 2, 2),
        num_classes=num_classes,
        num_channels=num_channels,
        small_images=small_images,
        zero_init_residual=zero_init_residual,
    )


def resnet50(
    *,
    num_classes: int = 1000,
    num_channels: int = 3,
    small_images: bool = False,
    zero_init_residual: bool = False,
) -> ResNet:
    """ResNet-50.

    Args:
        num_classes: Outputs.
        num_channels: Channels of the images.
        small_images: Use a 3x3 stem with stride 1 and no max-pooling, for images such as CIFAR-10's.
        zero_init_residual: Start every block as the identity.

    Returns:
        The network, with initial weights.
    """
    return ResNet(
        Bottleneck,
        (3, 4, 6, 3),
        num_classes=num_classes,
        num_channels=num_channels,
        small_images=small_images,
        zero_init_residual=zero_init_residual,
    )


def resnet152(
    *,
    num_classes: int = 1000,
    num_channels: int = 3,
    small_images: bool = False,
    zero_init_residual: bool = False,
) -> ResNet:
    """ResNet-152.

    Args:
        num_classes: Outputs.
        num_channels: Channels of the images.
        small_images: Use a 3x3 stem with stride 1 and no max-pooling, for images such as CIFAR-10's.
        zero_init_residual: Start every block as the identity.

    Returns:
        The network, with initial weights.
    """
    return ResNet(
        Bottleneck,
        (3, 8, 36, 3),
        num_classes=num_classes,
        num_channels=num_channels,
        small_images=small_images,
        zero_init_residual=zero_init_residual,
    )


def _shortcut(num_in: int, num_out: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and num_in == num_out:
        return None
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, kernel_size=1, stride=stride, bias=False),
        nn.BatchNorm2d(num_out),
    )


def _stage(
    block: type[BasicBlock] | type[Bottleneck], num_in: int, width: int, num_blocks: int, *, stride: int
) -> nn.Sequential:
    first = block(num_in, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(num_blocks - 1)))


def _zero_last_norms(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, Bottleneck):
            nn.init.zeros_(module.bn3.weight)
        elif isinstance(module, BasicBlock):
            nn.init.zeros_(module.bn2.weight)

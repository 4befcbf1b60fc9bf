"""Residual networks, version 1.5: ResNet-18, 50 and 152.

Paper: K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", 2015,
https://arxiv.org/abs/1512.03385. Version 1.5 puts the stride of a bottleneck on its 3x3 convolution
(https://catalog.ngc.nvidia.com/orgs/nvidia/resources/resnet_50_v1_5_for_pytorch). The option ``zero_init_residual``
is from P. Goyal et al., "Accurate, Large Minibatch SGD", 2017, https://arxiv.org/abs/1706.02677, section 5.1.
Parameter names, read through `convmesh.engines.mindspore.state`, are those of torchvision
(https://github.com/pytorch/vision, BSD-3-Clause), so that its weights load.
Licence of this file: Apache-2.0; no weights are shipped.

Parameters at 1000 classes: 11,689,512, 25,557,032 and 60,192,808.

Legend: N samples, C channels, H rows, W columns, K classes.
"""

from __future__ import annotations

from mindspore import Tensor, nn, ops

from convmesh.models.mindspore.initial import init_weights
from convmesh.models.mindspore.layers import PaddedMaxPool, batch_norm, convolution, dense


class BasicBlock(nn.Cell):
    """Two 3x3 convolutions and a shortcut (the paper's figure 5, left).

    Args:
        num_in: Input channels.
        width: Channels of both convolutions.
        stride: Of the first convolution and the shortcut.
    """

    expansion = 1

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(num_in, width, 3, stride=stride)
        self.bn1 = batch_norm(width)
        self.relu = nn.ReLU()
        self.conv2 = convolution(width, width, 3)
        self.bn2 = batch_norm(width)
        self.downsample = _shortcut(num_in, width, stride)

    def construct(self, x_NCHW: Tensor) -> Tensor:
        """Adds the block's residual to the (projected) input."""
        identity_NCHW = x_NCHW if self.downsample is None else self.downsample(x_NCHW)
        x_NCHW = self.relu(self.bn1(self.conv1(x_NCHW)))
        x_NCHW = self.bn2(self.conv2(x_NCHW))
        return self.relu(x_NCHW + identity_NCHW)


class Bottleneck(nn.Cell):
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
        self.conv1 = convolution(num_in, width, 1)
        self.bn1 = batch_norm(width)
        self.conv2 = convolution(width, width, 3, stride=stride)
        self.bn2 = batch_norm(width)
        self.conv3 = convolution(width, num_out, 1)
        self.bn3 = batch_norm(num_out)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(num_in, num_out, stride)

    def construct(self, x_NCHW: Tensor) -> Tensor:
        """Adds the block's residual to the (projected) input."""
        identity_NCHW = x_NCHW if self.downsample is None else self.downsample(x_NCHW)
        x_NCHW = self.relu(self.bn1(self.conv1(x_NCHW)))
        x_NCHW = self.relu(self.bn2(self.conv2(x_NCHW)))
        x_NCHW = self.bn3(self.conv3(x_NCHW))
        return self.relu(x_NCHW + identity_NCHW)


class ResNet(nn.Cell):
    """A residual network of four stages.

    Args:
        block: The kind of block.
        num_blocks: Blocks per stage.
        num_classes: Outputs.
        num_channels: Channels of the images.
        small_images: Use a 3x3 stem without stride and max-pooling, as is usual for 32x32 images.
        zero_init_residual: Start each block as the identity: last batch norm's weight 0.
        seed: Seed of the initial weights.
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
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.conv1 = convolution(num_channels, 64, 3 if small_images else 7, stride=1 if small_images else 2)
        self.bn1 = batch_norm(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small_images else PaddedMaxPool()
        self.layer1 = _stage(block, 64, 64, num_blocks[0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, num_blocks[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, num_blocks[2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, num_blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = dense(512 * block.expansion, num_classes)
        init_weights(self, seed=seed)
        if zero_init_residual:
            _zero_last_norms(self)

    def construct(self, x_NCHW: Tensor) -> Tensor:
        """Classifies images.

        Args:
            x_NCHW: Scaled images.

        Returns:
            Scores, shape (N, K).
        """
        x_NCHW = self.maxpool(self.relu(self.bn1(self.conv1(x_NCHW))))
        x_NCHW = self.layer4(self.layer3(self.layer2(self.layer1(x_NCHW))))
        return self.fc(self.flatten(self.avgpool(x_NCHW)))


def resnet18(
    *,
    num_classes: int = 1000,
    num_channels: int = 3,
    small_images: bool = False,
    zero_init_residual: bool = False,
    seed: int = 0,
) -> ResNet:
    """ResNet-18.

    Args:
        num_classes: Outputs.
        num_channels: Channels of the images.
        small_images: Use a 3x3 stem with stride 1 and no max-pooling, for images such as CIFAR-10's.
        zero_init_residual: Start every block as the identity.
        seed: Seed of the initial weights.

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
        seed=seed,
    )


def resnet50(
    *,
    num_classes: int = 1000,
    num_channels: int = 3,
    small_images: bool = False,
    zero_init_residual: bool = False,
    seed: int = 0,
) -> ResNet:
    """ResNet-50.

    Args:
        num_classes: Outputs.
        num_channels: Channels of the images.
        small_images: Use a 3x3 stem with stride 1 and no max-pooling, for images such as CIFAR-10's.
        zero_init_residual: Start every block as the identity.
        seed: Seed of the initial weights.

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
        seed=seed,
    )


def resnet152(
    *,
    num_classes: int = 1000,
    num_channels: int = 3,
    small_images: bool = False,
    zero_init_residual: bool = False,
    seed: int = 0,
) -> ResNet:
    """ResNet-152.

    Args:
        num_classes: Outputs.
        num_channels: Channels of the images.
        small_images: Use a 3x3 stem with stride 1 and no max-pooling, for images such as CIFAR-10's.
        zero_init_residual: Start every block as the identity.
        seed: Seed of the initial weights.

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
        seed=seed,
    )


def _shortcut(num_in: int, num_out: int, stride: int) -> nn.SequentialCell | None:
    if stride == 1 and num_in == num_out:
        return None
    return nn.SequentialCell(convolution(num_in, num_out, 1, stride=stride), batch_norm(num_out))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], num_in: int, width: int, num_blocks: int, *, stride: int
) -> nn.SequentialCell:
    first = block(num_in, width, stride)
    return nn.SequentialCell(first, *(block(width * block.expansion, width, 1) for _ in range(num_blocks - 1)))


def _zero_last_norms(network: nn.Cell) -> None:
    for _, cell in network.cells_and_names():
        last = cell.bn3 if isinstance(cell, Bottleneck) else cell.bn2 if isinstance(cell, BasicBlock) else None
        if last is not None:
            last.gamma.set_data(ops.zeros_like(last.gamma))

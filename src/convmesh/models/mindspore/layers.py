"""The layers of the reference networks, with the same semantics as their PyTorch twins.

MindSpore's own defaults differ (padding mode, momentum, bias), so each layer is spelled out once here.
"""

from __future__ import annotations

from mindspore import Tensor, nn, ops


def convolution(num_in: int, num_out: int, kernel: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution padded by half its kernel.

    Args:
        num_in: Input channels.
        num_out: Output channels.
        kernel: Side of the square kernel, odd.
        stride: Step in both directions.
        bias: Whether a bias is added.

    Returns:
        The convolution, its weights not yet drawn.
    """
    return nn.Conv2d(
        num_in, num_out, kernel, stride=stride, pad_mode="pad", padding=kernel // 2, has_bias=bias, weight_init="zeros"
    )


def batch_norm(num_channels: int) -> nn.BatchNorm2d:
    """A batch norm that keeps 90 % of its running statistics per batch, as PyTorch's ``momentum=0.1`` does."""
    return nn.BatchNorm2d(num_channels, eps=1e-5, momentum=0.9)


def dense(num_in: int, num_out: int) -> nn.Dense:
    """A dense layer with bias, its weights not yet drawn."""
    return nn.Dense(num_in, num_out, weight_init="zeros", bias_init="zeros")


class PaddedMaxPool(nn.Cell):
    """3x3 max-pooling of stride 2 with one pixel of padding on each side, after a ReLU.

    Zeros are padded instead of minus infinity: inputs are not negative and each window holds a real pixel, so that the
    maxima are the same. MindSpore's ``pad_mode="same"`` pads an even image on one side only, which is another function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pad = ops.Pad(((0, 0), (0, 0), (1, 1), (1, 1)))
        self.pool = nn.MaxPool2d(kernel_size=3, stride=2, pad_mode="valid")

    def construct(self, x_NCHW: Tensor) -> Tensor:
        """Pools images.

        Args:
            x_NCHW: Not negative.

        Returns:
            Shape (N, C, ceil(H / 2), ceil(W / 2)).
        """
        return self.pool(self.pad(x_NCHW))

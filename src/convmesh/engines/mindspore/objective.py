"""From a micro-batch to scores and loss: pixels, precision, cross-entropy.

Legend: N samples, H rows, W columns, C channels, K classes.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from convmesh.engines.contract import PixelScale
from convmesh.engines.mindspore.layers import ShardedWeighted
from convmesh.engines.mindspore.regroup import RegroupedConvolution

_COMPUTING = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Conv1dTranspose, nn.Conv2dTranspose, nn.Conv3dTranspose, nn.Dense,
    ShardedWeighted, RegroupedConvolution,
)  # fmt: skip
_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d,
    nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Softmax, nn.LogSoftmax,
)  # fmt: skip


def compute_in_half(network: nn.Cell, *, dtype: ms.Type, on_cpu: bool) -> None:
    """Makes convolutions and dense layers compute in a half type; parameters stay float32.

    Args:
        network: Changed in place, for training and evaluation.
        dtype: ``mindspore.float16`` or ``bfloat16``.
        on_cpu: There, all other layers compute in float32, since not all of MindSpore's CPU kernels know float16; on
            accelerators only norms and softmax do.
    """
    for _, cell in network.cells_and_names():
        if isinstance(cell, _COMPUTING):
            cell.to_float(dtype)
        elif isinstance(cell, _NORMS) or (on_cpu and not list(cell.cells())):
            cell.to_float(ms.float32)


class Scores(nn.Cell):
    """Scaled pixels through a network.

    Args:
        network: Maps (N, C, H, W) to (N, K).
        pixel_scale: How pixels become its input.
    """

    def __init__(self, network: nn.Cell, pixel_scale: PixelScale) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.factor_1C11 = _per_channel(pixel_scale.factor_C)
        self.offset_1C11 = _per_channel(pixel_scale.offset_C)

    def construct(self, images_NHWC: Tensor) -> Tensor:
        """Runs the network.

        Args:
            images_NHWC: uint8 pixels.

        Returns:
            Scores in float32, shape (N, K).
        """
        pixels_NCHW = ops.transpose(ops.cast(images_NHWC, ms.float32), (0, 3, 1, 2))
        x_NCHW = pixels_NCHW * self.factor_1C11 + self.offset_1C11
        return ops.cast(self.network(x_NCHW), ms.float32)


class Loss(nn.Cell):
    """Sum of weight x cross-entropy; what one micro-batch adds to the loss of an update.

    Args:
        network: Maps (N, C, H, W) to (N, K).
        pixel_scale: How pixels become its input.
        label_smoothing: Share of the target spread evenly over all classes.
    """

    def __init__(self, network: nn.Cell, pixel_scale: PixelScale, *, label_smoothing: float) -> None:
        super().__init__(auto_prefix=False)
        self.scores = Scores(network, pixel_scale)
        self.label_smoothing = label_smoothing

    def construct(
        self, images_NHWC: Tensor, labels_N: Tensor, weights_N: Tensor, factor: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the loss.

        Args:
            images_NHWC: uint8 pixels.
            labels_N: int32 classes.
            weights_N: Weight of each sample.
            factor: Loss scale divided by the samples of the global batch.

        Returns:
            ``factor`` x loss, which is differentiated, the loss itself (both are sums over the samples), and the
            scores.
        """
        scores_NK = self.scores(images_NHWC)
        losses_N = cross_entropy(scores_NK, labels_N, self.label_smoothing)
        loss_sum = ops.reduce_sum(losses_N * weights_N)
        return loss_sum * factor, loss_sum, scores_NK


class Evaluation(nn.Cell):
    """What one evaluation batch adds to the metrics.

    Args:
        network: Maps (N, C, H, W) to (N, K).
        pixel_scale: How pixels become its input.
    """

    def __init__(self, network: nn.Cell, pixel_scale: PixelScale) -> None:
        super().__init__(auto_prefix=False)
        self.scores = Scores(network, pixel_scale)

    def construct(self, images_NHWC: Tensor, labels_N: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes sums over the samples: loss without label smoothing, weights of the right ones, all weights."""
        scores_NK = self.scores(images_NHWC)
        losses_N = cross_entropy(scores_NK, labels_N, 0.0)
        right_N = ops.cast(ops.equal(ops.cast(ops.argmax(scores_NK, 1), ms.int32), labels_N), ms.float32)
        return (
            ops.reduce_sum(losses_N * weights_N),
            ops.reduce_sum(right_N * weights_N),
            ops.reduce_sum(weights_N),
        )


def cross_entropy(scores_NK: Tensor, labels_N: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy of each sample, with PyTorch's definition of label smoothing.

    Args:
        scores_NK: Scores in float32.
        labels_N: int32 classes.
        label_smoothing: Share ``s`` of the target spread evenly: ``(1 - s) * CE(label) + s * mean_k CE(k)``.

    Returns:
        Losses, shape (N,).
    """
    log_probabilities_NK = ops.log_softmax(scores_NK, 1)
    targets_NK = ops.one_hot(labels_N, scores_NK.shape[1], Tensor(1.0, ms.float32), Tensor(0.0, ms.float32))
    losses_N = -ops.reduce_sum(targets_NK * log_probabilities_NK, 1)
    if label_smoothing > 0:
        even_N = -ops.reduce_mean(log_probabilities_NK, 1)
        losses_N = losses_N * (1.0 - label_smoothing) + even_N * label_smoothing
    return losses_N


def _per_channel(values: tuple[float, ...]) -> Tensor:
    return Tensor(np.asarray(values, np.float32).reshape(1, -1, 1, 1))

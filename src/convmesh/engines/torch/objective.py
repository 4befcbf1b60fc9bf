"""From a micro-batch to scores and loss: pixels, precision, cross-entropy.

Legend: N samples, H rows, W columns, C channels, K classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convmesh.engines.contract import PixelScale
from convmesh.engines.torch.loader import TorchBatch
from convmesh.errors import DataError, ModelError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Objective:
    """What training minimises and evaluation measures.

    Args:
        pixel_scale: How pixels become the network's input.
        device: Where to compute.
        compute: Type of convolutions and dense layers; other operators and the loss follow autocast's rules.
        channels_last: Whether the input stays in the pixels' own memory order.
        dtype: Type of the network's parameters and its input.
    """

    def __init__(
        self,
        pixel_scale: PixelScale,
        *,
        device: torch.device,
        compute: torch.dtype,
        channels_last: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        num_channels = len(pixel_scale.factor_C)
        self._factor_1C11 = torch.tensor(pixel_scale.factor_C, dtype=dtype, device=device).view(1, num_channels, 1, 1)
        self._offset_1C11 = torch.tensor(pixel_scale.offset_C, dtype=dtype, device=device).view(1, num_channels, 1, 1)
        self._device = device
        self._compute = compute
        self._channels_last = channels_last

    def scores(self, network: Callable[[Tensor], Tensor], batch: TorchBatch) -> Tensor:
        """Runs the network.

        Args:
            network: Maps (N, C, H, W) to (N, K).
            batch: On the device.

        Returns:
            Scores in float32 or wider, shape (N, K).

        Raises:
            DataError: If the images have another number of channels than the pixel scale.
            ModelError: If batch norm gets a single value per channel to train on.
        """
        images_NHWC: Tensor = batch.images_NHWC
        num_channels = self._factor_1C11.shape[1]
        if images_NHWC.shape[-1] != num_channels:
            raise DataError("images have another number of channels than mean and std", got=images_NHWC.shape[-1],
                            expected=num_channels)  # fmt: skip
        # The permuted view of channels-last pixels is a channels-last tensor: no copy but the conversion.
        x_NCHW = torch.addcmul(
            self._offset_1C11, images_NHWC.permute(0, 3, 1, 2).to(self._factor_1C11.dtype), self._factor_1C11
        )
        x_NCHW = x_NCHW.contiguous(
            memory_format=torch.channels_last if self._channels_last else torch.contiguous_format
        )
        try:
            with self._precision():
                scores_NK = network(x_NCHW)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ModelError(
                "batch norm can't train on a single value per channel",
                got=f"a micro-batch of {images_NHWC.shape[0]} images",
                fix="Set 'data.last_batch: drop', or another 'train.global_batch'",
            ) from None
        return scores_NK if scores_NK.dtype == torch.float64 else scores_NK.float()

    def losses(self, scores_NK: Tensor, batch: TorchBatch, *, label_smoothing: float = 0.0) -> Tensor:
        """Weight times cross-entropy of each sample, shape (N,)."""
        losses_N = F.cross_entropy(scores_NK, batch.labels_N, reduction="none", label_smoothing=label_smoothing)
        return losses_N * batch.weights_N

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self._compute in (torch.float16, torch.bfloat16):
            return torch.autocast(self._device.type, dtype=self._compute)
        return contextlib.nullcontext()

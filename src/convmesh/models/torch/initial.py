"""Initial weights of the reference networks, the same distributions on both engines."""

from __future__ import annotations

import math

from torch import nn


def init_weights(network: nn.Module) -> None:
    """Draws initial weights from PyTorch's global generator, in the order of the modules.

    Convolutions: normal with variance ``2 / fan_out`` (He et al. 2015, https://arxiv.org/abs/1502.01852, eq. 14), bias
    0. Batch norms: weight 1, bias 0. Dense layers: weight and bias uniform in +-1/sqrt(fan_in).

    Args:
        network: Changed in place.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            nn.init.uniform_(module.weight, -bound, bound)
            nn.init.uniform_(module.bias, -bound, bound)

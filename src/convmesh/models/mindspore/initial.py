"""Initial weights of the reference networks, the same distributions on both engines."""

from __future__ import annotations

import math

import numpy as np
from mindspore import Tensor, nn


def init_weights(network: nn.Cell, *, seed: int) -> None:
    """Draws initial weights, in the order of the cells; they depend on the seed alone.

    Convolutions: normal with variance ``2 / fan_out`` (He et al. 2015, https://arxiv.org/abs/1502.01852, eq. 14), bias
    0. Batch norms: weight 1, bias 0. Dense layers: weight and bias uniform in +-1/sqrt(fan_in).

    Args:
        network: Changed in place.
        seed: Seed of the generator; MindSpore's global one is not used.
    """
    generator = np.random.default_rng(seed)
    for _, cell in network.cells_and_names():
        if isinstance(cell, nn.Conv2d):
            num_out, _, *kernel = cell.weight.shape
            std = math.sqrt(2 / (num_out * math.prod(kernel)))
            _set(cell.weight, generator.standard_normal(cell.weight.shape) * std)
            if cell.has_bias:
                _set(cell.bias, np.zeros(cell.bias.shape))
        elif isinstance(cell, nn.BatchNorm2d):
            _set(cell.gamma, np.ones(cell.gamma.shape))
            _set(cell.beta, np.zeros(cell.beta.shape))
        elif isinstance(cell, nn.Dense):
            bound = 1 / math.sqrt(cell.in_channels)
            _set(cell.weight, generator.uniform(-bound, bound, cell.weight.shape))
            _set(cell.bias, generator.uniform(-bound, bound, cell.bias.shape))


def _set(parameter: Tensor, value: np.ndarray) -> None:
    parameter.set_data(Tensor(value.astype(np.float32)))

"""A moving average of the weights, for evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from convmesh.engines.contract import Arrays
from convmesh.engines.torch.state import copy_arrays, find_misfits, to_array


class WeightAverage:
    """``average = decay * average + (1 - decay) * value`` of all parameters and floating-point buffers.

    Args:
        network: Its present values are the first average.
        decay: From 0 to 1.
    """

    def __init__(self, network: nn.Module, *, decay: float) -> None:
        self._network = network
        self._decay = decay
        self._values = {name: tensor.detach().clone() for name, tensor in _averaged(network).items()}

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the network's present values."""
        current = [tensor.detach() for tensor in _averaged(self._network).values()]
        torch._foreach_lerp_(list(self._values.values()), current, 1 - self._decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Starts again from the network's present values."""
        for name, tensor in _averaged(self._network).items():
            self._values[name].copy_(tensor)

    def scores(self, x_NCHW: Tensor) -> Tensor:
        """Runs the network with the averaged values instead of its own."""
        scores_NK: Tensor = torch.func.functional_call(self._network, self._values, (x_NCHW,))
        return scores_NK

    def export_state(self) -> Arrays:
        """Copies of the average by name."""
        return {name: to_array(tensor) for name, tensor in self._values.items()}

    def find_misfits(self, arrays: Arrays) -> list[str]:
        """What is missing, unexpected or of another shape."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._values.items()}
        return find_misfits(arrays, shapes, source="the weight average")

    def import_state(self, arrays: Arrays) -> None:
        """Takes over an average that has passed ``find_misfits``."""
        copy_arrays(self._values, arrays)


def _averaged(network: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(network.named_parameters())
    tensors.update({name: buffer for name, buffer in network.named_buffers() if buffer.is_floating_point()})
    return tensors

"""A moving average of the weights, for evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from convmesh.engines.contract import Arrays
from convmesh.engines.torch.state import check_names, copy_arrays, to_array
from convmesh.errors import CheckpointError, ConvMeshError


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

    def check_state(self, arrays: Arrays) -> list[ConvMeshError]:
        """What is missing, unexpected or of another shape."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._values.items()}
        return check_names(arrays, shapes, what="the weight average", error=CheckpointError)

    def import_state(self, arrays: Arrays) -> None:
        """Takes over an average that has passed ``check_state``."""
        copy_arrays(self._values, arrays)


def _averaged(network: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(network.named_parameters())
    tensors.update({name: buffer for name, buffer in network.named_buffers() if buffer.is_floating_point()})
    return tensors

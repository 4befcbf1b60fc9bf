"""The order of a tensor's dims in memory, so that channels-last tensors can be cut and joined as flat ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StorageOrder:
    """The order of a tensor's dims in memory, slowest first: (0, 2, 3, 1) for a channels-last NCHW tensor.

    Args:
        dims: The dims, slowest first.
    """

    dims: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> StorageOrder:
        """The order that a dense tensor has; dims of equal stride keep theirs."""
        return cls(tuple(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)))

    def flatten(self, tensor: Tensor) -> Tensor:
        """All elements in this order; a view where the tensor is laid out so, else a copy."""
        return tensor.permute(self.dims).reshape(-1)

    def unflatten(self, flat: Tensor, shape: torch.Size) -> Tensor:
        """A view of a flat tensor in a shape whose memory has this order."""
        inverse = [self.dims.index(dim) for dim in range(len(self.dims))]
        return flat.view([shape[dim] for dim in self.dims]).permute(inverse)

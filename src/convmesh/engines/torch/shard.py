"""Parameters as one flat buffer, whatever their memory format, and each rank's even slice of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from convmesh.engines.torch.collectives import DataAxis
from convmesh.engines.torch.storage import StorageOrder
from convmesh.errors import ModelError


class Shard:
    """All parameters in one flat buffer, of which every rank of the data axis owns one even range.

    The parameters become views of the buffer; their shapes, memory order and identity stay.

    Args:
        parameters: Trainable parameters by name, in order, all of one data type.
        orders: Their memory orders.
        axis: The data axis.

    Raises:
        ModelError: If the parameters have several data types.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], orders: Mapping[str, StorageOrder], *, axis: DataAxis
    ) -> None:
        dtypes = {parameter.dtype for parameter in parameters.values()}
        if len(dtypes) != 1:
            raise ModelError(
                "a sharded optimizer needs parameters of one data type",
                got=", ".join(sorted(map(str, dtypes))),
                fix="Build the network in float32, or set 'strategy.optimizer_sharding: false'",
            )
        self._parameters = parameters
        self._orders = orders
        self._axis = axis
        ends = list(itertools.accumulate(parameter.numel() for parameter in parameters.values()))
        self._spans = dict(zip(parameters, zip([0, *ends[:-1]], ends, strict=True), strict=True))
        self._slice_size = -(-ends[-1] // axis.size)
        self._flat = self._new_flat()
        for name, (begin, end) in self._spans.items():
            parameter = parameters[name]
            values = orders[name].flatten(parameter.detach())
            self._flat[begin:end].copy_(values)
            if values.data_ptr() == parameter.data_ptr():
                # The very strides, also of dims of size 1: DDP compares them with the gradient's.
                parameter.data = self._flat.as_strided(parameter.size(), parameter.stride(), begin)
            else:
                parameter.data = orders[name].unflatten(self._flat[begin:end], parameter.shape)

    def own_ranges(self) -> dict[str, tuple[int, int]]:
        """Parameters of which this rank owns something, with the first and one past the last element."""
        first = self._axis.position * self._slice_size
        ranges = {
            name: (max(first, begin) - begin, min(first + self._slice_size, end) - begin)
            for name, (begin, end) in self._spans.items()
        }
        return {name: (start, stop) for name, (start, stop) in ranges.items() if start < stop}

    def own_slice(self, name: str) -> Tensor:
        """This rank's part of a parameter, a flat view of its storage."""
        begin, _ = self._spans[name]
        start, stop = self.own_ranges()[name]
        return self._flat[begin + start : begin + stop]

    def share_parameters(self) -> None:
        """Gives every rank the parts that the others have updated."""
        self._axis.share_slices_(self._flat, purpose="parameters")

    def gather(self, slices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors from every rank's flat slices of them; all ranks must call.

        Args:
            slices: A tensor for each own range.

        Returns:
            One tensor per parameter, with its shape.
        """
        flat = self._new_flat()
        for name, (start, stop) in self.own_ranges().items():
            begin, _ = self._spans[name]
            flat[begin + start : begin + stop].copy_(slices[name])
        self._axis.share_slices_(flat, purpose="state")
        return {
            name: self._orders[name].unflatten(flat[begin:end], self._parameters[name].shape)
            for name, (begin, end) in self._spans.items()
        }

    def _new_flat(self) -> Tensor:
        like = next(iter(self._parameters.values()))
        return torch.zeros(self._slice_size * self._axis.size, dtype=like.dtype, device=like.device)

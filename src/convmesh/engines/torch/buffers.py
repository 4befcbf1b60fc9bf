"""Batch-norm statistics and other buffers: equal on all ranks after each update, untouched by a skipped one."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from convmesh.engines.torch.collectives import DataAxis


class Buffers:
    """The buffers of a network over the data axis.

    Args:
        network: Its buffers must be equal on all ranks now, but for ``parts``.
        axis: The data axis.
        parts: Names of buffers of which every rank has another part.
    """

    def __init__(self, network: nn.Module, *, axis: DataAxis, parts: Collection[str] = ()) -> None:
        self._axis = axis
        self._places = [
            (module, name)
            for path, module in network.named_modules()
            for name, _ in module.named_buffers(recurse=False)
            if (f"{path}.{name}" if path else name) not in parts
        ]
        self._before = [buffer.detach().clone() for buffer in self._current()]

    @torch.no_grad()
    def remember(self) -> None:
        """Notes the values before an update."""
        if self._places:
            torch._foreach_copy_(self._before, self._current())

    @torch.no_grad()
    def restore(self) -> None:
        """Brings back what was noted: a skipped update leaves no trace, not even an infinite running mean."""
        if self._places:
            torch._foreach_copy_(self._current(), self._before)

    @torch.no_grad()
    def combine(self, *, weight: float, ragged: bool) -> None:
        """Makes buffers equal on all ranks: the mean of what each rank made of them, weighted by its samples.

        What is averaged is the *change* since ``remember``, so that a constant stays what it is to the last bit.
        Integers (batch norm's count of batches) are equal by construction where all ranks run the same number of
        micro-batches; after a ragged update the largest counts.

        Args:
            weight: This rank's share of the samples of the global batch; a rank of weight 0 changes nothing.
            ragged: Whether ranks may have had different numbers of micro-batches; equal on all ranks.
        """
        if self._axis.size == 1:
            return
        pairs = list(zip(self._current(), self._before, strict=True))
        floating: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for now, before in pairs:
            if now.is_floating_point():
                floating.setdefault(now.dtype, []).append((now, before))
        for group in floating.values():
            self._average([now for now, _ in group], [before for _, before in group], weight)
        integers = [now for now, _ in pairs if not now.is_floating_point()]
        if ragged and integers:
            self._take_largest(integers)

    def _average(self, now: list[Tensor], before: list[Tensor], weight: float) -> None:
        sizes = [tensor.numel() for tensor in now]
        flat_before = torch.cat([tensor.reshape(-1) for tensor in before])
        if weight > 0:
            change = torch.cat([tensor.reshape(-1) for tensor in now]).sub_(flat_before).mul_(weight)
        else:
            change = torch.zeros_like(flat_before)  # 0 x infinity would not be 0.
        self._axis.sum_(change, purpose="buffers")
        parts = change.add_(flat_before).split(sizes)
        torch._foreach_copy_(now, [part.view(tensor.shape) for part, tensor in zip(parts, now, strict=True)])

    def _take_largest(self, integers: list[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1).to(torch.int64) for tensor in integers])
        self._axis.max_(flat, purpose="buffers")
        parts = flat.split([tensor.numel() for tensor in integers])
        for tensor, part in zip(integers, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def _current(self) -> list[Tensor]:
        # Looked up each time: a module may replace a buffer instead of changing it.
        return [module._buffers[name] for module, name in self._places]

"""Which layer a rank computes when, noted through hooks on its modules: on a CPU, in updates whose events are kept.

A layer is a module that has parameters or no modules of its own. Its forward is what runs within it. Its backward
begins when the gradient of its output is known, and lasts until that of another layer is: what lies between two layers,
such as an addition, counts with the one before it in the backward, and with none in the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from convmesh.profiling.recorder import RECORDER


class LayerTimes:
    """Notes what the layers of a network take.

    Args:
        network: Its modules get hooks while events are kept, and none else.
        enabled: Whether to note anything: a device that works later than it is told to can't be timed so.
    """

    def __init__(self, network: nn.Module, *, enabled: bool) -> None:
        self._network = network
        self._enabled = enabled
        self._hooks: list[Any] = []
        self._within: list[str] = []
        self._open: tuple[str, str, float] | None = None

    def follow(self) -> None:
        """Puts hooks on or takes them off, as the recorder keeps events or not; to be called before an update."""
        wanted = self._enabled and RECORDER.keeps_events
        if wanted and not self._hooks:
            for name, module in layers(self._network):
                self._hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))
                # Always: a checkpoint breaks a forward off as soon as all that it needs is computed again.
                self._hooks.append(module.register_forward_hook(partial(self._leave, name), always_call=True))
        elif self._hooks and not wanted:
            for hook in self._hooks:
                hook.remove()
            self._hooks, self._within, self._open, RECORDER.layer = [], [], None, ""

    def end(self, at: float) -> None:
        """Ends a backward.

        Args:
            at: When its computing was done, in the recorder's seconds.
        """
        self._turn_to("", "", at)

    def _enter(self, name: str, *_: object) -> None:
        self._within.append(name)
        self._turn_to(name, "forward", RECORDER.now())

    def _leave(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        self._within.pop()
        self._turn_to(self._within[-1] if self._within else "", "forward", RECORDER.now())
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, name))

    def _begin_backward(self, name: str, gradient: Tensor) -> None:
        self._turn_to(name, "backward", RECORDER.now())

    def _turn_to(self, layer: str, name: str, now: float) -> None:
        if self._open is not None:
            RECORDER.add_layer(self._open[1], layer=self._open[0], start=self._open[2], end=max(now, self._open[2]))
        self._open = (layer, name, now) if layer else None
        RECORDER.layer = layer


def layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a network that compute something themselves, with their paths."""
    for name, module in network.named_modules():
        computes = not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False))
        if name and computes and not isinstance(module, torch.jit.ScriptModule):
            yield name, module


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _tensors(tuple(output.values()))
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)

"""Recomputing blocks of a network: PyTorch's checkpoints, around modules as they stand, under their own names.

What a block draws at random is drawn again from the same state, and its buffers learn from the forward alone: a block
that is computed again works on copies of them, with the values that they had.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convmesh.errors import ConvMeshError, ModelError
from convmesh.graph import Block

_thread = threading.local()


def is_repeating() -> bool:
    """Whether a block is being computed again in this thread."""
    return getattr(_thread, "depth", 0) > 0


def recompute(network: nn.Module, blocks: Sequence[Block]) -> None:
    """Makes a network keep only the inputs of blocks, and compute them again in the backward.

    Args:
        network: Changed in place; its modules and their names stay. ``refusals`` has found nothing.
        blocks: Blocks of its graph that share no operator.
    """
    runs: dict[str, dict[str, str]] = {}
    for block in blocks:
        first, last = block.modules
        if block.is_run:
            runs.setdefault(first.rpartition(".")[0], {})[_leaf(first)] = _leaf(last)
        else:
            module = network.get_submodule(first)
            object.__setattr__(module, "forward", _Recomputed(module.forward, [module]))
    for path, spans in runs.items():
        container = network.get_submodule(path)
        object.__setattr__(container, "forward", _Runs(container, spans))


def refusals(network: nn.Module, blocks: Sequence[Block]) -> list[ConvMeshError]:
    """Blocks that can't be recomputed: runs of children of what is no ``nn.Sequential``.

    Args:
        network: Not changed.
        blocks: Blocks of its graph.

    Returns:
        One error per block.
    """
    found: list[ConvMeshError] = []
    for block in blocks if any(entry.is_run for entry in blocks) else ():
        path = block.modules[0].rpartition(".")[0]
        container = network.get_submodule(path)
        if block.is_run and type(container).forward is not nn.Sequential.forward:
            found.append(
                ModelError(
                    f"the modules {block.name} can't be recomputed together: only an nn.Sequential calls its children "
                    "one after the other",
                    got=type(container).__name__,
                    fix="Make it an nn.Sequential, or name other blocks in 'recompute'",
                )
            )
    return found


class _Recomputed:
    """A forward that keeps its inputs alone.

    Args:
        forward: What is computed.
        modules: Those that hold its buffers.
    """

    def __init__(self, forward: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        self._forward = forward
        self._modules = list(modules)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return checkpoint(self._forward, *inputs, use_reentrant=False, context_fn=self._contexts, **options)

    def _contexts(self) -> tuple[Any, Any]:
        visit = _Visit(self._modules)
        return visit.first(), visit.again()


class _Runs:
    """The forward of an ``nn.Sequential`` that recomputes runs of its children.

    Args:
        container: The ``nn.Sequential``.
        spans: Name of the first child of each run to that of its last.
    """

    def __init__(self, container: nn.Module, spans: dict[str, str]) -> None:
        self._container = container
        self._spans = spans

    def __call__(self, x: Tensor) -> Tensor:
        children = iter(self._container._modules.items())
        for name, module in children:
            if module is None:
                continue
            run = [module]
            while name in self._spans and len(run) < self._length(name):
                run.append(next(children)[1])  # type: ignore[arg-type]
            x = _Recomputed(_InTurn(run), run)(x) if name in self._spans else module(x)
        return x

    def _length(self, first: str) -> int:
        names = list(self._container._modules)
        return names.index(self._spans[first]) - names.index(first) + 1


class _InTurn:
    """Calls modules one after the other."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules

    def __call__(self, x: Tensor) -> Tensor:
        for module in self._modules:
            x = module(x)
        return x


class _Visit:
    """The buffers of a block around one forward and the computation that repeats it."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before: list[tuple[nn.Module, str, Tensor]] = []

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Notes the values that the forward changes, as they were.

        PyTorch does not tell of statistics that batch norm changes, so that all that can be some are noted.
        """
        places = list(self._places())
        versions = {id(buffer): buffer._version for _, _, buffer in places}
        values = {id(buffer): buffer.detach().clone() for _, _, buffer in places}
        yield
        for module, name, buffer in places:
            changed = module._buffers[name] is not buffer or buffer._version != versions[id(buffer)]
            if changed or buffer.ndim < 2:
                self._before.append((module, name, values[id(buffer)]))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Puts copies of the earlier values in place of the buffers for a while."""
        now = [module._buffers[name] for module, name, _ in self._before]
        copies = {id(value): value.clone() for _, _, value in self._before}
        for module, name, value in self._before:
            module._buffers[name] = copies[id(value)]
        _thread.depth = getattr(_thread, "depth", 0) + 1
        try:
            yield
        finally:
            _thread.depth -= 1
            for (module, name, _), buffer in zip(self._before, now, strict=True):
                module._buffers[name] = buffer

    def _places(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in dict.fromkeys(inner for root in self._modules for inner in root.modules()):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module, name, buffer


class Spared(torch.autograd.Function):
    """Stands for a change of placement whose result nothing needs: zeros of its shape, without communication."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_channels: int) -> Tensor:
        """Zeros of the tensor's shape, with so many channels."""
        del ctx
        return tensor.new_zeros(()).expand(tensor.shape[0], num_channels, *tensor.shape[2:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Never called: what is computed again is not differentiated."""
        del ctx, gradient
        raise AssertionError("unreachable: a recomputed forward is not differentiated")


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]

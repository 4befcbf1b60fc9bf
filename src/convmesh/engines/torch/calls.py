"""Functions that a network calls in its own ``forward``: which call is which, and others in their place.

Calls of the functions below are counted, those of each module apart, in the order in which its ``forward`` makes them.
While a network is read, each notes its number on what PyTorch reads of it; a split network counts them again, and
those that the plan names do something else instead. ``forward`` itself stays as it is, whatever Python it holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import traceback
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from convmesh.errors import ModelError
from convmesh.graph import Node

_NUMBER = "convmesh_call"

_NAMES: Mapping[str, str] = {
    "softmax": "softmax", "log_softmax": "softmax", "layer_norm": "layer_norm", "mean": "mean", "sum": "sum",
    "amax": "amax", "max": "amax", "split": "split", "split_with_sizes": "split", "chunk": "split",
    "tensor_split": "split",
}  # fmt: skip
"""Name of a function or method to the kind that it may be."""

KINDS: Mapping[Any, str] = {
    getattr(place, name): kind for name, kind in _NAMES.items() for place in (torch, Tensor, F) if hasattr(place, name)
}
"""Function to the kind that it may be."""


class Numbering(TorchFunctionMode):
    """While it is active, each call of a counted function is marked with its number in its module."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Marks the call."""
        if func not in KINDS:
            return func(*args, **(kwargs or {}))
        module = _calling_module()
        # While export reads, it calls modules through stand-ins that share what they hold.
        key = id(module.__dict__) if module is not None else 0
        number = self._numbers.get(key, 0)
        self._numbers[key] = number + 1
        with traceback.annotate({_NUMBER: number}):
            return func(*args, **(kwargs or {}))


def numbers_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """The numbers of calls in what was read under `Numbering`.

    Args:
        graph: Of an exported program.

    Returns:
        Node to number, without those of modules that are called several times, and of calls that are no one operator.
    """
    marked: dict[tuple[str, int], list[fx.Node]] = {}
    repeated: set[str] = set()
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        path = str(list(stack.values())[-1][0]) if stack else ""
        if any("@" in key for key in stack):
            repeated.add(path)
        number = (node.meta.get("custom") or {}).get(_NUMBER)
        if number is not None and "getitem" not in str(node.target):
            marked.setdefault((path, number), []).append(node)
    return {nodes[0]: number for (path, number), nodes in marked.items() if path not in repeated and len(nodes) == 1}


@dataclass
class Call:
    """What is done in place of one call.

    Args:
        node: The operator that it is.
        before: Changes of its input, in order.
        work: What is called with the function, the input and the other arguments; None for the function itself.
        after: Changes of its output, in order.
    """

    node: Node
    before: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    work: Callable[..., Any] | None = None
    after: list[Callable[[Tensor], Tensor]] = field(default_factory=list)

    def __call__(self, function: Any, *arguments: Any, **options: Any) -> Any:
        """Does it.

        Raises:
            ModelError: If the network calls another function here than when it was read.
        """
        x, rest = (options.pop("input"), arguments) if "input" in options else (arguments[0], arguments[1:])
        given = _told(function, x, rest, options)
        if given != self._as_read:
            raise self._changed(f"{given} in place of {self._as_read}")
        for change in self.before:
            x = change(x)
        result = function(x, *rest, **options) if self.work is None else self.work(function, x, *rest, **options)
        for change in self.after:
            result = change(result)
        return result

    def missing(self) -> ModelError:
        """The error that it was never called."""
        return self._changed("it is not called")

    @cached_property
    def _as_read(self) -> str:
        return _expected(self.node)

    def _changed(self, got: str) -> ModelError:
        return ModelError(
            f"forward does not call {self.node.name} ({self.node.kind}) as when the network was read in training",
            got=got,
            fix="Let forward call the same functions whatever its input, in training and in evaluation",
        )


def _told(function: Any, x: Tensor, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    """A call in words: the function and the dims along which it works."""
    kind, name = KINDS[function], function.__name__
    given = dict(zip(_POSITIONS.get(kind, ("dim",)), arguments, strict=False)) | dict(options)
    if kind == "layer_norm":
        return _in_words(name, range(x.ndim - len(given["normalized_shape"]), x.ndim))
    dim: Any = given.get("dim", given.get("axis", 0 if kind == "split" else None))
    if isinstance(dim, Tensor):
        return name  # The larger of two tensors.
    if dim is None and kind == "softmax":
        dim = 0 if x.ndim in {0, 1, 3} else 1  # What PyTorch then takes.
    dims = [dim] if isinstance(dim, int) else dim or range(x.ndim)
    return _in_words("split" if kind == "split" else name, [place % x.ndim for place in dims])


_POSITIONS = {"layer_norm": ("normalized_shape",), "split": ("sizes", "dim")}
"""Names of the arguments after the input, as far as they count."""


def _expected(node: Node) -> str:
    """How `_told` tells of the call that an operator is."""
    attributes = node.attributes
    if node.kind == "layer_norm":
        return _in_words(node.kind, range(len(node.shape) - attributes["num_dims"], len(node.shape)))
    if node.kind == "softmax":
        return _in_words("log_softmax" if attributes["log"] else "softmax", [attributes["dim"]])
    if node.kind == "split":
        return _in_words("split", [attributes["dim"]])
    return _in_words("max" if attributes.get("ties") == "first" else node.kind, attributes["dims"])


def _in_words(name: str, dims: Iterable[int]) -> str:
    return f"{name} of dim {', '.join(map(str, sorted(dims)))}"


def replace_calls(module: nn.Module, calls: Mapping[int, Call]) -> None:
    """Puts others in place of functions that a module calls.

    Args:
        module: Its ``forward`` is wrapped.
        calls: Number of a call to what is done instead.
    """
    object.__setattr__(module, "forward", _Replacing(module.forward, calls))


class _Replacing:
    """A forward with other functions.

    Args:
        forward: The module's own.
        calls: Number of a call to what is done instead.
    """

    def __init__(self, forward: Callable[..., Any], calls: Mapping[int, Call]) -> None:
        self._forward = forward
        self._calls = calls

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        with _Replacement(self, self._calls) as mode:
            result = self._forward(*inputs, **options)
        for number, call in self._calls.items():
            if number >= mode.count:
                raise call.missing()
        return result


class _Replacement(TorchFunctionMode):
    """One run of such a forward."""

    def __init__(self, owner: _Replacing, calls: Mapping[int, Call]) -> None:
        super().__init__()
        self._owner = owner
        self._calls = calls
        self.count = 0

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func not in KINDS or not _is_called_by(self._owner):
            return func(*args, **options)
        call = self._calls.get(self.count)
        self.count += 1
        return func(*args, **options) if call is None else call(func, *args, **options)


_CALL = nn.Module._call_impl.__code__
_WRAPPER = _Replacing.__call__.__code__


def _calling_module() -> nn.Module | None:
    """The module whose ``forward`` is running."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals["self"]


def _is_called_by(owner: _Replacing) -> bool:
    """Whether a forward itself is running, and not that of a module that it calls."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _CALL:
        if frame.f_code is _WRAPPER and frame.f_locals["self"] is owner:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False

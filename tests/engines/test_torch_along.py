"""Functions along channels on own ones, ranks being threads: masks, half types, autocast, odd shapes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from convmesh.engines.torch.along import Along
from convmesh.engines.tracing import trace
from convmesh.graph import Node

pytestmark = pytest.mark.torch

LISTS = ((4, 0), (1, 2, 6), (3, 5))
Work = Callable[[Tensor], Any]


class ThreadAxis:
    """An axis whose ranks are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._told: dict[int, Tensor] = {}
        self._barrier = threading.Barrier(size)

    def of(self, position: int) -> Any:
        axis = object.__new__(ThreadAxis)
        axis.__dict__ = self.__dict__ | {"position": position}
        return axis

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self._told[self.position] = tensor  # type: ignore[attr-defined]
        self._barrier.wait(10)
        found = [self._told[rank] for rank in range(self.size)]
        self._barrier.wait(10)
        return found

    def gather(self, part: Tensor, _lists: Any) -> Tensor:
        return torch.cat(self._all(part), dim=1)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._all(tensor)).sum(0)


class Calls(nn.Module):
    """One function, of whose results the first counts."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def forward(self, x: Tensor) -> Any:
        y = self.work(x)
        return y[0] if isinstance(y, tuple) else y


def node_of(work: Work, x: Tensor) -> Node:
    return next(node for node in trace(Calls(work), tuple(x.shape)) if node.call is not None)


def on_ranks(node: Node, call: Callable[[Along, Tensor], Any], x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Result and gradient of the input, from the parts of all ranks."""
    axis = ThreadAxis(len(LISTS))

    def rank(position: int) -> tuple[Tensor, Tensor]:
        own = x[:, list(LISTS[position])].detach().clone().requires_grad_()
        y = call(Along(node, LISTS, axis.of(position)), own)  # type: ignore[arg-type]
        y = y[0] if isinstance(y, tuple) else y
        part = gradient[:, list(LISTS[position])] if y.shape == own.shape else gradient
        y.backward(part.to(y.dtype))
        assert own.grad is not None
        return y.detach(), own.grad

    with ThreadPoolExecutor(len(LISTS)) as pool:
        results = list(pool.map(rank, range(len(LISTS))))
    order = torch.tensor([channel for own in LISTS for channel in own]).argsort()
    whole = results[0][0]
    if whole.shape[1:2] == (len(LISTS[0]),) and whole.ndim == x.ndim:
        whole = torch.cat([y for y, _ in results], dim=1)[:, order]
    return whole, torch.cat([grad for _, grad in results], dim=1)[:, order]


CASES: dict[str, Work] = {
    "softmax": lambda x: F.softmax(x, dim=1),
    "log_softmax": lambda x: x.log_softmax(1),
    "float_softmax": lambda x: torch.softmax(x, 1, dtype=torch.float32),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "mean": lambda x: x.mean(dim=(1, 2)),
    "sum": lambda x: torch.sum(x, 1, keepdim=True),
    "amax": lambda x: x.amax((1, 3)),
    "max": lambda x: torch.max(x, dim=1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_parts_give_what_the_whole_gives(name: str, dtype: torch.dtype) -> None:
    work = CASES[name]
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (2, 7, 3, 4)).to(dtype).requires_grad_()  # Maxima with equals.
    y = work(x)
    y = y[0] if isinstance(y, tuple) else y
    gradient = torch.randn(y.shape).to(dtype)
    y.backward(gradient.to(y.dtype))
    assert x.grad is not None

    def call(along: Along, own: Tensor) -> Any:
        calls: dict[str, Callable[[], Any]] = {
            "softmax": lambda: along(F.softmax, own, dim=1),
            "log_softmax": lambda: along(Tensor.log_softmax, own, 1),
            "float_softmax": lambda: along(torch.softmax, own, 1, dtype=torch.float32),
            "layer_norm": lambda: along(F.layer_norm, own, own.shape[1:]),
            "mean": lambda: along(Tensor.mean, own, dim=(1, 2)),
            "sum": lambda: along(torch.sum, own, 1, keepdim=True),
            "amax": lambda: along(Tensor.amax, own, (1, 3)),
            "max": lambda: along(torch.max, own, dim=1),
        }
        return calls[name]()

    got, of_input = on_ranks(node_of(work, x), call, x, gradient)
    assert got.dtype == y.dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    tolerance = 1e-5 if (name, dtype) == ("float_softmax", torch.float64) else tolerance
    torch.testing.assert_close(got, y.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(of_input, x.grad, rtol=tolerance, atol=tolerance)


def test_masked_channels_and_places_of_maxima() -> None:
    x = torch.randn(2, 7, 5)
    x[:, [1, 2, 6]] = -torch.inf  # All of one rank.
    node = node_of(CASES["softmax"], x)
    got, _ = on_ranks(node, lambda along, own: along(F.softmax, own, dim=1), x, torch.ones(2, 7, 5))
    torch.testing.assert_close(got, x.softmax(1))
    x = torch.tensor([[1.0, 3, 0, 3, 3, 2, 3], [4, 4, 4, 4, 4, 4, 4]])
    seen: list[Tensor] = []

    def call(along: Along, own: Tensor) -> Any:
        values, places = along(torch.max, own, 1)
        seen.append(places)
        return values

    on_ranks(node_of(CASES["max"], x), call, x, torch.ones(2))
    assert [places.tolist() for places in seen] == [[1, 0]] * 3


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "sum"])
def test_types_under_autocast_are_those_of_the_function(name: str) -> None:
    x = torch.randn(2, 7, 3, 4, dtype=torch.bfloat16)
    functions: dict[str, Work] = {
        "softmax": lambda own: F.softmax(own, 1),
        "layer_norm": lambda own: F.layer_norm(own, own.shape[1:]),
        "sum": lambda own: own.sum(1),
    }
    work = functions[name]
    node = node_of(work, x)

    def call(along: Along, own: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            arguments = {"softmax": (1,), "layer_norm": (own.shape[1:],), "sum": (1,)}[name]
            function = {"softmax": F.softmax, "layer_norm": F.layer_norm, "sum": torch.sum}[name]
            return along(function, own, *arguments)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = work(x)
    got, _ = on_ranks(node, call, x, torch.ones_like(expected))
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)

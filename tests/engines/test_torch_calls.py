"""Functions that a network calls in its own forward: which call is which, and others in their place."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from convmesh.engines.torch.calls import Call, replace_calls
from convmesh.engines.tracing import trace
from convmesh.errors import ModelError
from convmesh.graph import saved_activations
from tests.engines.test_trace_torch import kept_bytes

pytestmark = pytest.mark.torch


class Attention(nn.Module):
    """A softmax in a module of its own, which others call."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x, dim=1)


class Mixed(nn.Module):
    """Counted functions of all kinds between others, in a loop, and in modules that are called once and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.once = Attention()
        self.twice = Attention()
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        first, second = x.chunk(2, 1)
        x = torch.cat([self.once(second), first * torch.max(second, dim=1, keepdim=True)[0]], dim=1)
        x = self.softmax(self.twice(self.twice(x)))
        for piece in torch.split(x, [3, 5], dim=1):
            x = x + piece.mean(1, keepdim=True) + torch.maximum(x, piece.amax(dim=(1, 2), keepdim=True))
        return torch.log_softmax(F.layer_norm(x, x.shape[1:]), dim=-3).sum((2, 3))


def test_calls_are_numbered_by_module() -> None:
    graph = trace(Mixed(), (2, 3, 6, 6))
    numbers = {node.name: node.call for node in graph if node.kind in {"softmax", "layer_norm", "amax", "mean", "sum"}}
    assert numbers == {
        "once": 0, "twice": None, "twice@2": None, "softmax": 0, "amax": 1, "mean": 3, "amax@2": 4, "mean@2": 5,
        "amax@3": 6, "layer_norm": 7, "softmax@2": 8, "sum": 9,
    }  # fmt: skip
    assert [node.call for node in graph if node.kind == "split"] == [0, 2]
    assert [node.attributes["ties"] for node in graph if node.kind == "amax"] == ["first", "all", "all"]
    assert type(graph).from_json(graph.to_json()).node("layer_norm").call == 7


class Recorder:
    """Calls the function, twice as large, and remembers which."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __call__(self, function: Any, x: Tensor, *arguments: Any, **options: Any) -> Any:
        self.called.append(function.__name__)
        return 2 * function(x, *arguments, **options)


def test_others_are_called_in_their_place_and_those_of_inner_modules_are_not() -> None:
    network, recorder = Mixed(), Recorder()
    x = torch.randn(2, 3, 6, 6)
    expected = network(x)
    graph = trace(network, (2, 3, 6, 6))
    replace_calls(network, {3: Call(graph.node("mean"), work=recorder), 9: Call(graph.node("sum"), work=recorder)})
    got = network(x)
    assert recorder.called == ["mean", "sum"]
    assert not torch.allclose(got, expected)
    inner = Recorder()
    replace_calls(network.once, {0: Call(graph.node("once"), before=[torch.zeros_like], work=inner)})
    network(x)
    assert inner.called == ["softmax"]
    assert recorder.called == ["mean", "sum"] * 2
    other = copy.deepcopy(network)
    other(x)
    assert recorder.called == ["mean", "sum"] * 2
    y = checkpoint(network, x.requires_grad_(), use_reentrant=False)
    y.sum().backward()
    assert recorder.called == [*["mean", "sum"] * 3, "mean"]  # The last is computed again for nothing.


class Moody(nn.Module):
    """Calls other functions, or the same along other dims, at other sizes."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 4:
            return x.softmax(1) if len(x) == 2 else x.log_softmax(dim=-1)
        return x.softmax(0) if len(x) == 4 else x


def test_a_forward_that_calls_other_functions_is_refused() -> None:
    network = Moody()
    graph = trace(network, (2, 3))
    replace_calls(network, {0: Call(graph.node("softmax"), work=Recorder())})
    network(torch.zeros(2, 3))
    with pytest.raises(ModelError, match=r"does not call softmax .*log_softmax of dim 1 in place of softmax of dim 1"):
        network(torch.zeros(3, 3))
    with pytest.raises(ModelError, match=r"softmax of dim 0 in place of softmax of dim 1"):
        network(torch.zeros(4, 3))
    with pytest.raises(ModelError, match=r"it is not called"):
        network(torch.zeros(5, 3))


class Maxima(nn.Module):
    """Maxima over channels, of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv1(x))
        return self.conv2(torch.cat([x.amax(1, keepdim=True), x.max(1, keepdim=True).values], dim=1))


def test_maxima_keep_what_autograd_keeps() -> None:
    predicted = sum(saved_activations(trace(Maxima(), (2, 3, 16, 16))).values())
    assert predicted == pytest.approx(kept_bytes(Maxima(), torch.randn(2, 3, 16, 16)), rel=0.05)

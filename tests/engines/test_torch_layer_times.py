"""Layers are timed through hooks: all of them, forward and backward, and only while events are kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convmesh.engines.torch.layer_times import LayerTimes, layers
from convmesh.profiling.events import NONE, RankEvents
from convmesh.profiling.recorder import RECORDER

pytestmark = pytest.mark.torch


class Block(nn.Module):
    """A residual block with an activation in place; computed again in the backward if wanted."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self._again = again

    def inner(self, x: Tensor) -> Tensor:
        found: Tensor = self.act(self.norm(self.conv(x)))
        return found

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self._again else self.inner(x)
        return x + found


@pytest.fixture(autouse=True)
def _stops() -> Iterator[None]:
    yield
    if RECORDER.keeps_events:
        RECORDER.stop(0)


def _network(*, again: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), Block(again=again), Block(again=again), nn.Flatten(), nn.LazyLinear(2))


def _update(network: nn.Module, times: LayerTimes, x: Tensor) -> None:
    times.follow()
    begun = RECORDER.now()
    loss = network(x).sum()
    RECORDER.add("compute", "forward", start=begun, end=RECORDER.now())
    begun = RECORDER.now()
    loss.backward()
    end = RECORDER.now()
    times.end(end)
    RECORDER.add("compute", "backward", start=begun, end=end)


def _names(events: RankEvents) -> list[tuple[str, str]]:
    chosen = events.of_kind("compute") & (events.layer_E != NONE)
    return [
        (events.text(layer), events.text(name))
        for layer, name in zip(events.layer_E[chosen], events.name_E[chosen], strict=True)
    ]


@pytest.mark.parametrize("again", [False, True])
def test_every_layer_is_noted_forward_and_backward_and_nothing_counts_twice(again: bool) -> None:
    network, x = _network(again=again), torch.randn(2, 3, 8, 8)
    network(x).sum().backward()
    usual = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad()
    times = LayerTimes(network, enabled=True)
    RECORDER.start()

    _update(network, times, x)
    events = RECORDER.stop(0)

    own = [name for name, _ in layers(network)]
    assert own == ["0", "1.conv", "1.norm", "1.act", "2.conv", "2.norm", "2.act", "3", "4"]
    noted = _names(events)
    forward, backward = ([layer for layer, name in noted if name == way] for way in ("forward", "backward"))
    assert forward[: len(own)] == own
    assert forward[len(own) :] == (own[4:7] + own[1:4] if again else [])
    # What is computed again comes after the backward of a block has begun.
    assert [layer for place, layer in enumerate(backward) if layer not in backward[:place]] == own[::-1]
    assert len(usual) == 12
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter.grad, usual[name]), name  # type: ignore[arg-type]
    main = events.of_kind("compute")
    assert (events.start_E[main][1:] >= events.end_E[main][:-1]).all()


def test_without_kept_events_there_is_no_hook() -> None:
    network, x = _network(), torch.randn(2, 3, 8, 8)
    network(x)
    times, never = LayerTimes(network, enabled=True), LayerTimes(network, enabled=False)
    RECORDER.start()
    _update(network, times, x)
    assert any(module._forward_hooks for module in network.modules())
    RECORDER.stop(0)

    _update(network, times, x)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())

    RECORDER.start()
    _update(network, never, x)
    assert _names(RECORDER.stop(0)) == []


def test_a_collective_within_a_layer_is_that_layers() -> None:
    class Exchanging(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with RECORDER.span("communication", "all-gather activations", axis="channel", num_bytes=8):
                return x * 2

    network = nn.Sequential(Exchanging(), nn.Linear(3, 2))
    times = LayerTimes(network, enabled=True)
    RECORDER.start()

    _update(network, times, torch.randn(2, 3))

    events = RECORDER.stop(0)
    (index,) = events.of_kind("communication").nonzero()[0]
    assert events.text(events.layer_E[index]) == "0"
    with RECORDER.span("optimizer", "optimizer"):
        pass
    assert RECORDER.layer == ""

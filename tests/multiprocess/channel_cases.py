"""Cases for ranks of PyTorch that split a network along channels."""

from __future__ import annotations

import copy
import dataclasses
import unittest.mock
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from convmesh.engines.contract import Engine, World
from convmesh.engines.torch.channel_axis import ChannelAxis
from convmesh.engines.torch.channel_split import ChannelSplit, split_of
from convmesh.engines.torch.channel_transport import Messages, Native, Transport, Transports
from convmesh.engines.torch.collectives import DataAxis
from convmesh.engines.torch.engine import TorchEngine, _group
from convmesh.engines.torch.parallelize import apply
from convmesh.engines.torch.recompute import recompute
from convmesh.engines.torch.trace import trace
from convmesh.errors import ConvMeshError
from convmesh.graph import Graph
from convmesh.mesh import Mesh
from convmesh.models.torch import build
from convmesh.plan import CHANNEL, Choice, Entry, Plan, resolve
from convmesh.plan.by_rule import plan_by_rule
from convmesh.plan.collectives import channel_collectives
from tests.multiprocess.channel_networks import EXTRA
from tests.networks_torch import NETWORKS

_engines: dict[str, TorchEngine] = {}


def on_mesh(world: World, sizes: Mapping[str, int]) -> tuple[TorchEngine, World]:
    """The ranks of a pool as another mesh; groups are made once."""
    mesh = Mesh(sizes)
    placed = dataclasses.replace(world, mesh=mesh)
    if str(mesh) not in _engines:
        engine = TorchEngine()
        engine._world = placed
        engine._axis = DataAxis(_group(placed, "data"))
        engine._channel = _group(placed, CHANNEL)
        _engines[str(mesh)] = engine
    return _engines[str(mesh)], placed


def plan_of(entries: Mapping[str, Any], num_ranks: int, **settings: Any) -> Plan:
    """A plan from operator name to a split, or to the arguments of a choice."""
    choices = {
        name: Choice(split=choice) if isinstance(choice, str) else Choice(**choice) for name, choice in entries.items()
    }
    return Plan(
        mesh=Mesh({"data": 1, CHANNEL: num_ranks}),
        entries=tuple(Entry(pattern=name, axes={CHANNEL: choice}) for name, choice in choices.items()),
        **settings,
    )


def by_rule(graph: Graph, num_ranks: int, **settings: Any) -> Plan:
    """The plan by rule, in which no layer is too small."""
    plan = plan_by_rule(graph, Mesh({"data": 1, CHANNEL: num_ranks}), min_multiply_adds=0)
    return dataclasses.replace(plan, **settings)


def difference(got: Tensor, expected: Tensor, *, scale: float = 0.0) -> float:
    """The norm of the difference over that of what is expected, or a millionth of a scale where that is larger.

    Some gradients are zero but for rounding, as that of a shift before a batch norm.
    """
    if got.shape != expected.shape:
        return float("inf")
    return float((got - expected).norm() / max(float(expected.norm()), 1e-6 * scale, 1e-30))


def whole(split: ChannelSplit, name: str, tensor: Tensor) -> Tensor:
    shard = split.shards.get(name)
    return tensor if shard is None else split.axis.gather(tensor, shard.lists, dim=shard.dim)


def compare(
    network: nn.Module, shape: Sequence[int], entries: Mapping[str, Any] | str, axis: ChannelAxis, **settings: Any
) -> dict[str, Any]:
    """One forward and backward of a network, whole and split, from the same parameters.

    Returns:
        The largest relative differences of output, input gradient, parameter gradients and buffers, and the collectives
        as counted and as told beforehand.
    """
    network = network.double()
    if settings.pop("channels_last", False):
        network = network.to(memory_format=torch.channels_last)
        axis = ChannelAxis(axis._group, channels_last=True)
    alone = copy.deepcopy(network)
    graph = trace(network, tuple(shape))
    plan = by_rule(graph, axis.size, **settings) if entries == "rule" else plan_of(entries, axis.size, **settings)
    resolved = resolve(graph, plan)
    apply(network, resolved, axis)
    recompute(network, resolved.recomputed)
    split = split_of(network)
    assert split is not None
    torch.manual_seed(5)
    x = torch.randn(*shape, dtype=torch.float64)
    results = []
    for net in (alone, network):
        own = x.clone().requires_grad_()
        axis.begin_update()
        torch.manual_seed(7)
        y = net(own)
        torch.manual_seed(6)
        (y * torch.randn_like(y)).sum().backward()
        results.append((y.detach(), own.grad))
    counted = {(count.kind): (count.number, count.num_bytes) for count in axis.counts()}
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    errors = {"output": difference(results[1][0], results[0][0]), "input": difference(results[1][1], results[0][1])}
    own_gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    assert own_gradients.keys() == gradients.keys(), own_gradients.keys() ^ gradients.keys()
    scale = max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        errors[name] = difference(whole(split, name, own_gradients[name]), gradient, scale=scale)
    buffers = dict(network.named_buffers())
    for name, buffer in alone.named_buffers():
        if buffer.is_floating_point():
            errors[name] = difference(whole(split, name, buffers[name]), buffer, scale=1.0)
    told = {
        count.kind: (count.number, count.num_bytes)
        for count in channel_collectives(resolved, position=axis.position, input_takes_gradient=True)
    }
    return {"errors": errors, "counted": counted, "told": told, "splits": _splits(resolved.operators)}


def _splits(operators: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
    return {name: (entry.split, entry.before.kind, entry.after.kind) for name, entry in operators.items()}


class Alone(nn.Module):
    """An operator between a layer that makes its input and an activation that takes its output."""

    def __init__(self, first: nn.Module, op: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.op = op
        self.last = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.op(self.first(x)))


def layer_of(kind: str, num_dims: int, *args: Any, **settings: Any) -> nn.Module:
    """A convolution, transposed convolution or dense layer."""
    if kind == "dense":
        return nn.Linear(*args, **settings)
    name = f"{'ConvTranspose' if kind == 'transposed' else 'Conv'}{num_dims}d"
    return getattr(nn, name)(*args, **settings)


def operators(engine: Engine, world: World, *, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Many operators, one after the other; each case says kind, dims, arguments, shape and entries of the plan."""
    channel, _ = on_mesh(world, {"data": 1, CHANNEL: world.num_ranks})
    axis = ChannelAxis(channel._channel)
    answers = []
    for number, case in enumerate(cases):
        torch.manual_seed(number)
        num_dims = case["num_dims"]
        first = layer_of("dense" if num_dims == 0 else "convolution", num_dims, *case["first"])
        op = layer_of(case["kind"], num_dims, *case["args"], **case["settings"])
        answers.append(
            compare(
                Alone(first, op), case["shape"], case["entries"], axis, channels_last=case.get("channels_last", False)
            )
        )
    return answers


def networks(
    engine: Engine, world: World, *, cases: Sequence[tuple[str, Mapping[str, Any] | str, Mapping[str, Any]]]
) -> list[Any]:
    """Whole networks by name, each with the entries of its plan or ``"rule"`` and settings of ``compare``."""
    channel, _ = on_mesh(world, {"data": 1, CHANNEL: world.num_ranks})
    axis = ChannelAxis(channel._channel)
    answers: list[Any] = []
    for name, entries, settings in cases:
        torch.manual_seed(1)
        known = {**NETWORKS, **EXTRA}
        network = known[name]() if name in known else build(name, num_classes=10)
        size = 16 if name in known else 32
        try:
            answers.append(compare(network, (4, 3, size, size), entries, axis, **settings))
        except ConvMeshError as error:
            answers.append(str(error))
    return answers


def equalize(engine: Engine, world: World) -> dict[str, Any]:
    """Gradients that differ between ranks, made equal as where bits of equal work may differ."""
    channel, _ = on_mesh(world, {"data": 1, CHANNEL: world.num_ranks})
    network = NETWORKS["swish"]().to(memory_format=torch.channels_last)
    resolved = resolve(trace(network, (4, 3, 16, 16)), plan_of({"conv1": "out_channels"}, world.num_ranks))
    axis = ChannelAxis(channel._channel, channels_last=True)
    split = split_of(apply(network, resolved, axis))
    assert split is not None
    for number, parameter in enumerate(network.parameters()):
        parameter.grad = torch.full_like(parameter, 10.0 * number + world.rank)
    axis.begin_update()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    with unittest.mock.patch.object(type(resolved), "replicas_may_differ", return_value=True):
        split.equalize_(gradients)
    return {
        "added": {name: float((p.grad % 10).mean()) for name, p in network.named_parameters() if p.grad is not None},
        "counted": axis.counts(),
        "split": sorted(split.shards),
        "num_whole": split.resolved.num_whole_trainable,
    }


def transports(engine: Engine, world: World) -> dict[str, float]:
    """The largest difference of what each transport makes of the same tensors, for two memory orders and types."""
    channel, _ = on_mesh(world, {"data": 1, CHANNEL: world.num_ranks})
    axis, known = ChannelAxis(channel._channel, channels_last=True), Transports(channel._channel)
    ways: dict[str, Transport] = {"messages": Messages(channel._channel), "native": Native(channel._channel)}
    if known._shared is not None:
        ways["shared"] = known._shared
    even = tuple(tuple(range(3 * rank, 3 * rank + 3)) for rank in range(world.num_ranks))
    mixed = tuple(tuple(range(rank, 7, world.num_ranks)) for rank in range(world.num_ranks))
    errors = dict.fromkeys(ways, 0.0)
    for name, way in ways.items():
        for lists in (even, mixed):
            for dtype in (torch.float64, torch.bfloat16):
                torch.manual_seed(0)
                whole = torch.randint(-9, 9, (3, sum(map(len, lists)), 50, 40)).to(dtype)
                whole = whole.contiguous(memory_format=torch.channels_last)
                with unittest.mock.patch.object(axis, "_transports", **{"of.return_value": way}):
                    gathered = axis.gather(axis.own(whole, lists), lists)
                    scattered = axis.reduce_scatter(whole * (world.rank + 1), lists)
                    total = axis.all_reduce(whole * (world.rank + 1))
                times = sum(range(1, world.num_ranks + 1))
                differences = (
                    gathered - whole,
                    scattered - axis.own(whole * times, lists),
                    total - whole * times,
                )
                errors[name] = max(errors[name], *(float(entry.abs().max()) for entry in differences))
    return errors

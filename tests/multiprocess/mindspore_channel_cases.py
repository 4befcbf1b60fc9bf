"""Cases for ranks of MindSpore that split a network along channels."""

from __future__ import annotations

import os
import unittest.mock
from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from convmesh.engines.contract import Arrays, Engine, World
from convmesh.engines.mindspore.channel_axis import ChannelAxis, channel_axis
from convmesh.engines.mindspore.channel_split import split_of
from convmesh.engines.mindspore.graph_record import Recorded
from convmesh.engines.mindspore.parallelize import apply, refusals
from convmesh.engines.mindspore.state import export_parameters, named_parameters
from convmesh.engines.mindspore.trace import trace
from convmesh.engines.shared_exchange import SWITCH
from convmesh.errors import ConvMeshError, raise_all
from convmesh.graph import Graph
from convmesh.mesh import Mesh
from convmesh.models.mindspore import build
from convmesh.plan import CHANNEL, Choice, Entry, Plan, resolve
from convmesh.plan.by_rule import plan_by_rule
from convmesh.plan.collectives import channel_collectives
from tests.networks_mindspore import NETWORKS

_axes: dict[int, ChannelAxis] = {}


def axis_of(world: World) -> ChannelAxis:
    """All ranks of the pool as a channel axis; with shared memory where there are two."""
    if world.num_ranks not in _axes:
        with unittest.mock.patch.dict(os.environ, {SWITCH: str(int(world.num_ranks == 2))}):
            axis = channel_axis(_placed(world))
        assert axis is not None
        _axes[world.num_ranks] = axis
    return _axes[world.num_ranks]


def _placed(world: World) -> World:
    import dataclasses

    return dataclasses.replace(world, mesh=Mesh({"data": 1, CHANNEL: world.num_ranks}))


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


def by_rule(graph: Graph, num_ranks: int) -> Plan:
    """The plan by rule, in which no layer is too small."""
    return plan_by_rule(graph, Mesh({"data": 1, CHANNEL: num_ranks}), min_multiply_adds=0)


def difference(got: np.ndarray, expected: np.ndarray, *, scale: float = 0.0) -> float:
    """The norm of the difference over that of what is expected, or a thousandth of a scale where that is larger."""
    if got.shape != expected.shape:
        return float("inf")
    exact = expected.astype(np.float64)
    return float(np.linalg.norm(got - exact) / max(float(np.linalg.norm(exact)), 1e-3 * scale, 1e-30))


class Objective(nn.Cell):
    """A scalar of the output that weighs every element otherwise."""

    def __init__(self, network: nn.Cell, weights: np.ndarray) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.weights = Tensor(weights)

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.network(x)
        return ops.reduce_sum(ops.sin(y) * self.weights), y


class Differentiate(nn.Cell):
    """Output, gradient of the input, and gradients of the parameters; those used for own channels only are summed."""

    def __init__(self, objective: nn.Cell, parameters: list[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.objective = objective
        self.differentiate = ops.value_and_grad(objective, 0, ms.ParameterTuple(parameters), has_aux=True)

    def construct(self, x: Tensor) -> tuple[Tensor, ...]:
        (_, y), (of_input, of_parameters) = self.differentiate(x)
        return (y, of_input, *of_parameters)


def run(network: nn.Cell, x: np.ndarray, weights: np.ndarray, axis: ChannelAxis) -> tuple[dict[str, Any], Any]:
    """Gradients and buffers of a network as it is, and what it communicated."""
    named = named_parameters(network)
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    graph = Differentiate(Objective(network, weights), list(trained.values()))
    network.set_train()
    recorded = Recorded(graph, axis)
    y, of_input, *gradients = recorded(Tensor(x))
    counted = recorded.take_counts()
    split = split_of(network)
    arrays: Arrays = {name: gradient.asnumpy() for name, gradient in zip(trained, gradients, strict=True)}
    buffers = export_parameters({name: entry for name, entry in named.items() if not entry.requires_grad})
    if split is not None:
        arrays, buffers = split.gather(arrays), split.gather(buffers)
    return {"output": y.asnumpy(), "input": of_input.asnumpy(), **arrays, **buffers}, counted


def compare(
    make: Any, shape: Sequence[int], entries: Mapping[str, Any] | str, axis: ChannelAxis, **settings: Any
) -> dict[str, Any]:
    """One forward and backward of a network, whole and split, from the same parameters.

    Returns:
        The largest relative differences of output, input gradient, parameter gradients and buffers, and the collectives
        as counted and as told beforehand.
    """
    network, alone = make(), make()
    draw = np.random.default_rng(3)
    for first, second in zip(network.get_parameters(), alone.get_parameters(), strict=True):
        value = draw.standard_normal(first.shape).astype(np.float32) * 0.3 + (1.0 if first.ndim == 1 else 0.0)
        value = np.abs(value) if "variance" in first.name else value
        first.set_data(Tensor(value))
        second.set_data(Tensor(value.copy()))
    graph = trace(network, tuple(shape))
    plan = by_rule(graph, axis.size) if entries == "rule" else plan_of(entries, axis.size, **settings)
    resolved = resolve(graph, plan)
    raise_all(refusals(network, resolved))
    x = draw.standard_normal(shape).astype(np.float32)
    weights = draw.standard_normal(graph.shape(graph.outputs[0])).astype(np.float32)
    expected, _ = run(alone, x, weights, axis)
    apply(network, resolved, axis)
    got, counted = run(network, x, weights, axis)
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    scale = max(float(np.linalg.norm(array)) for name, array in expected.items() if name != "output")
    told = channel_collectives(resolved, position=axis.position, input_takes_gradient=True)
    return {
        "errors": {name: difference(got[name], array, scale=scale) for name, array in expected.items()},
        "counted": {count.kind: (count.number, count.num_bytes) for count in counted},
        "told": {count.kind: (count.number, count.num_bytes) for count in told},
        "splits": {name: (e.split, e.before.kind, e.after.kind) for name, e in resolved.operators.items()},
    }


class Norms(nn.Cell):
    """Every kind of norm, a slope for each channel and one for all, and pooling between unevenly split layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 9, 3, pad_mode="pad", padding=1, has_bias=True)
        self.norm1 = nn.BatchNorm2d(9)
        self.act1 = nn.PReLU(9)
        self.conv2 = nn.Conv2d(9, 10, 3, pad_mode="pad", padding=1)
        self.norm2 = nn.GroupNorm(5, 10)
        self.pool2 = nn.MaxPool2d(2, 2)
        self.conv3 = nn.Conv2d(10, 7, 3, pad_mode="pad", padding=1)
        self.norm3 = nn.LayerNorm((7, 8, 8), begin_norm_axis=1, begin_params_axis=1)
        self.conv4 = nn.Conv2d(7, 6, 3, pad_mode="pad", padding=1)
        self.pool4 = nn.AvgPool2d(2, 2)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Dense(96, 9)
        self.fc2 = nn.Dense(9, 10)

    def construct(self, x: Tensor) -> Tensor:
        x = self.act1(self.norm1(self.conv1(x)))
        x = self.pool2(self.norm2(self.conv2(x)))
        x = self.norm3(self.conv3(x))
        x = self.flatten(self.pool4(ops.tanh(self.conv4(x))))
        return self.fc2(ops.relu(self.fc1(x)))


class Softmaxes(nn.Cell):
    """Softmax over channels and its logarithm, layer norm over them alone, each a cell of its own, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 9, 3, pad_mode="pad", padding=1)
        self.softmax = nn.Softmax(axis=1)
        self.conv2 = nn.Conv2d(9, 7, 3, stride=2, pad_mode="pad", padding=1)
        self.log = nn.LogSoftmax(axis=1)
        self.conv3 = nn.Conv2d(7, 10, 3, stride=2, pad_mode="pad", padding=1)
        self.mask = nn.Conv2d(10, 1, 3, pad_mode="pad", padding=1)
        self.flatten = nn.Flatten()
        self.norm = nn.LayerNorm((160,), begin_norm_axis=1, begin_params_axis=1)
        self.fc = nn.Dense(160, 10)

    def construct(self, x: Tensor) -> Tensor:
        x = self.log(self.conv2(self.softmax(self.conv1(x))))
        x = ops.tanh(self.conv3(x))
        return self.fc(self.norm(self.flatten(x * ops.sigmoid(self.mask(x)))))


class Twice(nn.Cell):
    """Two convolutions that gather the same tensor, and whose gradients are scattered alike."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 9, 3, pad_mode="pad", padding=1)
        self.conv2 = nn.Conv2d(9, 9, 1)
        self.conv3 = nn.Conv2d(9, 9, 3, pad_mode="pad", padding=1)
        self.conv4 = nn.Conv2d(9, 10, 1)

    def construct(self, x: Tensor) -> Tensor:
        x = ops.tanh(self.conv1(x))
        return self.conv4(self.conv2(x) + self.conv3(x))


class Alone(nn.Cell):
    """An operator between a layer that makes its input and an activation that takes its output."""

    def __init__(self, first: nn.Cell, op: nn.Cell) -> None:
        super().__init__()
        self.first = first
        self.op = op
        self.last = nn.Tanh()

    def construct(self, x: Tensor) -> Tensor:
        return self.last(self.op(self.first(x)))


OWN = {**NETWORKS, "norms": Norms, "softmaxes": Softmaxes, "twice": Twice}


def layer_of(kind: str, num_dims: int, *args: Any, **settings: Any) -> nn.Cell:
    """A convolution, transposed convolution or dense layer."""
    if kind == "dense":
        return nn.Dense(*args, **settings)
    layer = getattr(nn, f"Conv{num_dims}d{'Transpose' if kind == 'transposed' else ''}")
    made: nn.Cell = layer(*args, **settings)
    return made


def operators(engine: Engine, world: World, *, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Many operators, one after the other; each case says kind, dims, arguments, shape and entries of the plan."""
    axis = axis_of(world)
    answers = []
    for case in cases:
        num_dims = case["num_dims"]

        def make(case: Mapping[str, Any] = case, num_dims: int = num_dims) -> nn.Cell:
            first = layer_of("dense" if num_dims == 0 else "convolution", num_dims, *case["first"])
            return Alone(first, layer_of(case["kind"], num_dims, *case["args"], **case["settings"]))

        try:
            answers.append(compare(make, case["shape"], case["entries"], axis))
        except ConvMeshError as error:
            answers.append(str(error))
    return answers


def networks(
    engine: Engine, world: World, *, cases: Sequence[tuple[str, Mapping[str, Any] | str, Mapping[str, Any]]]
) -> list[Any]:
    """Whole networks by name, each with the entries of its plan or ``"rule"`` and settings of ``compare``."""
    axis = axis_of(world)
    answers: list[Any] = []
    for name, entries, settings in cases:
        size = 12 if name in ("cnn-small", "resnet18") else 16
        arguments = dict(settings)
        model = arguments.pop("model", {})

        def make(name: str = name, model: Mapping[str, Any] = model) -> nn.Cell:
            ms.set_seed(1)
            return OWN[name]() if name in OWN else build(name, num_classes=10, **model)

        try:
            answers.append(compare(make, (4, 3, size, size), entries, axis, **arguments))
        except ConvMeshError as error:
            answers.append(str(error))
    return answers

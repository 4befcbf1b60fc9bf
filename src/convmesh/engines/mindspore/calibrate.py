"""Measuring on ranks of MindSpore, in graph mode; implements `convmesh.engines.calibrating.Calibrator`."""

from __future__ import annotations

import dataclasses
import itertools
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops, profiler

from convmesh.config import RunConfig
from convmesh.engines.calibrating import CollectiveTimes, FixedMemory, OperatorTimes, Overhead, Ranks, repeat
from convmesh.engines.contract import Batch, PixelScale, World
from convmesh.engines.mindspore.calibrate_operators import MARK, SPREAD, Step, cell_of
from convmesh.engines.mindspore.calibrate_profile import Kernel, pieces, read_kernels
from convmesh.engines.mindspore.channel_axis import Gather, Keep, ReduceScatter, Sum, channel_axis
from convmesh.engines.mindspore.collectives import BucketedSum, DataAxis, data_axis, enable_fusion
from convmesh.engines.mindspore.engine import MindSporeEngine
from convmesh.engines.mindspore.optimizer import Optimizer
from convmesh.engines.mindspore.partition import plan_buckets
from convmesh.engines.mindspore.train_step import MindSporeTrainStep
from convmesh.graph import Graph
from convmesh.graph.graph import Shape

_SCALE = PixelScale((1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
_SMALL, _LARGE = 3, 23
"""Layers of the networks by which memory per operator is found."""

_KINDS = {"all-reduce": "AllReduce", "all-gather": "AllGather", "reduce-scatter": "ReduceScatter"}


class MindSporeCalibrator:
    """Measures on one rank.

    Args:
        engine: Started.
        world: Where this rank stands.
        run: The run whose settings count: optimizer.
    """

    def __init__(self, engine: MindSporeEngine, world: World, run: RunConfig) -> None:
        self._engine = engine
        self._run = run
        self._world = world
        self._axes: dict[str, Any] = {}
        if world.num_ranks > 1:
            enable_fusion()

    def memory(self) -> FixedMemory:
        """What this rank holds beside tensors: resident memory on the CPU.

        Nothing more is probed: what was freed of one network serves the next, so that later ones seem to need too
        little. What convolutions and graphs keep is known by rule (`convmesh.planner.scratch`, `.memory`).
        """
        self._train(_Chain(_SMALL))
        before = _resident_bytes()
        self._train(_Chain(_LARGE))
        grown = max(0, _resident_bytes() - before)
        # Per layer a convolution, a norm and an activation.
        return FixedMemory(fixed_bytes=before, bytes_per_operator=grown // (3 * (_LARGE - _SMALL)))

    def overhead(self) -> Overhead:
        """What updates cost beside operators."""
        one, four = (min(self._train(_Nothing(), num_micro_batches=n, num_updates=12)) for n in (1, 4))
        micro = max(0.0, (four - one) / 3)
        return Overhead(update_seconds=max(0.0, one - micro), micro_batch_seconds=micro)

    def operators(self, graphs: Sequence[Graph], *, num_rounds: int) -> list[OperatorTimes | None]:
        """Runs operators one after the other as a training step does: all forwards, then all backwards."""
        cells = [cell_of(graph) for graph in graphs]
        places = [place for place, cell in enumerate(cells) if cell is not None]
        found: list[OperatorTimes | None] = [None] * len(graphs)
        if places:
            step = Step([graphs[place] for place in places], [cells[place] for place in places])
            for place, times in zip(places, _profile(step, num_rounds), strict=True):
                found[place] = times
        return found

    def ways(self, kind: str, axis: str) -> tuple[str, ...]:
        """The ways in which training sends a kind of collective."""
        if axis == "channel":
            return ("collective",) if kind in _KINDS else ()
        return ("shared_memory",) if kind == "all-reduce" and self._world.device == "cpu" else ()

    def collective(self, kind: str, ranks: Ranks, *, sizes: Sequence[int], repeats: int) -> list[CollectiveTimes]:
        """Runs one kind of collective as training does.

        Args:
            kind: As `convmesh.plan.collectives` names it.
            ranks: Who communicates.
            sizes: Bytes, counted as `convmesh.plan.collectives` counts.
            repeats: How often each.

        Returns:
            One entry per size.
        """
        axis = self._axis(ranks)
        if ranks.axis == "data":
            return [CollectiveTimes(size, self._repeat(_reduction(axis, size), repeats)) for size in sizes]
        alone = float(np.median(self._repeat(_call(Keep(), 4), repeats)))
        found = []
        for size in sizes:
            seconds = self._repeat(_activation(kind, axis, size), repeats)
            # Entering a graph is no part of a collective within a network's.
            found.append(CollectiveTimes(size, tuple(max(entry - alone, 1e-6) for entry in seconds)))
        return found

    def optimizer(self, shapes: Sequence[Shape], *, repeats: int) -> tuple[float, ...]:
        """Seconds of judging and applying gradients of parameters of these shapes."""
        parameters = {
            str(place): Parameter(Tensor(np.zeros(shape, np.float32)), f"parameter{place}")
            for place, shape in enumerate(shapes)
        }
        buckets = plan_buckets([parameter.size * 4 for parameter in parameters.values()], bucket_bytes=2**40)
        optimizer = Optimizer(parameters, self._run.optimizer, axis=DataAxis(), shard=False, buckets=buckets)
        gradients = [Tensor(np.zeros(shape, np.float32)) for shape in shapes]
        first = next(iter(parameters.values()))

        def step() -> None:
            optimizer.apply(gradients, learning_rate=0.0, loss_scale=1.0, num_updates=0)
            first.asnumpy()

        return self._repeat(step, repeats, in_step=False)

    def overlap(self, ranks: Ranks) -> float:
        """Gradients are reduced once all are there: nothing overlaps."""
        return 0.0

    def _axis(self, ranks: Ranks) -> Any:
        key = f"{ranks.axis} of {ranks.mesh}"
        if key not in self._axes:
            placed = dataclasses.replace(self._world, mesh=ranks.mesh)
            self._axes[key] = data_axis(placed) if ranks.axis == "data" else channel_axis(placed)
        return self._axes[key]

    def _repeat(self, run: Callable[[], Any], repeats: int, *, in_step: bool = True) -> tuple[float, ...]:
        return repeat(run, repeats, gather=self._engine.all_gather, in_step=in_step)

    def _train(self, network: nn.Cell, *, num_micro_batches: int = 1, num_updates: int = 3) -> list[float]:
        run = dataclasses.replace(self._run, strategy=dataclasses.replace(self._run.strategy, optimizer_sharding=False))
        step = MindSporeTrainStep(network, run, pixel_scale=_SCALE, axis=DataAxis())
        batch = Batch(np.zeros((2, 8, 8, 3), np.uint8), np.zeros(2, np.int32), np.ones(2, np.float32))
        batches = [batch] * num_micro_batches
        seconds = []
        for index in range(num_updates):
            begun = time.perf_counter()
            step.update(batches, global_count=2, learning_rate=0.0, loss_scale=1.0, update_index=index)
            seconds.append(time.perf_counter() - begun)
        return seconds


def _profile(step: Step, num_rounds: int) -> list[OperatorTimes]:
    """Seconds of the operators of a step, per round.

    A profile slows down what it watches, and tells nothing of the time between kernels. So an operator's share of the
    profiled time, with as much time between kernels for each, is its share of the time of a run that is not profiled.
    """
    number = Tensor(np.ones(1, np.float32))
    step.set_train()
    step(number).asnumpy()
    alone = []
    for _ in range(num_rounds):
        begun = time.perf_counter()
        step(number).asnumpy()
        alone.append(time.perf_counter() - begun)
    with tempfile.TemporaryDirectory(prefix="convmesh-calibrate-") as folder:
        with profiler.profile(
            activities=[profiler.ProfilerActivity.CPU],
            on_trace_ready=profiler.tensorboard_trace_handler(folder),
            schedule=profiler.schedule(wait=0, warmup=0, active=num_rounds, repeat=1),
        ) as profile:
            for _ in range(num_rounds):
                step(number).asnumpy()
                profile.step()
        kernels = read_kernels(Path(folder))
    rounds = [kernels[len(kernels) * n // num_rounds : len(kernels) * (n + 1) // num_rounds] for n in range(num_rounds)]
    spans = [entry[-1].begun + entry[-1].seconds - entry[0].begun for entry in rounds]
    between = max(0.0, sum(spans) - sum(kernel.seconds for kernel in kernels)) / len(kernels)
    scale = float(np.mean(alone)) / float(np.mean(spans))

    def seconds(piece: list[Kernel]) -> float:
        return scale * sum(kernel.seconds + between for kernel in piece)

    return _by_operator(step, [[seconds(piece) for piece in _pieces(entry, step)] for entry in rounds])


def _pieces(kernels: list[Kernel], step: Step) -> list[list[Kernel]]:
    found = pieces(kernels, mark=MARK, left_out=SPREAD)
    if len(found) != step.num_marks:
        raise AssertionError(f"{len(found)} marks in a profile, not {step.num_marks}")
    return found


def _by_operator(step: Step, rounds: Sequence[Sequence[float]]) -> list[OperatorTimes]:
    found, place = [], 0
    for index, operator in enumerate(step.operators):
        place += operator.takes_two
        forward = tuple(entry[place] for entry in rounds)
        backward = tuple(entry[len(entry) - 1 - index] for entry in rounds) if operator.has_backward else ()
        found.append(OperatorTimes(forward, backward))
        place += 1
    return found


def _reduction(axis: DataAxis, num_bytes: int) -> Callable[[], Any]:
    """The reduction of gradients of so many bytes, in four tensors."""
    tensors = [Tensor(np.zeros(max(1, num_bytes // 16), np.float32)) for _ in range(4)]
    reduce = BucketedSum(axis, (0,) * len(tensors))

    def run() -> None:
        reduce(tensors)[-1].asnumpy()

    return run


def _activation(kind: str, axis: Any, num_bytes: int) -> Callable[[], Any]:
    """A collective of the channel axis, on a tensor (1, C, P, 1) whose C channels all ranks share evenly."""
    width = max(1, num_bytes // 4 // 64)
    num_channels = 64 * axis.size if kind == "all-gather" else 64
    ends = [num_channels * rank // axis.size for rank in range(axis.size + 1)]
    lists = tuple(tuple(range(start, stop)) for start, stop in itertools.pairwise(ends))
    if kind == "all-gather":
        return _call(Gather(axis, lists), 64 * width)
    return _call(Sum(axis) if kind == "all-reduce" else ReduceScatter(axis, lists), 64 * width)


def _call(cell: nn.Cell, num_elements: int) -> Callable[[], Any]:
    num_channels = min(64, num_elements)
    tensor = Tensor(np.zeros((1, num_channels, num_elements // num_channels, 1), np.float32))
    number, waiting = Tensor(np.zeros(1, np.float32)), _Await(cell)

    def run() -> None:
        waiting(tensor, number).asnumpy()

    return run


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class _Await(nn.Cell):
    """Returns one number once a cell has run, whose output is not copied then."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.negate = ops.Neg()

    def construct(self, x: Tensor, number: Tensor) -> Tensor:
        return self.negate(ops.depend(number, self.cell(x)))


class _Nothing(nn.Cell):
    """A network that computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = Parameter(Tensor(np.zeros(2, np.float32)), "bias")
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.slice = ops.Slice()

    def construct(self, x_NCHW: Tensor) -> Tensor:
        two = self.slice(x_NCHW, (0, 0, 0, 0), (2, 2, 1, 1))
        return ops.reshape(two, (2, 2)) + self.bias


class _Chain(nn.Cell):
    """Convolutions, norms and activations, and a classifier."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        num_channels = 8
        layers: list[nn.Cell] = []
        for number in range(num_layers):
            layers += [
                nn.Conv2d(num_channels if number else 3, num_channels, 3, pad_mode="pad", padding=1),
                nn.BatchNorm2d(num_channels),
                nn.ReLU(),
            ]
        self.layers = nn.SequentialCell(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Dense(num_channels, 2)

    def construct(self, x_NCHW: Tensor) -> Tensor:
        return self.fc(self.layers(x_NCHW))


def create_calibrator(engine: Any, world: World, run: RunConfig) -> MindSporeCalibrator:
    """Makes the calibrator of a rank.

    Args:
        engine: Of `convmesh.engines.mindspore`, started.
        world: Where this rank stands.
        run: The run whose settings count.

    Returns:
        The calibrator.
    """
    return MindSporeCalibrator(engine, world, run)

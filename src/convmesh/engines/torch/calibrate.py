"""Measuring on ranks of PyTorch; implements `convmesh.engines.calibrating.Calibrator`."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import math
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from convmesh.config import RunConfig
from convmesh.engines import shared_exchange
from convmesh.engines.calibrating import (
    PROBES,
    TURNS,
    Clock,
    CollectiveTimes,
    FixedMemory,
    OperatorTimes,
    Overhead,
    Probe,
    Ranks,
    clock_of,
    repeat,
    repeat_after_work,
)
from convmesh.engines.contract import Batch, PixelScale, World
from convmesh.engines.torch.calibrate_operators import Function, function_of, in_place_of
from convmesh.engines.torch.channel_axis import ChannelAxis
from convmesh.engines.torch.collectives import DataAxis
from convmesh.engines.torch.engine import TorchEngine
from convmesh.engines.torch.optimizer import Optimizer
from convmesh.engines.torch.train_step import TorchTrainStep
from convmesh.graph import Graph
from convmesh.graph.graph import Shape

_SCALE = PixelScale((1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
_SMALL, _LARGE = 4, 64
"""Layers of the networks by which memory per operator is found."""

_WORK_SIDE = 320
"""Of matrices whose product takes a core about a millisecond, as operators between two exchanges do."""

_NUM_CHANNELS = 256
"""Of the tensors that are exchanged: those of a rank lie together, and longer pieces of memory are faster copied."""

_LONG_BYTES = 2**20
"""Collectives of so many bytes take several milliseconds."""

_REDUCED_BYTES, _NUM_REDUCED = 4 * 2**20, 6
"""Size and number of the weights whose gradients are reduced to see what overlaps."""


class TorchCalibrator:
    """Measures on one rank.

    Args:
        engine: Started.
        world: Where this rank stands.
        run: The run whose settings count: memory order, optimizer.
    """

    def __init__(self, engine: TorchEngine, world: World, run: RunConfig) -> None:
        self._engine = engine
        self._run = run
        self._world = world
        self._device = torch.device(world.device if world.device != "cuda" else f"cuda:{torch.cuda.current_device()}")
        self._groups: dict[str, Any] = {}
        self._clock = clock_of(world)
        self._shares_memory = world.device == "cpu" and shared_exchange.is_wanted()

    def memory(self) -> FixedMemory:
        """What this rank holds beside tensors: resident memory, or what the CUDA context and libraries take."""
        self._train(_chain(_SMALL))
        before = self._held_bytes()
        self._train(_chain(_LARGE))
        grown = max(0, self._held_bytes() - before)
        return FixedMemory(
            fixed_bytes=before,
            # Per layer a convolution, a norm and an activation.
            bytes_per_operator=grown // (3 * (_LARGE - _SMALL)),
            probe_bytes=tuple(map(self._probe, PROBES)) if self._device.type == "cpu" else (),
        )

    def _probe(self, probe: Probe) -> int:
        network = _chain(probe.num_layers, probe.num_channels)
        _forget_peak()
        before = self._held_bytes()
        self._train(network, num_samples=probe.num_samples, side=probe.side)
        return max(0, self._engine.peak_memory_bytes() - before)

    def overhead(self) -> Overhead:
        """What updates cost beside operators."""
        one, four = (min(self._train(_Nothing(), num_micro_batches=n, num_updates=12)) for n in (1, 4))
        micro = max(0.0, (four - one) / 3)
        return Overhead(update_seconds=max(0.0, one - micro), micro_batch_seconds=micro)

    def operators(self, graphs: Sequence[Graph], *, num_rounds: int) -> list[OperatorTimes | None]:
        """Runs operators one after the other as a training step does: all forwards, then all backwards."""
        exercises = [self._exercise(graph) for graph in graphs]
        made = [exercise for exercise in exercises if exercise is not None]
        for number in range(num_rounds + 1):
            if number == 1:
                for exercise in made:
                    exercise.forget()
            for exercise in made:
                exercise.forward()
            for exercise in reversed(made):
                exercise.backward()
        return [exercise.times() if exercise is not None else None for exercise in exercises]

    def ways(self, kind: str, axis: str) -> tuple[str, ...]:
        """The ways in which training sends a kind of collective; gradients go through the process group."""
        if kind == "all-reduce":
            return ("shared_memory",) if axis == "channel" and self._shares_memory else ("collective",)
        return ("collective",) if axis == "channel" else ()

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
        group = self._group(ranks)
        axis = ChannelAxis(group, channels_last=self._run.train.channels_last)
        square = torch.zeros(_WORK_SIDE, _WORK_SIDE, device=self._device)
        work = functools.partial(torch.mm, square, square, out=torch.empty_like(square))
        found = []
        for num_bytes in sizes:
            run: Callable[[], Any]
            if kind == "all-reduce" and ranks.axis == "data":
                run = functools.partial(dist.all_reduce, torch.zeros(num_bytes // 4, device=self._device), group=group)
            else:
                run = _collective(kind, axis, num_bytes, self._tensor)
            # Of what takes long a third of the figures will do: each is of several turns.
            times = repeats if num_bytes < _LONG_BYTES else -(-repeats // TURNS)
            seconds = repeat_after_work(run, work, times, gather=self._engine.all_gather, now=self._now)
            found.append(CollectiveTimes(num_bytes, seconds))
        return found

    def optimizer(self, shapes: Sequence[Shape], *, repeats: int) -> tuple[float, ...]:
        """Seconds of judging and applying gradients of parameters of these shapes."""
        parameters = {str(place): nn.Parameter(self._tensor(shape)) for place, shape in enumerate(shapes)}
        optimizer = Optimizer(parameters, self._run.optimizer, axis=DataAxis(None), shard=False)
        gradients = [torch.zeros_like(parameter) for parameter in parameters.values()]

        def step() -> None:
            for parameter, gradient in zip(parameters.values(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step(learning_rate=0.0, loss_scale=1.0)

        return self._repeat(step, repeats, in_step=False, clock=self._clock)

    def overlap(self, ranks: Ranks) -> float:
        """Share of gradient reduction that costs no time while the backward runs.

        One backward whose gradients are reduced as they get ready is compared with one that reduces nothing, and with
        the reductions alone. The last bucket can't hide.
        """
        side = math.isqrt(_REDUCED_BYTES // 36)
        layers = [nn.Conv2d(side, side, 3, padding=1, bias=False) for _ in range(_NUM_REDUCED)]
        network = nn.Sequential(*layers).to(self._device)
        axis = DataAxis(self._group(ranks))
        parallel = axis.data_parallel(network, bucket_bytes=_REDUCED_BYTES // 2, reduction=torch.float32)
        x_NCHW = torch.randn(2, side, 8, 8, device=self._device)
        flat = torch.zeros(_REDUCED_BYTES // 4, device=self._device)

        def quiet() -> None:
            with parallel.no_sync():  # type: ignore[operator]
                parallel(x_NCHW).sum().backward()

        def reducing() -> None:
            parallel(x_NCHW).sum().backward()

        def reductions() -> None:
            for _ in range(_NUM_REDUCED):
                axis.sum_(flat, purpose="gradients")

        without, with_, alone = (float(np.median(self._repeat(run, 7))) for run in (quiet, reducing, reductions))
        hideable = min(alone * (_NUM_REDUCED - 1) / _NUM_REDUCED, without)
        return min(1.0, max(0.0, (without + alone - with_) / hideable))

    def _exercise(self, graph: Graph) -> _Exercise | None:
        node = graph.node("operator")
        function = function_of(node, graph.input_shapes(node))
        if function is None:
            return None
        dtype = getattr(torch, node.dtype)
        inputs = [
            self._tensor(graph.shape(edge), dtype).requires_grad_(edge.node in graph.needs_gradient)
            for edge in node.inputs
        ]
        parameters = {
            entry.role: self._tensor(entry.shape, dtype).requires_grad_(entry.trainable)
            for entry in node.parameters
            if entry.role in ("weight", "bias")
        }
        return _Exercise(function, inputs, parameters, self._now, in_place=in_place_of(node))

    def _tensor(self, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
        tensor = torch.randn(shape, device=self._device).to(dtype)
        if tensor.ndim == 4 and self._run.train.channels_last:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _now(self) -> float:
        self._synchronize()
        return self._clock()

    def _repeat(self, run: Callable[[], Any], repeats: int, **how: Any) -> tuple[float, ...]:
        return repeat(run, repeats, gather=self._engine.all_gather, synchronize=self._synchronize, **how)

    def _group(self, ranks: Ranks) -> Any:
        key = f"{ranks.axis} of {ranks.mesh}"
        if key not in self._groups:
            for group in ranks.mesh.groups(ranks.axis):
                made = dist.new_group(list(group))
                if self._world.rank in group:
                    self._groups[key] = made
        return self._groups[key]

    def _train(
        self,
        network: nn.Module,
        *,
        num_micro_batches: int = 1,
        num_updates: int = 3,
        num_samples: int = 2,
        side: int = 8,
    ) -> list[float]:
        run = dataclasses.replace(self._run, strategy=dataclasses.replace(self._run.strategy, optimizer_sharding=False))
        if run.train.channels_last:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        step = TorchTrainStep(network.to(self._device), run, pixel_scale=_SCALE, axis=DataAxis(None))
        images = np.zeros((num_samples, side, side, 3), np.uint8)
        batch = Batch(images, np.zeros(num_samples, np.int32), np.ones(num_samples, np.float32))
        batches = [batch] * num_micro_batches
        seconds = []
        for index in range(num_updates):
            begun = self._clock()
            result = step.update(
                batches, global_count=num_samples, learning_rate=0.0, loss_scale=1.0, update_index=index
            )
            float(result.loss_sum)
            seconds.append(self._clock() - begun)
        return seconds

    def _held_bytes(self) -> int:
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return int(total - free - torch.cuda.memory_reserved(self._device))
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _forget_peak() -> None:
    """Gives freed memory back and forgets the most that this process has held, so that what follows is seen alone."""
    gc.collect()
    # Where there is no glibc, or Linux forbids it, what earlier networks have left is counted too.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class _Exercise:
    """One operator that is run forward and backward in turn."""

    def __init__(
        self,
        function: Function,
        inputs: list[Tensor],
        parameters: dict[str, Tensor],
        now: Clock,
        *,
        in_place: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._function, self._inputs, self._parameters = function, inputs, parameters
        self._in_place = in_place
        self._now = now
        self._wanted = [tensor for tensor in (*inputs, *parameters.values()) if tensor.requires_grad]
        self._output: Tensor | None = None
        self._forward: list[float] = []
        self._backward: list[float] = []

    def forward(self) -> None:
        """Runs it forward; as in a network, its input has just been written."""
        with torch.no_grad():
            for tensor in self._inputs:
                tensor.mul_(1.0)
        if self._in_place is None:
            self._output = self._timed(lambda: self._function(self._inputs, self._parameters))
            return
        over = self._inputs[0].detach().clone()
        self._timed(lambda: self._in_place(over))  # type: ignore[misc]
        self._output = self._function(self._inputs, self._parameters)

    def _timed(self, run: Callable[[], Tensor]) -> Tensor:
        begun = self._now()
        output = run()
        self._forward.append(self._now() - begun)
        return output

    def backward(self) -> None:
        """Runs it backward, if anything wants a gradient."""
        output, self._output = self._output, None
        if output is None or not self._wanted:
            return
        gradient = torch.ones_like(output)
        begun = self._now()
        # As in training, gradients end up in the memory order of what they belong to.
        torch.autograd.backward(output, gradient, inputs=self._wanted)
        self._backward.append(self._now() - begun)
        for tensor in self._wanted:
            tensor.grad = None

    def forget(self) -> None:
        """Forgets what was measured so far."""
        self._forward.clear()
        self._backward.clear()

    def times(self) -> OperatorTimes:
        """What was measured."""
        return OperatorTimes(tuple(self._forward), tuple(self._backward))


class _Nothing(nn.Module):
    """A network that computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return x_NCHW[:, :2, 0, 0] + self.bias


def _chain(num_layers: int, num_channels: int = 8) -> nn.Module:
    layers: list[nn.Module] = []
    for number in range(num_layers):
        layers += [
            nn.Conv2d(num_channels if number else 3, num_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_channels),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_channels, 2))


def _collective(
    kind: str, axis: ChannelAxis, num_bytes: int, tensor_of: Callable[[Shape], Tensor]
) -> Callable[[], Any]:
    """One collective of the channel axis, given a tensor (1, C, P, 1) whose C channels all ranks share evenly."""
    if kind == "broadcast":
        flat = tensor_of((num_bytes // 4,))
        return lambda: axis.broadcast_([flat], purpose="gradients")
    own = -(-_NUM_CHANNELS // axis.size)
    lists = tuple(tuple(range(own * rank, own * rank + own)) for rank in range(axis.size))
    num_channels = own if kind == "all-gather" else own * axis.size
    # In the memory order that activations have: else each call would bring it there first.
    tensor = tensor_of((1, num_channels, max(1, num_bytes // 4 // num_channels), 1))
    if kind == "all-gather":
        return lambda: axis.gather(tensor, lists)
    if kind == "reduce-scatter":
        return lambda: axis.reduce_scatter(tensor, lists)
    return lambda: axis.all_reduce(tensor)


def create_calibrator(engine: Any, world: World, run: RunConfig) -> TorchCalibrator:
    """Makes the calibrator of a rank.

    Args:
        engine: Of `convmesh.engines.torch`, started.
        world: Where this rank stands.
        run: The run whose settings count.

    Returns:
        The calibrator.
    """
    return TorchCalibrator(engine, world, run)

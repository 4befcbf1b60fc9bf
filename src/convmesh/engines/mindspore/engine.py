"""MindSpore as an engine; implements `convmesh.engines.contract.Engine`."""

from __future__ import annotations

import dataclasses
import platform
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import psutil
from mindspore import nn

from convmesh.config.execution import execution_of
from convmesh.config.schema import ModelConfig, RunConfig
from convmesh.engines.contract import Batch, PixelScale, Reader, World
from convmesh.engines.mindspore import cluster, networks, threads
from convmesh.engines.mindspore.channel_axis import ChannelAxis, channel_axis
from convmesh.engines.mindspore.collectives import DataAxis, data_axis, enable_fusion, gather_values
from convmesh.engines.mindspore.loader import load
from convmesh.engines.mindspore.objective import compute_in_half
from convmesh.engines.mindspore.sample_axis import SampleAxis
from convmesh.engines.mindspore.state import named_parameters
from convmesh.engines.mindspore.train_step import DTYPES, MindSporeTrainStep
from convmesh.errors import ConfigError, EngineError, ModelError, brief
from convmesh.geometry.regrouping import ChannelRegrouping
from convmesh.mesh import Mesh
from convmesh.plan.beside import graph_beside
from convmesh.plan.load import load_plan
from convmesh.plan.plan import DATA
from convmesh.profiling.framework import FrameworkProfiler

_TARGETS = {"cpu": "CPU", "cuda": "GPU", "ascend": "Ascend"}


class MindSporeEngine:
    """MindSpore on CPU, GPU or Ascend, in graph mode."""

    name = "mindspore"

    def __init__(self) -> None:
        self._world: World | None = None
        self._axis = DataAxis()
        self._channel: ChannelAxis | None = None

    def start(self, world: World) -> None:
        """Joins the ranks and selects device and threads. In msrun's scheduler it returns when the ranks have left.

        Raises:
            EngineError: If the device or the other ranks can't be reached.
        """
        if world.device not in _TARGETS:
            raise EngineError(f"MindSpore does not run on the device '{world.device}'", expected="cpu, cuda or ascend")
        ms.set_context(mode=ms.GRAPH_MODE)
        self._select_device(world)
        if world.device == "cpu":
            threads.compute_with(world.num_threads)
        self._world = world
        if world.num_ranks > 1:
            cluster.join(world)
            if not cluster.is_scheduler():
                self._axis = data_axis(world)
                self._channel = channel_axis(world)

    def stop(self) -> None:
        """Leaves the ranks; after an error too. MindSpore itself leaves its cluster when the process ends."""
        self._world, self._axis, self._channel = None, DataAxis(), None

    def build_network(self, model: ModelConfig, *, num_classes: int, num_channels: int, seed: int) -> nn.Cell:
        """Builds the network, with initial weights that depend on the seed alone.

        Raises:
            ModelError: If the factory fails or weights are missing or unexpected; names are listed.
        """
        return networks.build_network(model, num_classes=num_classes, num_channels=num_channels, seed=seed)

    def output_width(self, network: nn.Cell, *, image_shape_HWC: tuple[int, int, int]) -> int:
        """Runs one blank image through the network and tells the number of outputs.

        Raises:
            ModelError: If the network can't take such an image, or its output is not (N, classes).
        """
        return networks.output_width(network, image_shape_HWC=image_shape_HWC)

    def regroup_channels(
        self, network: nn.Cell, regrouping: ChannelRegrouping, *, image_shape_HWC: tuple[int, int, int]
    ) -> nn.Cell:
        """Makes a network take regrouped images; see `convmesh.engines.contract.Engine.regroup_channels`.

        Raises:
            ConfigError: If the regrouping does not fit the images or the convolution that takes them.
            ModelError: If something else than one convolution takes the images.
            MistakeList: If several things are wrong.
        """
        from convmesh.engines.mindspore.regroup import regroup_channels

        height, width, num_channels = image_shape_HWC
        return regroup_channels(network, regrouping, image_shape=(num_channels, height, width))

    def build_step(self, network: nn.Cell, run: RunConfig, *, pixel_scale: PixelScale) -> MindSporeTrainStep:
        """Makes a network trainable: broadcasts its parameters and buffers from the first rank, sets up the optimizer.

        On a mesh with an axis ``channel``, to split channels along ``data``, or to recompute blocks, the plan that
        ``strategy.plan`` names is followed first.

        Raises:
            ModelError: If the ranks have built different networks, there is nothing to train, or it can't be split.
            ConfigError: If a plan is needed and the run names none.
        """
        named = named_parameters(network)
        self._check_same({name: (tuple(p.shape), str(p.dtype)) for name, p in named.items()})
        if self._axis.size > 1:
            enable_fusion()
            self._axis.broadcast(list(named.values()))
        if self._channel is not None:
            self._channel.broadcast(list(named.values()))
        if self._channel is not None or execution_of(run).recompute or self._exchanges_samples(run):
            self._follow_plan(network, run)
        if run.precision.compute != "float32":
            on_cpu = self._world is None or self._world.device == "cpu"
            compute_in_half(network, dtype=DTYPES[run.precision.compute], on_cpu=on_cpu)
        return MindSporeTrainStep(network, run, pixel_scale=pixel_scale, axis=self._axis)

    def _follow_plan(self, network: nn.Cell, run: RunConfig) -> None:
        from convmesh.engines.mindspore.parallelize import parallelize

        mesh = self._world.mesh if self._world is not None else Mesh({})
        if run.strategy.plan is None:
            raise ConfigError(
                "a network is split and recomputed by a plan, and the run names none", fix="Set 'strategy.plan: FILE'"
            )
        plan = load_plan(run.strategy.plan)
        plan = dataclasses.replace(plan, mesh=mesh, execution=plan.execution.over(execution_of(run)))
        num_samples = max(1, run.train.global_batch // (mesh.size("data") * run.strategy.accumulation))
        axis = self._channel
        if axis is None and self._exchanges_samples(run):
            axis = SampleAxis(self._axis, native=self._world is not None and self._world.device != "cpu")
        shapes = {name: tuple(parameter.shape) for name, parameter in named_parameters(network).items()}
        graph = graph_beside(run.strategy.plan, plan, shapes, num_samples=num_samples)
        parallelize(network, plan, axis=axis, num_samples=num_samples, own_loop=False, graph=graph)

    def _exchanges_samples(self, run: RunConfig) -> bool:
        return self._axis.size > 1 and run.strategy.plan is not None and load_plan(run.strategy.plan).names(DATA)

    def load(self, reader: Reader, keys: Sequence[tuple[int, int, int]], *, num_workers: int) -> Iterator[Batch]:
        """Reads the micro-batches of ``keys`` in order through ``mindspore.dataset``, ahead of their use."""
        return load(reader, keys, num_workers=num_workers)

    def all_gather(self, value: Any) -> list[Any]:
        """Gathers a small picklable value of every rank, in rank order; returns ``[value]`` for a single rank."""
        if self._world is None or self._world.num_ranks == 1:
            return [value]
        return gather_values(value)

    def peak_memory_bytes(self) -> int:
        """Largest memory of this rank so far: allocated on the device, or resident on CPU."""
        if self._world is not None and self._world.device != "cpu":
            return int(ms.runtime.max_memory_allocated())
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def memory_bytes(self) -> int:
        """Memory of this rank now: allocated on the device, or resident on CPU."""
        if self._world is not None and self._world.device != "cpu":
            return int(ms.runtime.memory_allocated())
        return int(psutil.Process().memory_info().rss)

    def profiler(self, folder: Path, *, rank: int) -> FrameworkProfiler:
        """``mindspore.profiler``, of the device."""
        from convmesh.engines.mindspore.profile import MindSporeProfiler

        device = self._world.device if self._world is not None else "cpu"
        return MindSporeProfiler(folder, rank=rank, device=device)

    def versions(self) -> dict[str, str]:
        """Versions of MindSpore and NumPy and what they run on."""
        return {
            "mindspore": ms.__version__,
            "numpy": np.__version__,
            "processor": platform.processor() or platform.machine(),
        }

    def _uses_already(self, device: str) -> bool:
        """Whether MindSpore has computed on this device before: then it refuses to be told again."""
        target = ms.get_context("device_target")
        return device == "cpu" and target == "CPU" and bool(ms.hal.is_initialized("CPU"))

    def _select_device(self, world: World) -> None:
        if self._uses_already(world.device):
            return
        try:
            if world.device == "cpu":
                ms.set_device("CPU")
            else:
                ms.set_device(_TARGETS[world.device], world.local_rank)
        except (RuntimeError, ValueError) as error:
            raise EngineError(
                f"MindSpore can't use the device '{world.device}'",
                got=brief(error),
                fix="Set 'train.device: cpu', or install the build of MindSpore for this device",
            ) from error

    def _check_same(self, description: dict[str, Any]) -> None:
        of_rank = self.all_gather(description)
        for rank, other in enumerate(of_rank):
            differing = sorted({name for name, _ in set(other.items()) ^ set(of_rank[0].items())})
            if differing:
                raise ModelError(
                    f"ranks 0 and {rank} have built different networks",
                    got=f"{', '.join(differing)} on one of them only, or with another shape",
                    fix="Make the factory independent of the rank",
                )


def create_engine() -> MindSporeEngine:
    """The engine, not started."""
    return MindSporeEngine()

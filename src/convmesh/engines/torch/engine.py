"""PyTorch as an engine; implements `convmesh.engines.contract.Engine`."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from convmesh.config.execution import execution_of
from convmesh.config.schema import ModelConfig, RunConfig
from convmesh.engines.contract import Batch, PixelScale, Reader, World
from convmesh.engines.cores import stay_on_a_core, use_all_cores
from convmesh.engines.torch import networks
from convmesh.engines.torch.channel_axis import ChannelAxis
from convmesh.engines.torch.collectives import DataAxis, gather_values
from convmesh.engines.torch.launch import keep_freed_memory
from convmesh.engines.torch.loader import load
from convmesh.engines.torch.train_step import TorchTrainStep
from convmesh.errors import ConfigError, EngineError, ModelError
from convmesh.geometry.regrouping import ChannelRegrouping
from convmesh.mesh import Mesh
from convmesh.plan import CHANNEL
from convmesh.plan.beside import graph_beside
from convmesh.plan.load import load_plan
from convmesh.plan.plan import DATA
from convmesh.profiling.framework import FrameworkProfiler

_SLURM_FIRST_PORT = 29500


class TorchEngine:
    """PyTorch on CPU or CUDA."""

    name = "torch"

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._world: World | None = None
        self._axis = DataAxis(None)
        self._channel: Any = None
        self._region: Any = None
        self._was_deterministic = (False, False)

    def start(self, world: World) -> None:
        """Joins the ranks (Gloo for the CPU, NCCL for GPUs) and selects device and threads.

        On the CPU, ranks that share cores evenly are each bound to one, and PyTorch is set to deterministic algorithms,
        so that a resumed run repeats the numbers.

        Raises:
            EngineError: If the device or the other ranks can't be reached.
        """
        self._world = world
        torch.set_num_threads(world.num_threads)
        stay_on_a_core(world)
        self._device = _select_device(world)
        self._was_deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        )
        if self._device.type == "cpu":
            keep_freed_memory()
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        else:
            torch.backends.cudnn.benchmark = True
        if world.num_ranks > 1:
            _join(world)
            self._axis = DataAxis(_group(world, "data"))
            self._channel = _group(world, CHANNEL)

    def stop(self) -> None:
        """Leaves the ranks; after an error too."""
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        if self._world is not None:
            use_all_cores()
            deterministic, fill = self._was_deterministic
            torch.use_deterministic_algorithms(deterministic)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        self._world, self._axis, self._channel, self._region = None, DataAxis(None), None, None

    def build_network(self, model: ModelConfig, *, num_classes: int, num_channels: int, seed: int) -> nn.Module:
        """Builds the network on the device, with initial weights that depend on the seed alone.

        One that is to be split along channels is built on the CPU, so that no device ever holds the whole.

        Raises:
            ModelError: If the factory fails or weights are missing or unexpected; names are listed.
        """
        device = self._device if self._channel is None else torch.device("cpu")
        return networks.build_network(
            model, num_classes=num_classes, num_channels=num_channels, seed=seed, device=device
        )

    def output_width(self, network: nn.Module, *, image_shape_HWC: tuple[int, int, int]) -> int:
        """Runs one blank image through the network and tells the number of outputs.

        Raises:
            ModelError: If the network can't take such an image, or its output is not (N, classes).
        """
        return networks.output_width(network, image_shape_HWC=image_shape_HWC)

    def regroup_channels(
        self, network: nn.Module, regrouping: ChannelRegrouping, *, image_shape_HWC: tuple[int, int, int]
    ) -> nn.Module:
        """Makes a network take regrouped images; see `convmesh.engines.contract.Engine.regroup_channels`.

        Raises:
            ConfigError: If the regrouping does not fit the images or the convolution that takes them.
            ModelError: If something else than one convolution takes the images.
            MistakeList: If several things are wrong.
        """
        from convmesh.engines.torch.regroup import regroup_channels

        height, width, num_channels = image_shape_HWC
        return regroup_channels(network, regrouping, image_shape=(num_channels, height, width))

    def build_step(self, network: nn.Module, run: RunConfig, *, pixel_scale: PixelScale) -> TorchTrainStep:
        """Makes a network trainable: broadcasts its parameters and buffers from the first rank, sets up the optimizer.

        By the plan that ``strategy.plan`` names blocks are recomputed, and the network is split first, along the axis
        ``channel`` and where the plan says so along ``data``.

        Raises:
            ModelError: If the ranks have built different networks, there is nothing to train, or it can't be split.
            ConfigError: If a plan is needed and the run names none.
        """
        if run.train.channels_last:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        self._check_same({name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()})
        self._axis.broadcast_(list(tensors.values()), purpose="initial")
        if self._channel is not None:
            ChannelAxis(self._channel).broadcast_(list(tensors.values()), purpose="initial")
        splits = self._channel is not None or (run.strategy.plan is not None and self._axis.size > 1)
        if splits or execution_of(run).recompute:
            network = self._follow_plan(network, run).to(self._device)
        return TorchTrainStep(network, run, pixel_scale=pixel_scale, axis=self._axis)

    def _follow_plan(self, network: nn.Module, run: RunConfig) -> nn.Module:
        from convmesh.engines.torch.parallelize import REGION, parallelize

        mesh = self._world.mesh if self._world is not None else Mesh({})
        if run.strategy.plan is None:
            raise ConfigError(
                "a network is split and recomputed by a plan, and the run names none", fix="Set 'strategy.plan: FILE'"
            )
        plan = load_plan(run.strategy.plan)
        plan = dataclasses.replace(plan, mesh=mesh, execution=plan.execution.over(execution_of(run)))
        groups = {CHANNEL: self._channel}
        if plan.names(DATA) and self._axis.size > 1 and self._world is not None:
            self._region = self._region or _group(self._world, DATA, anew=True)
            groups[REGION] = self._region
            # Whole only here: what a device gets are the parts.
            network = network.cpu()
        num_samples = max(1, run.train.global_batch // (mesh.size("data") * run.strategy.accumulation))
        shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        graph = graph_beside(run.strategy.plan, plan, shapes, num_samples=num_samples)
        return parallelize(network, plan, num_samples=num_samples, groups=groups, graph=graph)

    def load(self, reader: Reader, keys: Sequence[tuple[int, int, int]], *, num_workers: int) -> Iterator[Batch]:
        """Reads the micro-batches of ``keys`` in order through a ``DataLoader``, ahead of their use."""
        return load(reader, keys, num_workers=num_workers, device=self._device)

    def all_gather(self, value: Any) -> list[Any]:
        """Gathers a small picklable value of every rank, in rank order; returns ``[value]`` for a single rank."""
        if self._world is None or self._world.num_ranks == 1:
            return [value]
        return gather_values(value)

    def peak_memory_bytes(self) -> int:
        """Largest memory of this rank so far: allocated on the GPU, or resident on CPU."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def memory_bytes(self) -> int:
        """Memory of this rank now: allocated on the GPU, or resident on CPU."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return int(psutil.Process().memory_info().rss)

    def profiler(self, folder: Path, *, rank: int) -> FrameworkProfiler:
        """``torch.profiler``, of the CPU and of the GPU if there is one."""
        from convmesh.engines.torch.profile import TorchProfiler

        return TorchProfiler(folder, rank=rank, device=self._device)

    def versions(self) -> dict[str, str]:
        """Versions of PyTorch and what it runs on."""
        versions = {"torch": torch.__version__, "processor": platform.processor() or platform.machine()}
        if self._device.type == "cuda":
            versions["cuda"] = str(torch.version.cuda)
            versions["cudnn"] = str(torch.backends.cudnn.version())
            versions["gpu"] = torch.cuda.get_device_name(self._device)
        return versions

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


def create_engine() -> TorchEngine:
    """The engine, not started."""
    return TorchEngine()


def _select_device(world: World) -> torch.device:
    if world.device == "cpu":
        return torch.device("cpu")
    if world.device != "cuda":
        raise EngineError(f"PyTorch does not run on the device '{world.device}'", expected="cpu or cuda")
    if not torch.cuda.is_available():
        raise EngineError("no CUDA GPU can be used by this PyTorch", got=torch.__version__,
                          fix="Set 'train.device: cpu', or install a CUDA build of PyTorch")  # fmt: skip
    # A scheduler that binds one GPU to each rank shows it as number 0.
    index = world.local_rank if torch.cuda.device_count() >= world.num_local_ranks else 0
    if torch.cuda.device_count() > 1 and index != world.local_rank:
        raise EngineError(
            "there are more ranks than GPUs",
            got=f"{world.num_local_ranks} ranks, {torch.cuda.device_count()} GPUs",
            fix=f"Use --ranks {torch.cuda.device_count()}",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _join(world: World) -> None:
    address, port = meeting_point()
    backend = "cpu:gloo,cuda:nccl" if world.device == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend, init_method=f"tcp://{address}:{port}", rank=world.rank, world_size=world.num_ranks
        )
    except (RuntimeError, ValueError) as error:
        raise EngineError(
            f"rank {world.rank} could not join the others at {address}:{port}",
            got=str(error).strip().splitlines()[0],
            fix="See whether the other ranks have failed, or use another port",
        ) from error


def _group(world: World, axis: str, *, anew: bool = False) -> dist.ProcessGroup | None:
    """The group of this rank along an axis, on request one of its own; every rank makes all groups, in one order."""
    if world.mesh.size(axis) == 1:
        return None
    own: dist.ProcessGroup | None = None
    for ranks in world.mesh.groups(axis):
        group = dist.new_group(list(ranks)) if anew or len(ranks) < world.num_ranks else dist.group.WORLD
        if world.rank in ranks:
            own = group
    return own


def meeting_point() -> tuple[str, str]:
    """Where the ranks meet: what torchrun says, or under Slurm the first machine and a port made of the job number.

    Raises:
        EngineError: If neither says anything.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    nodes, job = (
        os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST")),
        os.environ.get("SLURM_JOB_ID", "0"),
    )
    if nodes:
        address = address or first_host(nodes)
        port = port or str(_SLURM_FIRST_PORT + int(job) % 10_000)
    if not address or not port:
        raise EngineError(
            "the ranks don't know where to meet",
            expected="MASTER_ADDR and MASTER_PORT, or the variables of a Slurm step",
            fix="Start the ranks with convmesh train --ranks N, or with torchrun or srun",
        )
    return address, port


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: ``node03`` for ``node[03-05,9],other1``."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes

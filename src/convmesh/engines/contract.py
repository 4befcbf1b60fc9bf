"""What an engine must do.

An engine computes; it decides nothing. `convmesh.training` drives it through these protocols alone, so that the loop,
checkpoints, metrics and reports are the same for MindSpore and PyTorch.

The reduction contract (both engines): the loss of an update is the sum over the samples of the global batch, each times
its weight, divided by their *global* number. A rank back-propagates its own part of that sum, divided by the global
number, over all its micro-batches; gradients are then *summed*, once, over the data axis. No rank ever divides by its
own count.

Legend: N samples, H rows, W columns, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

import numpy.typing as npt

from convmesh.config.schema import ModelConfig, RunConfig
from convmesh.errors import ConvMeshError
from convmesh.geometry.regrouping import ChannelRegrouping
from convmesh.mesh import Mesh
from convmesh.profiling.framework import FrameworkProfiler

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process stands among all ranks.

    Args:
        rank: From 0 to ``num_ranks - 1``.
        num_ranks: Ranks of the whole run.
        local_rank: Position among the ranks of this machine.
        num_local_ranks: Ranks on this machine.
        mesh: The mesh of all ranks.
        device: ``"cpu"``, ``"cuda"`` or ``"ascend"``; resolved, never ``"auto"``.
        num_threads: Threads that a rank may compute with.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    mesh: Mesh
    device: str
    num_threads: int

    @property
    def shard(self) -> int:
        """Position on the data axis: which part of each global batch this rank computes."""
        return self.mesh.coordinate(self.rank).get("data", 0)


@dataclass(frozen=True)
class Batch:
    """One micro-batch, as arrays of NumPy (from a reader) or of the engine (from ``Engine.load``).

    A micro-batch is never empty: a rank that has no sample in a ragged last batch gets one with weight 0, which takes
    part in every collective and adds nothing. Evaluation pads the last batch in the same way to keep one shape.

    Args:
        images_NHWC: uint8 pixels, channels last; not yet scaled.
        labels_N: int32 classes.
        weights_N: float32, 1 for a sample that counts and 0 for one that fills up.
        num_skipped: Corrupt samples that were replaced (training) or left out (evaluation).
    """

    images_NHWC: Any
    labels_N: Any
    weights_N: Any
    num_skipped: int = 0


@dataclass(frozen=True)
class PixelScale:
    """How uint8 pixels become the network's input, per channel: ``x = pixel * factor_C + offset_C`` in float32."""

    factor_C: tuple[float, ...]
    offset_C: tuple[float, ...]


@dataclass
class TrainState:
    """All that training changes, as whole (unsharded) tensors with engine-neutral names.

    Args:
        network: Parameters and buffers by torchvision-style name (``bn1.running_mean``).
        optimizer: Optimizer tensors as ``slot/parameter`` (``momentum/conv1.weight``), shaped like their parameter.
        average: Moving average of parameters and floating-point buffers; empty if off.
        num_updates: Updates that the optimizer has applied (skipped ones not counted).
    """

    network: Arrays
    optimizer: Arrays = field(default_factory=dict)
    average: Arrays = field(default_factory=dict)
    num_updates: int = 0


@dataclass(frozen=True)
class UpdateResult:
    """What one update tells, for this rank alone.

    Args:
        loss_sum: Sum of weight x loss over this rank's samples; may still be on the device.
        overflow: Whether a reduced gradient was not finite and the update was skipped. Equal on all ranks.
        gradient_norm: Global norm before clipping, if clipping is on.
    """

    loss_sum: SupportsFloat
    overflow: bool
    gradient_norm: SupportsFloat | None = None


@dataclass(frozen=True)
class EvalSums:
    """Sums over one evaluation batch of this rank; may still be on the device."""

    loss_sum: SupportsFloat
    num_correct: SupportsFloat
    num_samples: SupportsFloat


@dataclass(frozen=True)
class CollectiveCount:
    """Collectives of one kind and purpose in the last update.

    Args:
        purpose: ``"gradients"``, ``"parameters"`` (sharded optimizer), ``"buffers"``, ``"activations"`` (and their
            gradients) or ``"norm"``.
        kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"`` or ``"broadcast"``.
        number: How many.
        num_bytes: Bytes of all their inputs on one rank.
        axis: The mesh axis over which they went.
    """

    purpose: str
    kind: str
    number: int
    num_bytes: int
    axis: str = "data"


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """What a network is trained with while it is observed.

    Args:
        pixel_scale: How pixels become the network's input.
        updates: For each position on the data axis that is computed here, per update its micro-batches.
        counts: Samples of the global batch of each update.
        dtype: ``"float32"`` or ``"float64"``, of parameters and input.
        norm_shift: What the shifts of all norms start at; None leaves them. Activations then lie away from the kinks of
            ReLU and pooling, where rounding alone turns a gradient on or off.
        jitter: Seed by which each parameter is changed in its last bit at the start; None changes nothing.
        other_kernels: Whether one device computes with kernels that add up in another order, where there are some.
    """

    pixel_scale: PixelScale
    updates: Sequence[Sequence[Sequence[Batch]]]
    counts: Sequence[int]
    dtype: str = "float32"
    norm_shift: float | None = None
    jitter: int | None = None
    other_kernels: bool = False


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What was noted while a network trained for a few updates, to be compared with another way of training it.

    Args:
        losses: Per update the mean over the global batch of this rank's part of the losses.
        outputs: The network's outputs, one per forward, in order.
        gradients: Whole gradients of the first update, by parameter.
        parameters: Whole parameters after all updates.
        buffers: Whole buffers after all updates.
        saved_bytes: The most that a forward of the first update kept for its backward, each memory once; None where the
            engine doesn't tell.
        peak_memory_bytes: Largest memory of this rank.
        parameter_bytes: Of each trainable parameter as this rank holds it, in order.
        buffer_bytes: Of this rank's floating-point buffers together.
        collectives: What the last update communicated.
        start: Whole parameters before the first update; of one device only.
    """

    losses: tuple[float, ...]
    outputs: tuple[npt.NDArray[Any], ...]
    gradients: Arrays
    parameters: Arrays
    buffers: Arrays
    saved_bytes: int | None
    peak_memory_bytes: int
    parameter_bytes: tuple[int, ...] = ()
    buffer_bytes: int = 0
    collectives: tuple[CollectiveCount, ...] = ()
    start: Arrays = field(default_factory=dict)


class Reader(Protocol):
    """Reads micro-batches by key; keys say which (see `convmesh.data.reader`). Picklable, for worker processes."""

    def read(self, key: tuple[int, int, int]) -> Batch:
        """Reads and augments the micro-batch of one key, as NumPy arrays."""
        ...


class TrainStep(Protocol):
    """A network with everything that training it takes, on one rank."""

    def update(
        self,
        micro_batches: Sequence[Batch],
        *,
        global_count: int,
        learning_rate: float,
        loss_scale: float,
        update_index: int,
    ) -> UpdateResult:
        """Runs all micro-batches of one update, reduces gradients once and applies the optimizer.

        Args:
            micro_batches: This rank's micro-batches, from ``Engine.load``; at least one.
            global_count: Samples of the whole global batch, the divisor of the loss.
            learning_rate: For this update.
            loss_scale: Factor on the loss before the backward, taken out of the gradients; 1 without loss scaling.
            update_index: Number of this update since the start of the run; seeds what is random on the device.

        Returns:
            The loss of this rank and whether the update was skipped.
        """
        ...

    def evaluate(self, batch: Batch) -> EvalSums:
        """Runs one batch in evaluation mode, with averaged weights if there are any."""
        ...

    def export_state(self) -> TrainState:
        """Whole tensors of everything. All ranks must call it; all get the result."""
        ...

    def import_state(self, state: TrainState) -> None:
        """Takes over a state, whatever mesh or (for ``network`` alone) engine it came from.

        Raises:
            CheckpointError: If names are missing or unexpected, or shapes differ; all of them are listed.
        """
        ...

    def local_tensors(self) -> Arrays:
        """This rank's copy of each parameter and buffer that the data axis has alike, by name; communicates nothing."""
        ...

    def collectives(self) -> tuple[CollectiveCount, ...]:
        """What the last update communicated."""
        ...

    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds."""
        ...

    def num_parameters(self) -> int:
        """Elements of all trainable parameters of the whole network."""
        ...


class Engine(Protocol):
    """A framework. `convmesh.engines.load_engine` makes one."""

    name: str

    def start(self, world: World) -> None:
        """Joins the ranks of the run and selects device and threads; does not communicate for a single rank.

        Raises:
            EngineError: If the device or the collectives are not available.
        """
        ...

    def stop(self) -> None:
        """Leaves the ranks; after an error too."""
        ...

    def build_network(self, model: ModelConfig, *, num_classes: int, num_channels: int, seed: int) -> Any:
        """Builds the network on the device, with initial weights that depend on the seed alone.

        Args:
            model: Name or factory, arguments, and a file of weights or none.
            num_classes: Classes of the data; the default of the argument ``num_classes`` of our own networks.
            num_channels: Channels of the images; the default of ``num_channels`` of our own networks.
            seed: Seed of the initial weights.

        Raises:
            ModelError: If the factory fails or weights are missing or unexpected; names are listed.
        """
        ...

    def regroup_channels(
        self, network: Any, regrouping: ChannelRegrouping, *, image_shape_HWC: tuple[int, int, int]
    ) -> Any:
        """Makes a network take regrouped images and compute from them what it computed from the images.

        States that steps export and take over stay those of the network before.

        Args:
            network: Changed in place.
            regrouping: Of the images' channels.
            image_shape_HWC: Shape of the images before.

        Returns:
            The network.

        Raises:
            ConfigError: If the regrouping does not fit the images or the convolution that takes them.
            ModelError: If something else than one convolution takes the images.
            MistakeList: If several things are wrong.
        """
        ...

    def output_width(self, network: Any, *, image_shape_HWC: tuple[int, int, int]) -> int:
        """Runs one blank image through the network and tells the number of outputs.

        Raises:
            ModelError: If the network can't take such an image, or its output is not (N, classes).
        """
        ...

    def build_step(self, network: Any, run: RunConfig, *, pixel_scale: PixelScale) -> TrainStep:
        """Makes a network trainable: broadcasts its parameters and buffers from rank 0, then sets up the optimizer."""
        ...

    def load(self, reader: Reader, keys: Sequence[tuple[int, int, int]], *, num_workers: int) -> Iterator[Batch]:
        """Reads the micro-batches of ``keys`` in order through the engine's own data pipeline, ahead of their use."""
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """Gathers a small picklable value of every rank, in rank order; returns ``[value]`` for a single rank."""
        ...

    def peak_memory_bytes(self) -> int:
        """Largest memory of this rank so far: of the device, or resident memory on CPU."""
        ...

    def memory_bytes(self) -> int:
        """Memory of this rank now: allocated on the device, or resident memory on CPU."""
        ...

    def profiler(self, folder: Path, *, rank: int) -> FrameworkProfiler:
        """The framework's own profiler, which keeps its files in a folder."""
        ...

    def versions(self) -> dict[str, str]:
        """Versions of the framework and what it runs on."""
        ...


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What a launcher needs to start ranks.

    Args:
        num_ranks: Ranks to start on this machine.
        port: Free port for the ranks to meet at.
        log_dir: Folder for the launcher's own logs.
        command: What every rank runs, starting with the interpreter.
    """

    num_ranks: int
    port: int
    log_dir: Path
    command: tuple[str, ...]


class Launcher(Protocol):
    """How an engine's ranks are started and what its devices can do; must import no framework."""

    def command(self, request: LaunchRequest) -> list[str]:
        """The command line of ``msrun`` or ``torchrun`` that starts all ranks."""
        ...

    def environment(self, *, num_threads: int) -> Mapping[str, str]:
        """Variables for every rank: thread counts and what the engine needs for loopback ranks."""
        ...

    def resolve_device(self, device: str) -> str:
        """Turns ``"auto"`` into ``"cpu"``, ``"cuda"`` or ``"ascend"`` by what the machine shows; others stay."""
        ...

    def check(self, run: RunConfig, *, device: str, num_ranks: int) -> list[ConvMeshError]:
        """Everything in the run that this engine can't do on this device."""
        ...

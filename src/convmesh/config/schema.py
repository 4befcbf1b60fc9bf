"""The run file as frozen dataclasses.

Each field's docstring line is its documentation: the JSON Schema and the configuration reference are made from it.
Values are checked by pydantic where a file enters (`convmesh.config.load`); rules that span fields are in `rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from convmesh.units import read_bytes


def _no_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number, not yes or no")
    return value


_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

Bytes = Annotated[int, BeforeValidator(read_bytes), Field(ge=1, json_schema_extra={"type": ["integer", "string"]})]
SizeInBytes = Annotated[
    int, BeforeValidator(read_bytes), Field(ge=0, json_schema_extra={"type": ["integer", "string"]})
]
Positive = Annotated[int, BeforeValidator(_no_truth), Field(ge=1)]
NotNegative = Annotated[int, BeforeValidator(_no_truth), Field(ge=0)]
Seed = Annotated[int, BeforeValidator(_no_truth), Field(ge=0, lt=2**32)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
EngineName = Literal["mindspore", "torch"]
DType = Literal["float32", "float16", "bfloat16"]
SinkName = Literal["tensorboard", "wandb", "mlflow", "swanlab"]


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class ModelConfig:
    """Which network is trained: one of ours by name, or your own by factory."""

    name: Literal["cnn-small", "resnet18", "resnet50", "resnet152"] | None = None
    """A network that ConvMesh ships for both engines."""
    factory: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] | None = None
    """Your own network: ``package.module:function``, called with ``args``; returns an nn.Cell or nn.Module."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the network or factory, for example ``small_images: true`` for the ResNets."""
    weights: str | None = None
    """Initial weights: a .safetensors file, or a .pth read by PyTorch's weights-only loader."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class AugmentConfig:
    """Random changes to training images; each is a pure function of seed, epoch and sample."""

    crop_padding: NotNegative = 0
    """Pad by this many pixels and crop a random window of the image size (0: off; 4 is usual for CIFAR-10)."""
    flip: bool = False
    """Mirror left and right with probability 1/2."""
    random_resized_crop: bool = False
    """Crop a random area (8 % to 100 %, aspect 3/4 to 4/3) and resize it to ``image_size``."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class ChannelsConfig:
    """Channels of the images, regrouped after everything else; the first convolution is changed to compute the same."""

    space_to_depth: Positive = 1
    """Move the pixels of blocks of this side into channels: 2 makes 12x112x112 of 3x224x224 (1: off)."""
    pad: NotNegative = 0
    """Add this many zero channels."""
    pad_to: Positive | None = None
    """Add zero channels until there are this many."""
    order: tuple[NotNegative, ...] | None = None
    """Which channel stands at each place in the end, zero channels included: ``[2, 1, 0]`` makes BGR of RGB."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class DataConfig:
    """Where samples come from and in which order ranks see them."""

    source: Literal["cifar10", "image_folder", "idx", "digits"]
    """The kind of data."""
    path: str | None = None
    """The folder of the data. Default: where ``convmesh data fetch`` put it."""
    num_train: Positive | None = None
    """Use only this many training samples, chosen evenly over the classes. Default: all."""
    num_eval: Positive | None = None
    """Use only this many evaluation samples, chosen evenly over the classes. Default: all."""
    sampler: Literal["sequential", "random", "stratified", "balanced"] = "stratified"
    """Order of an epoch's samples. Each rank gets its share of every class if stratified, of file bytes if balanced."""
    last_batch: Literal["keep", "drop"] = "keep"
    """Whether an epoch ends with a smaller global batch or leaves those samples out."""
    image_size: Positive | None = None
    """Side in pixels of the square images that the network sees. Needed where files differ in size."""
    mean: tuple[float, ...] | None = None
    """Mean per channel, on the scale of ``pixel_range``. Default: the known value of the data set."""
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """Standard deviation per channel, on the scale of ``pixel_range``."""
    pixel_range: Literal["0-1", "0-255"] = "0-1"
    """The range that uint8 pixels have when mean and std are applied."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Random changes to training images."""
    channels: ChannelsConfig = field(default_factory=ChannelsConfig)
    """How channels are regrouped, so that they divide over the ranks of the channel axis."""
    num_workers: NotNegative = 0
    """Data workers per rank; 0 prepares batches in the training process."""
    on_error: Literal["fail", "skip"] = "fail"
    """A corrupt image ends the run with its name, or is replaced and counted."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class StrategyConfig:
    """How the work is split over ranks and over time."""

    mesh: Mapping[str, Positive] = field(default_factory=dict)
    """Mesh axes and sizes, for example ``{data: 4}``. Default: all ranks on the data axis."""
    plan: str | None = None
    """A plan file: how the network is split, by rule if left out; what it says of the four settings below counts."""
    accumulation: Positive = 1
    """Micro-batches per update. Changes memory, not mathematics."""
    optimizer_sharding: bool = False
    """Keep 1/N of the optimizer state on each of the N ranks of the data axis."""
    bucket_bytes: Bytes = 25 * 2**20
    """Gradients are reduced in buckets of about this size; a number of bytes or "25MiB"."""
    recompute: Literal["none", "blocks"] | tuple[str, ...] = "none"
    """Blocks that the backward computes again, instead of keeping what they make: none, all, or names and patterns."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class LossScaleConfig:
    """Dynamic loss scaling, used with float16."""

    initial: Annotated[float, Field(ge=1)] = 2.0**24
    """Scale of the first update."""
    factor: Annotated[float, Field(gt=1)] = 2.0
    """Divisor after an overflow, multiplier after a quiet window."""
    window: Positive = 200
    """Updates without overflow after which the scale grows."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    compute: DType = "float32"
    """Type of convolutions and dense layers; parameters and optimizer state stay float32."""
    gradient_reduction: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type in which gradients travel between ranks; the half types send half the bytes and round."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Dynamic loss scaling, used when ``compute`` is float16."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class OptimizerConfig:
    """The optimizer."""

    name: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, or AdamW."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.1
    """Learning rate at the top of the schedule."""
    momentum: Fraction = 0.9
    """Momentum of SGD."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay of AdamW's first and second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay: added to the gradient by SGD, decoupled in AdamW."""
    decay_norm_and_bias: bool = False
    """Whether normalisation parameters and biases (all with fewer than two dims) decay too."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Largest global norm of the gradient. Default: no clipping."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class ScheduleConfig:
    """Learning rate over time, per update."""

    name: Literal["constant", "cosine", "steps"] = "cosine"
    """Shape after the warm-up."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    """Epochs over which the learning rate rises linearly from zero."""
    milestones: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Epochs at which ``steps`` multiplies the learning rate by ``gamma``."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor at each milestone."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where ``cosine`` ends, as a share of the learning rate."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class ProfileConfig:
    """Which updates are profiled; the run folder's ``profile`` then holds their events."""

    start: NotNegative = 10
    """The first profiled update; those before compile and warm up."""
    steps: NotNegative = 0
    """Updates to profile; 0 for none."""
    detail: bool = False
    """Let the engine's own profiler tell every operator; slower, and needed to see what a GPU or NPU does."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class TrainConfig:
    """How long, how large, how often."""

    epochs: Positive = 10
    """Passes over the training data."""
    global_batch: Positive = 64
    """Samples per update over all ranks and micro-batches."""
    seed: Seed = 0
    """Seed of initial weights, order and augmentation."""
    device: Literal["auto", "cpu", "cuda", "ascend"] = "auto"
    """Device of every rank; auto takes an accelerator where the engine finds one."""
    channels_last: bool = True
    """PyTorch: keep images and weights in channels-last memory order."""
    label_smoothing: Fraction = 0.0
    """Share of the target spread evenly over all classes."""
    weight_average: Fraction = 0.0
    """Decay of a moving average of the weights, used for evaluation (0: off)."""
    eval_every_epochs: Positive = 1
    """Epochs between evaluations; the last epoch always ends with one."""
    eval_batch: Positive | None = None
    """Samples per rank and evaluation step. Default: the micro-batch."""
    log_every_steps: Positive = 10
    """Updates between lines of metrics."""
    checkpoint_every_steps: Positive | None = None
    """Updates between checkpoints. Default: at the end of every epoch."""
    keep: Positive = 3
    """Newest checkpoints that are kept, beside the best one."""
    check_sync_every: NotNegative = 0
    """Updates between checks that all ranks hold equal tensors (0: only at the start and the end)."""
    max_updates: Positive | None = None
    """End the run after this many updates, for trials; an epoch cut short is not evaluated or saved. Default: never."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Which updates are profiled."""
    sinks: tuple[SinkName, ...] = ()
    """Where metrics go beside ``metrics.jsonl``; each needs the extra of its name, like ``convmesh[tensorboard]``."""
    project: Annotated[str, Field(min_length=1)] = "convmesh"
    """The project, or experiment, under which sinks file the run."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class ReportConfig:
    """The pages about the run."""

    language: Literal["en", "zh"] = "en"
    """Language of ``report.html`` and of the page of a profile; ``--language`` overrules it."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class RunConfig:
    """One run, whole."""

    engine: EngineName = "mindspore"
    """The framework that computes."""
    model: ModelConfig
    """Which network is trained."""
    data: DataConfig
    """Where samples come from and in which order ranks see them."""
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    """How the work is split over ranks and over time."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over time."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How long, how large, how often."""
    report: ReportConfig = field(default_factory=ReportConfig)
    """The pages about the run."""

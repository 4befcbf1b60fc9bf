"""Cluster: what the devices and links that a plan is made for can do, as data with sources.

A cluster file is measured by ``convmesh calibrate`` or is one of the presets in ``convmesh/planner/presets``. Every
figure in it names where it comes from (``source``: a key of ``sources``), and the planner tells it on.

```yaml
schema_version: 1
name: two cores
source: measured
sources: {measured: "convmesh calibrate --ranks 2, 2026-12-01"}
engine: torch
device: {name: CPU, kind: cpu, memory_bytes: 16GiB, fixed_bytes: 250MiB}
nodes: 1
devices_per_node: 2
num_ranks_measured: 2
compute:
- {operator: convolution, dtype: float32, points: [{flops: 1.0e+9, num_bytes: 1.0e+7, seconds: 0.03}]}
- {operator: copy, dtype: float32, points: [{num_bytes: 1.0e+7, seconds: 0.002}]}
links:
  inside:
  - {kind: all-reduce, num_ranks: 2, alpha_seconds: 2.0e-4, seconds_per_byte: 5.0e-10}
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from convmesh.config.schema import Bytes, EngineName, Positive, SizeInBytes

SCHEMA_VERSION = 1
"""Version of the cluster file."""

OperatorClass = Literal[
    "convolution", "pointwise", "grouped", "depthwise", "convolution_transposed", "dense",
    "norm", "pooling", "elementwise", "copy", "sgd", "adamw",
]  # fmt: skip
"""Classes of work with a throughput of their own. Those of the first row are seen over FLOPs, the others over bytes.

``pointwise`` is a convolution whose kernel is a single pixel, ``depthwise`` one with as many groups as channels.
``sgd`` and ``adamw`` are an update of parameters that have so many bytes, without the gradient's norm.
"""

WEIGHTED_CLASSES = ("convolution", "pointwise", "grouped", "depthwise", "convolution_transposed", "dense")
"""Classes whose curves are read over FLOPs."""

Direction = Literal["forward", "backward"]
CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast"]
Way = Literal["collective", "shared_memory"]

_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
_Seconds = Annotated[float, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class Device:
    """One device, which serves one rank."""

    name: str
    """What it is called."""
    kind: Literal["cpu", "cuda", "ascend"] = "cpu"
    """Which collectives and number formats the engine uses on it."""
    memory_bytes: Bytes
    """Memory that one rank may fill, fixed_bytes included."""
    fixed_bytes: SizeInBytes = 0
    """What a rank holds before there is a network: framework and libraries."""
    bytes_per_operator: SizeInBytes = 0
    """What the engine holds for each operator beside its tensors, such as compiled graphs."""
    workspace_share: Annotated[float, Field(ge=0)] = 0.0
    """Scratch memory of a convolution or dense layer, as a share of its input, output and weight together."""
    num_threads: Positive = 1
    """Threads of a rank, where the device is a CPU: MindSpore keeps some scratch memory for each."""
    spare_share: Annotated[float, Field(ge=0)] = 0.0
    """What engine and allocator hold beyond tensors, as a share of them."""
    spare_parameter_share: Annotated[float, Field(ge=0)] | None = None
    """The same for parameters, gradients and optimizer state, where it was measured apart from activations."""
    source: str = ""
    """Key of ``sources``; default: the source of the file."""

    @property
    def parameter_share(self) -> float:
        """What is held beyond parameters, gradients and optimizer state, as a share of them."""
        return self.spare_share if self.spare_parameter_share is None else self.spare_parameter_share


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class Point:
    """One measured piece of work."""

    flops: Annotated[float, Field(ge=0)] = 0.0
    """FLOPs as `convmesh.graph.costs` counts them."""
    num_bytes: Annotated[float, Field(ge=0)] = 0.0
    """Bytes as `convmesh.planner.signature.Signature.num_bytes` counts them."""
    seconds: Annotated[float, Field(gt=0)]
    """How long it took."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class Curve:
    """Seconds over size for one class of operators."""

    operator: OperatorClass
    """The class."""
    dtype: Literal["float32", "float16", "bfloat16", "float64"] = "float32"
    """Type in which it computes."""
    direction: Direction = "forward"
    """Which of the two it is."""
    points: Annotated[tuple[Point, ...], Field(min_length=1)]
    """In any order; between them seconds are interpolated on a log-log scale."""
    source: str = ""
    """Key of ``sources``; default: the source of the file."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class Measured:
    """One operator at exactly these shapes."""

    signature: str
    """The text of a `convmesh.planner.signature.Signature`."""
    forward_seconds: _Seconds
    """Seconds of one forward."""
    backward_seconds: _Seconds = 0.0
    """Seconds of one backward."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class Link:
    """One kind of collective in a group of one size: ``alpha + bytes * seconds_per_byte``.

    Bytes are those that `convmesh.plan.collectives` counts: of the inputs on one rank, whatever operation the engine
    uses for it. So an all-gather's are of a rank's own part, a reduce-scatter's of the whole.
    """

    kind: CollectiveKind
    """What it is meant to do."""
    num_ranks: Annotated[int, Field(ge=2)]
    """Size of the group; between nodes, of a group with one rank on each node."""
    num_groups: Positive = 1
    """How many such groups communicated at once when it was measured."""
    way: Way = "collective"
    """Through the engine's collectives, or through memory that the ranks of one machine share.

    On the CPU, MindSpore's ranks sum gradients there, PyTorch's sum activations. What has one way only is named
    ``collective``, whatever way that is.
    """
    alpha_seconds: _Seconds
    """Seconds that do not depend on the size."""
    seconds_per_byte: _Seconds
    """Seconds per byte counted."""
    spread: Annotated[float, Field(ge=0)] = 0.0
    """Interquartile range of the measurement as a share of its median; 0 where not measured."""
    source: str = ""
    """Key of ``sources``; default: the source of the file."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class Links:
    """How ranks reach each other."""

    inside: tuple[Link, ...] = ()
    """Among the devices of one node."""
    between: tuple[Link, ...] | None = None
    """Among nodes, through one network adapter of each; null for a single node."""
    adapters_per_node: Positive = 1
    """Network adapters of a node, which groups that communicate at once share."""


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class Cluster:
    """Devices and links."""

    schema_version: int = SCHEMA_VERSION
    """Version of this file."""
    name: str
    """What it is called in tables."""
    source: str = "measured"
    """Key of ``sources``: where figures come from that name no source of their own."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Short name of each source to what it is: document, address, or how it was measured."""
    engine: EngineName | None = None
    """The engine that it was measured with; null where it holds for both."""
    device: Device
    """Each device."""
    nodes: Positive = 1
    """Nodes there are; a plan may be made for more of the same."""
    devices_per_node: Positive
    """Devices, and ranks, of one node."""
    num_ranks_measured: Positive | None = None
    """Ranks that computed at once while compute was measured: on shared cores that is the truth."""
    compute: tuple[Curve, ...]
    """Throughput by class, type and direction."""
    measured: tuple[Measured, ...] = ()
    """Exact operators; they win over curves."""
    links: Links = field(default_factory=Links)
    """Collectives."""
    overlap: _Share = 0.0
    """Share of the gradient reduction that, while the backward still runs, really costs no time."""
    update_seconds: _Seconds = 0.0
    """What each update costs beside everything named here."""
    micro_batch_seconds: _Seconds = 0.0
    """What each micro-batch costs beside its operators: entering forward and backward."""
    data_seconds_per_sample: _Seconds | None = None
    """Seconds of one rank to prepare one sample; null where not known."""

    def source_of(self, key: str) -> str:
        """Where a figure comes from, in words.

        Args:
            key: The figure's own ``source``; empty for that of the file.

        Returns:
            The text of ``sources``, or the key itself.
        """
        key = key or self.source
        return self.sources.get(key, key)

"""Splits: along what each operator can be split exactly, and why not along the rest.

On one axis of the mesh an operator has one split:

- ``samples``, ``height``, ``width``, ``depth``: that dim of its inputs and outputs;
- ``channels``: the channels of an operator that treats each (or each group) alone;
- ``in_channels``, ``out_channels``, ``groups``: of a convolution or dense layer, by its weight;
- ``whole``: not at all.

What follows from a split (placements, redistributions) is decided elsewhere; here is only what may be asked for.
Whether the sizes suit (groups by shards, say) is checked against a channel partition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from convmesh.graph.graph import Edge, Graph, Node, Shape

SPLITS = ("samples", "in_channels", "out_channels", "groups", "channels", "depth", "height", "width", "whole")
"""All splits, in the order in which they are listed."""

_SPATIAL = {3: ("width",), 4: ("height", "width"), 5: ("depth", "height", "width")}
_OF_WEIGHTS = ("in_channels", "out_channels", "groups")
_NO_WEIGHT = "it has no weight that mixes channels; its channels are split as 'channels'"


@dataclass(frozen=True)
class Splits:
    """What an operator can be split along.

    Args:
        allowed: Splits that are exact, in the order of ``SPLITS``.
        refused: Every other split and why it is not.
    """

    allowed: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)


def dim_names(shape: Shape) -> tuple[str, ...]:
    """The names of a tensor's dims: samples, channels, then depth, height and width as far as it has them."""
    return ("samples", "channels", *_SPATIAL.get(len(shape), ("",) * max(0, len(shape) - 2)))[: len(shape)]


def convolution(_graph: Graph, node: Node) -> Splits:
    """Its weight can be split by outputs and inputs, or by whole groups; pixels need halos."""
    groups = node.attributes["groups"]
    refused = {"channels": "it mixes channels; split it by 'in_channels' or 'out_channels'"}
    if groups == 1:
        refused["groups"] = "it has one group of channels; split it by 'in_channels' or 'out_channels'"
    else:
        refused["channels"] = "its weight goes along; split it by 'groups'"
        for name in ("in_channels", "out_channels"):
            refused[name] = f"its {groups} groups are independent; split it by 'groups'"
    return _splits(node, refused)


def dense(_graph: Graph, node: Node) -> Splits:
    """Its weight can be split by outputs and inputs."""
    refused = {
        "channels": "it mixes channels; split it by 'in_channels' or 'out_channels'",
        "groups": "it has one group of channels; split it by 'in_channels' or 'out_channels'",
    }
    if len(node.shape) > 2:
        mixed = dim_names(node.shape)[-1]
        refused[mixed] = "it mixes the last dim; split it by 'in_channels' or 'out_channels'"
    return _splits(node, refused)


def free(_graph: Graph, node: Node) -> Splits:
    """Every dim can be split: each element, or each channel, stands alone, or statistics are summed."""
    return _splits(node, _weightless())


def per_sample_norm(_graph: Graph, node: Node) -> Splits:
    """Channels (whole groups) can be split, pixels can't: statistics span all of them."""
    refused = _weightless()
    for name in dim_names(node.shape)[2:]:
        refused[name] = "its mean and variance span all pixels of a sample"
    return _splits(node, refused)


def layer_norm(_graph: Graph, node: Node) -> Splits:
    """Dims that are not normalised, and channels: of those it takes mean and variance of all ranks' parts."""
    first = len(node.shape) - node.attributes["num_dims"]
    refused = _weightless()
    for name in dim_names(node.shape)[first:]:
        if name != "channels":
            refused[name] = "its mean and variance span them: it needs them whole"
    return _splits(node, refused)


def adaptive_pool(_graph: Graph, node: Node) -> Splits:
    """A global mean is a weighted mean of means; windows that depend on the whole size can't be split."""
    refused = _weightless()
    attributes = node.attributes
    if attributes["function"] != "mean" or set(attributes["output_size"]) != {1}:
        for name in dim_names(node.shape)[2:]:
            refused[name] = "its windows depend on the whole image; only a global mean can be split so"
    return _splits(node, refused)


def along(_graph: Graph, node: Node) -> Splits:
    """Every dim but the one along which it works, and channels.

    Concat and split of channels change only the partition, softmax takes maximum and sum of all ranks' parts.
    """
    dim = node.attributes["dim"]
    refused = _weightless()
    if dim != 1 or node.kind == "slice":
        refused[dim_names(node.shape)[dim]] = f"it works along this dim: a {node.kind} needs it whole"
    return _splits(node, refused)


def flatten(graph: Graph, node: Node) -> Splits:
    """Samples and channels stay; merged pixels are features of their channel, in no order of rows."""
    source = graph.input_shapes(node)[0]
    start, end = node.attributes["start_dim"], node.attributes["end_dim"]
    refused = _weightless()
    for dim, name in enumerate(dim_names(source)):
        if start < dim <= end or (dim == start == 0):
            refused[name] = "it is merged with the dim before it"
    if start == 0:
        refused["samples"] = "it is merged with the dim after it"
    return _splits(node, refused, shape=source)


def reshape(graph: Graph, node: Node) -> Splits:
    """The leading dims that stay as they are can be split."""
    source = graph.input_shapes(node)[0]
    refused = _weightless()
    kept = 0
    while kept < min(len(source), len(node.shape)) and source[kept] == node.shape[kept]:
        kept += 1
    for name in dim_names(source)[kept:]:
        refused[name] = "the reshape mixes it with other dims"
    return _splits(node, refused, shape=source)


def transpose(graph: Graph, node: Node) -> Splits:
    """The dims that stay where they are can be split."""
    refused = _weightless()
    for dim, name in enumerate(dim_names(node.shape)):
        if node.attributes["order"][dim] != dim:
            refused[name] = "the transpose moves it"
    return _splits(node, refused, shape=graph.input_shapes(node)[0])


def reduction(graph: Graph, node: Node) -> Splits:
    """Channels and pixels can be split, also those over which it goes; samples only if they stay."""
    source = graph.input_shapes(node)[0]
    refused = _weightless()
    if 0 in node.attributes["dims"]:
        refused["samples"] = f"it takes the {node.kind} over all of them"
    return _splits(node, refused, shape=source)


def binary(graph: Graph, node: Node) -> Splits:
    """Every dim of the result can be split if no input is aligned with it shifted, as (C,) is with (N, C, H, W)."""
    return _splits(node, _weightless() | _clashes(graph, node))


def upsample(_graph: Graph, node: Node) -> Splits:
    """Samples and channels; rows would need the neighbours' at borders that depend on the whole size."""
    refused = _weightless()
    for name in dim_names(node.shape)[2:]:
        refused[name] = "it interpolates over borders that depend on the whole image"
    return _splits(node, refused)


def pad(_graph: Graph, node: Node) -> Splits:
    """Dims that get no padding."""
    refused = _weightless()
    for name, pair in zip(dim_names(node.shape), node.attributes["padding"], strict=True):
        if any(pair):
            refused[name] = "it pads this dim, which only the ranks at its ends should do"
    return _splits(node, refused)


def source(graph: Graph, node: Node) -> Splits:
    """What enters a network can be split along any of its dims; a parameter has no samples."""
    if node.kind == "input":
        return free(graph, node)
    refused = _weightless() | {"samples": f"a {node.kind} has no samples"}
    refused |= dict.fromkeys(("depth", "height", "width"), f"a {node.kind} has no pixels")
    return _splits(node, refused, shape=_as_channels(node.shape))


def opaque(graph: Graph, node: Node) -> Splits:
    """Samples, as plain data parallel training splits them, where inputs and outputs have equally many."""
    operator = node.attributes["operator"]
    refused = {name: f"ConvMesh knows no rule for {operator}" for name in SPLITS if name not in ("samples", "whole")}
    first_sizes = {shape[0] if shape else 0 for shape in (*graph.input_shapes(node), *node.output_shapes)}
    if len(first_sizes) != 1 or 0 in first_sizes:
        refused["samples"] = f"inputs and outputs of {operator} don't have equally many samples"
    return _splits(node, refused, shape=(1,) * 5)


def _weightless() -> dict[str, str]:
    return dict.fromkeys(_OF_WEIGHTS, _NO_WEIGHT)


def _as_channels(shape: Shape) -> Shape:
    return (1, max(1, math.prod(shape)))


def _clashes(graph: Graph, node: Node) -> dict[str, str]:
    """Dims of the result along which an input that lacks leading dims would need a slice of its own."""
    found: dict[str, str] = {}
    num_dims = len(node.shape)
    for edge in node.inputs:
        found |= _clash(graph, edge, node, num_dims)
    return found


def _clash(graph: Graph, edge: Edge, node: Node, num_dims: int) -> dict[str, str]:
    shape = graph.shape(edge)
    missing = num_dims - len(shape)
    if not missing or graph.node(edge.node).kind in ("parameter", "constant"):
        return {}
    names = dim_names(node.shape)
    return {
        names[missing + dim]: f"the input {edge} of shape {shape} is aligned with other dims"
        for dim, size in enumerate(shape)
        if size != 1
    }


def _splits(node: Node, refused: Mapping[str, str], *, shape: Shape | None = None) -> Splits:
    names: Iterable[str] = dim_names(node.shape if shape is None else shape)
    reasons = {name: f"its tensor has no {name}" for name in ("channels", "depth", "height", "width")}
    reasons = {name: reason for name, reason in reasons.items() if name not in names} | dict(refused)
    return Splits(
        allowed=tuple(name for name in SPLITS if name not in reasons),
        refused={name: reasons[name] for name in SPLITS if name in reasons},
    )

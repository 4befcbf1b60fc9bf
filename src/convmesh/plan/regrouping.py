"""Which convolution of a network takes regrouped images, and why a network can't take them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from convmesh.errors import ConfigError, ConvMeshError, ModelError, raise_all
from convmesh.geometry.regrouped_convolution import Extent, RegroupedConvolution
from convmesh.geometry.regrouping import ChannelRegrouping
from convmesh.graph import Edge, Graph, Node
from convmesh.graph.kinds import convolution
from convmesh.plan.resolve import hosts

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class RegroupedLayer:
    """The convolution of a network that takes regrouped images.

    Args:
        node: The convolution as it was.
        weight: Name of its weight.
        convolution: How it changes.
    """

    node: Node
    weight: str
    convolution: RegroupedConvolution

    @property
    def attributes(self) -> dict[str, Any]:
        """What it is after, as `convmesh.graph.kinds.convolution` says it."""
        extents = self.convolution.regrouped_extents
        return convolution(
            in_channels=self.convolution.regrouping.num_regrouped,
            out_channels=self.convolution.out_channels,
            kernel=[extent.kernel for extent in extents],
            stride=[extent.stride for extent in extents],
            padding=[(extent.before, extent.after) for extent in extents],
            dilation=[extent.dilation for extent in extents],
            groups=self.convolution.regrouped_groups,
            bias=bool(self.node.attributes["bias"]),
        )

    def to_original(self, arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Whole tensors as those of the network before.

        Args:
            arrays: By name, or by ``slot/name``.

        Returns:
            The same names; only what belongs to the convolution's weight changes.
        """
        return {name: self._to_original(array) if self._means(name) else array for name, array in arrays.items()}

    def to_regrouped(self, arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Whole tensors of the network before as those of the regrouped one.

        Args:
            arrays: By name, or by ``slot/name``; one of another shape stays, for others to refuse.

        Returns:
            The same names.
        """
        return {name: self._to_regrouped(array) if self._means(name) else array for name, array in arrays.items()}

    def _means(self, name: str) -> bool:
        return name.rpartition("/")[2] == self.weight

    def _to_original(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        lifted = _lifted(array, self.convolution.regrouped_shape)
        original = self.convolution.to_original(array.reshape(self.convolution.regrouped_shape))
        return original.reshape(lifted(self.convolution.original_shape))

    def _to_regrouped(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        shape = self.convolution.original_shape
        lifted = _lifted(array, shape)
        if array.shape != lifted(shape):
            return array
        return self.convolution.to_regrouped(array.reshape(shape)).reshape(lifted(self.convolution.regrouped_shape))


def _lifted(array: npt.NDArray[Any], shape: Sequence[int]) -> Any:
    """How a shape is written in an engine's layout: MindSpore keeps a 1-D convolution's weight as that of a 2-D one."""
    extra = (1,) * (array.ndim - len(shape))
    return lambda plain: (*plain[:2], *extra, *plain[2:])


def regrouped_layer(graph: Graph, regrouping: ChannelRegrouping) -> RegroupedLayer:
    """Finds the convolution that takes the images, and how it changes.

    Args:
        graph: The network before.
        regrouping: Of its images.

    Returns:
        The convolution.

    Raises:
        ConfigError: If blocks do not fit its stride or the size of the images.
        ModelError: If something else than one convolution takes the images.
        MistakeList: If several things are wrong.
    """
    raise_all(list(_wrong_use(graph)))
    node = graph.consumers(Edge(graph.inputs[0].name))[0]
    sizes = graph.inputs[0].shape[2:]
    raise_all(list(_wrong_numbers(graph, node, regrouping)))
    attributes = node.attributes
    weight = node.parameter("weight")
    if weight is None:
        raise AssertionError("unreachable: refused above")
    return RegroupedLayer(
        node=node,
        weight=weight.name,
        convolution=RegroupedConvolution(
            regrouping=regrouping,
            out_channels=attributes["out_channels"],
            groups=attributes["groups"],
            extents=tuple(
                Extent(size=size, kernel=kernel, stride=stride, before=before, after=after, dilation=dilation)
                for size, kernel, stride, (before, after), dilation in zip(
                    sizes,
                    attributes["kernel"],
                    attributes["stride"],
                    attributes["padding"],
                    attributes["dilation"],
                    strict=True,
                )
            ),
        ),
    )


def _wrong_use(graph: Graph) -> Iterator[ConvMeshError]:
    """Why no convolution, or no single one, takes the images."""
    if len(graph.inputs) != 1:
        yield ModelError(
            "only the images of a network with one input can be regrouped", got=f"{len(graph.inputs)} inputs"
        )
        return
    edge = Edge(graph.inputs[0].name)
    users = graph.consumers(edge)
    if len(users) != 1 or edge in graph.outputs or users[0].inputs.count(edge) != 1:
        names = [f"{user.name} ({user.kind})" for user in users] + ["the output"] * (edge in graph.outputs)
        yield ModelError(
            "the images can't be regrouped: several operators use them",
            got=", ".join(names),
            expected="one convolution",
            fix=f"Let one convolution take them, or {_LEAVE}",
        )
        return
    (user,) = users
    if user.kind != "convolution" or user.attributes["transposed"]:
        yield ModelError(
            f"the images can't be regrouped: {user.name} takes them, which is no convolution with zero padding",
            got=_described(user),
            fix=f"Let a convolution take them, or {_LEAVE}",
        )
    elif reason := _not_replaceable(graph, user):
        yield ModelError(
            f"the images can't be regrouped: {user.name}, which takes them, can't be replaced: {reason}",
            fix=f"Give it a module of its own, or {_LEAVE}",
        )


_LEAVE = "leave out 'data.channels'"


def _described(node: Node) -> str:
    mode = node.attributes.get("mode")
    if node.kind == "pad":
        return f"padding of mode '{mode}'" if mode != "constant" else "padding in a module of its own"
    return "a transposed convolution" if node.kind == "convolution" else node.kind


def _not_replaceable(graph: Graph, node: Node) -> str | None:
    weight = node.parameter("weight")
    if weight is None or weight.name.rpartition(".")[0] != node.module:
        return "its weight is not a parameter of its own module"
    if node.name not in hosts(graph):
        return "its module is called several times or holds other operators too, or it is written as a function"
    users = [other.name for other in graph if any(entry.name == weight.name for entry in other.parameters)]
    return None if users == [node.name] else f"its weight is used by {', '.join(users)}"


def _wrong_numbers(graph: Graph, node: Node, regrouping: ChannelRegrouping) -> Iterator[ConvMeshError]:
    num_channels = int(node.attributes["in_channels"])
    if num_channels != regrouping.num_channels:
        yield ModelError(
            f"{node.name} takes other channels than the images have",
            got=num_channels,
            expected=regrouping.num_channels,
        )
    block, strides = regrouping.block, tuple(node.attributes["stride"])
    if len(strides) != regrouping.num_dims:
        yield ModelError(
            f"{node.name} has other spatial dims than the regrouping",
            got=len(strides),
            expected=regrouping.num_dims,
        )
        return
    if any(stride % block for stride in strides):
        nearest = math.gcd(block, *strides)
        way = f"Use 'space_to_depth: {nearest}'" if nearest > 1 else "Add zero channels instead, with 'pad_to'"
        yield ConfigError(
            f"blocks do not fit the stride of {node.name}: its outputs would start within them",
            got=f"stride {'x'.join(map(str, strides))}, blocks of {block}",
            expected=f"a stride that is a multiple of {block}",
            fix=way,
        )
    try:
        regrouping.sizes(graph.inputs[0].shape[2:])
    except ConfigError as error:
        yield error

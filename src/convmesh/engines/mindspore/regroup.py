"""Networks that take images with regrouped channels: the first convolution is replaced by one that computes the same.

Its parameter is the weight of the regrouped convolution. Structural zeros in it stay zero, because their gradients are
set to zero as they are made: momentum, both moments of AdamW, weight decay and the moving average of a weight that is
zero and has no gradient are zero, and they add nothing to the norm of the gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from convmesh.engines.mindspore.channel_axis import hide
from convmesh.engines.mindspore.channel_split import split_of
from convmesh.engines.mindspore.layers import convolution_primitive
from convmesh.engines.mindspore.state import named_parameters
from convmesh.engines.mindspore.trace import trace
from convmesh.errors import ModelError
from convmesh.geometry.regrouping import ChannelRegrouping
from convmesh.plan.regrouping import RegroupedLayer, regrouped_layer

_ATTRIBUTE = "convmesh_regrouped"


class KeepZeros(nn.Cell):
    """Passes a weight on; the gradients of its structural zeros are zero, whatever they are: also what is not finite.

    Args:
        is_weight: Of the shape of this rank's part of the weight, false for structural zeros.
    """

    def __init__(self, is_weight: np.ndarray) -> None:
        super().__init__(auto_prefix=False)
        self.is_weight = Tensor(is_weight)
        self.select = ops.Select()
        self.zeros = ops.ZerosLike()

    def construct(self, weight: Tensor) -> Tensor:
        """The weight."""
        return weight

    def bprop(self, weight: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        """The gradient without that of structural zeros."""
        return (self.select(self.is_weight, dout, self.zeros(dout)),)


class RegroupedConvolution(nn.Cell):
    """A convolution of regrouped images.

    Args:
        layer: What it computes.
        old: The cell that it replaces; its bias stays the same parameter.
    """

    def __init__(self, layer: RegroupedLayer, old: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        roles = {entry.role: entry.name.rpartition(".")[2] for entry in layer.node.parameters}
        weight, bias = _regrouped(old._params[roles["weight"]], layer), old._params.get(roles.get("bias", ""))
        for name, parameter in {**old._params, roles["weight"]: weight}.items():
            self.insert_param_to_cell(name, parameter, check_name_contain_dot=False)
        attributes = layer.attributes
        num_lifted = len(weight.shape) - 2 - len(attributes["kernel"])
        convolve = convolution_primitive(attributes, tuple(weight.shape), groups=attributes["groups"])
        hide(self, kernel=weight, shift=bias, convolve=convolve, keep_zeros=zeros_keeper(layer, weight))
        self.is_lifted = num_lifted > 0
        self.has_bias = bias is not None
        self.has_zeros = layer.convolution.num_zeros > 0
        self.add_bias = ops.BiasAdd(data_format="NCDHW" if len(weight.shape) == 5 else "NCHW")
        self.text = f"{attributes['in_channels']} -> {attributes['out_channels']}, regrouped"

    def construct(self, x: Tensor) -> Tensor:
        """Computes what the convolution before computed from the images before.

        Args:
            x: (N, regrouped channels, ...).

        Returns:
            (N, channels, ...).
        """
        if self.is_lifted:
            x = ops.expand_dims(x, 2)
        weight = self.keep_zeros(self.kernel) if self.has_zeros else self.kernel
        y = self.convolve(x, weight)
        if self.has_bias:
            y = self.add_bias(y, self.shift)
        return ops.squeeze(y, 2) if self.is_lifted else y

    def extend_repr(self) -> str:
        """Its channels."""
        return self.text


def regroup_channels(
    network: nn.Cell, regrouping: ChannelRegrouping, *, image_shape: tuple[int, ...], num_samples: int = 2
) -> nn.Cell:
    """Makes a network take regrouped images and compute from them what it computed from the images.

    Args:
        network: Changed in place.
        regrouping: Of the images' channels.
        image_shape: Shape of one image before, channels first.
        num_samples: Samples with which the network is read; any number that it takes.

    Returns:
        The network.

    Raises:
        ConfigError: If the regrouping does not fit the images or the convolution that takes them.
        ModelError: If something else than one convolution takes the images.
        MistakeList: If several things are wrong.
    """
    if regrouped_of(network) is not None:
        raise ModelError("the network takes regrouped images already", fix="Build it anew")
    if split_of(network) is not None:
        raise ModelError("the network is split already", fix="Regroup its channels first")
    layer = regrouped_layer(trace(network, (num_samples, *image_shape)), regrouping)
    cells = dict(network.cells_and_names())
    old = cells[layer.node.module]
    _refuse_more(old, layer)
    cell = RegroupedConvolution(layer, old)
    replace_cell(cells, layer.node.module, cell)
    for other in cells.values():
        other.compile_cache.clear()  # What was compiled before is of the network before.
    hide(network, **{_ATTRIBUTE: layer})
    return network


def regrouped_of(network: nn.Cell) -> RegroupedLayer | None:
    """The layer of a network that takes regrouped images; None if it takes images as they are."""
    layer: RegroupedLayer | None = network.__dict__.get(_ATTRIBUTE)
    return layer


def zeros_keeper(layer: RegroupedLayer, weight: Parameter, *, own: Any = None) -> nn.Cell:
    """What a weight passes through so that its structural zeros stay zero.

    Args:
        layer: The regrouped layer.
        weight: Its weight, or this rank's part of it.
        own: Cuts a whole array into this rank's part; None where the weight is whole.

    Returns:
        A function of the weight.
    """
    is_weight = layer.convolution.is_weight if own is None else own(layer.convolution.is_weight)
    return KeepZeros(is_weight.reshape(weight.shape))


def replace_cell(cells: dict[str, nn.Cell], path: str, cell: nn.Cell) -> None:
    """Puts a cell in the place of another one of a network.

    Args:
        cells: All cells of the network by path; the new one takes its place here too.
        path: Where.
        cell: The new one.
    """
    old = cells[path]
    cell.set_train(old.training)
    where, _, leaf = path.rpartition(".")
    parent = cells[where]
    # Not by setattr, which would give the parameters a second prefix.
    parent._cells[leaf] = cell
    if hasattr(parent, "cell_list"):
        parent.cell_list = list(parent._cells.values())
    cells[path] = cell


def regroup_images(x_NC: Tensor, regrouping: ChannelRegrouping) -> Tensor:
    """Regroups images on their device.

    Args:
        x_NC: (N, C, then the spatial dims), scaled: zero channels hold the number 0.
        regrouping: Of their channels.

    Returns:
        (N, regrouped channels, then the sizes in blocks).

    Raises:
        ConfigError: If the images have other channels, or do not divide into blocks.
    """
    regrouping.check_channels(x_NC.shape[1])
    sizes = regrouping.sizes(x_NC.shape[2:])
    moved = ops.transpose(ops.reshape(x_NC, regrouping.blocked_shape(x_NC.shape)), regrouping.block_order)
    moved = ops.reshape(moved, (x_NC.shape[0], -1, *sizes))
    if regrouping.num_zeros:
        zeros = ops.zeros((moved.shape[0], regrouping.num_zeros, *sizes), moved.dtype)
        moved = ops.concat((moved, zeros), 1)
    return moved if regrouping.order is None else ops.gather(moved, Tensor(list(regrouping.order)), 1)


def _regrouped(weight: Parameter, layer: RegroupedLayer) -> Parameter:
    (value,) = layer.to_regrouped({layer.weight: weight.asnumpy()}).values()
    # Another parameter: one that was assigned to can't take another shape any more.
    return Parameter(Tensor(value, weight.dtype), name=weight.name, requires_grad=weight.requires_grad)


def _refuse_more(old: nn.Cell, layer: RegroupedLayer) -> None:
    own = {entry.name.rpartition(".")[2] for entry in layer.node.parameters}
    surplus = sorted({name.partition(".")[0] for name in named_parameters(old)} - own)
    if surplus:
        raise ModelError(
            f"{layer.node.name} can't take regrouped images: its cell holds more than the convolution needs",
            got=", ".join(surplus),
        )

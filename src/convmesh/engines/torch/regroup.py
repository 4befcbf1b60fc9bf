"""Networks that take images with regrouped channels: the first convolution is replaced by one that computes the same.

Its parameter is the weight of the regrouped convolution. Structural zeros in it stay zero, because their gradients are
set to zero as they are made: momentum, both moments of AdamW, weight decay and the moving average of a weight that is
zero and has no gradient are zero, and they add nothing to the norm of the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convmesh.engines.torch.channel_split import split_of
from convmesh.engines.torch.state import to_array, to_tensor
from convmesh.engines.torch.trace import trace
from convmesh.errors import ModelError
from convmesh.geometry.regrouping import ChannelRegrouping
from convmesh.plan.regrouping import RegroupedLayer, regrouped_layer

_ATTRIBUTE = "_convmesh_regrouped"


class RegroupedConvolution(nn.Module):
    """A convolution of regrouped images.

    Args:
        layer: What it computes.
        old: The module that it replaces; its bias stays the same parameter.
    """

    def __init__(self, layer: RegroupedLayer, old: nn.Module) -> None:
        super().__init__()
        roles = {entry.role: entry.name.rpartition(".")[2] for entry in layer.node.parameters}
        self._weight_name, self._bias_name = roles["weight"], roles.get("bias")
        for name, parameter in old._parameters.items():
            self.register_parameter(name, parameter)
        self.register_parameter(self._weight_name, _regrouped(getattr(old, self._weight_name), layer))
        attributes = layer.attributes
        self._is_weight = torch.from_numpy(layer.convolution.is_weight)
        self._convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[len(attributes["kernel"]) - 1]
        # As F.pad wants it: the last dim first.
        self._padding = tuple(size for pair in reversed(attributes["padding"]) for size in pair)
        self._settings: dict[str, Any] = {name: attributes[name] for name in ("stride", "dilation", "groups")}
        self._text = f"{attributes['in_channels']} -> {attributes['out_channels']}, regrouped"
        self._mask()

    def forward(self, x: Tensor) -> Tensor:
        """Computes what the convolution before computed from the images before.

        Args:
            x: (N, regrouped channels, ...).

        Returns:
            (N, channels, ...).
        """
        bias: Tensor | None = getattr(self, self._bias_name) if self._bias_name else None
        x = F.pad(x, self._padding) if any(self._padding) else x
        y: Tensor = self._convolve(x, getattr(self, self._weight_name), bias, **self._settings)
        return y

    def extra_repr(self) -> str:
        """Its channels."""
        return self._text

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mask()  # Neither a copy nor a pickle of a parameter has its hooks.

    def _mask(self) -> None:
        keep_zeros(getattr(self, self._weight_name), self._is_weight)


def regroup_channels(
    network: nn.Module, regrouping: ChannelRegrouping, *, image_shape: tuple[int, ...], num_samples: int = 2
) -> nn.Module:
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
    path, _, leaf = layer.node.module.rpartition(".")
    old = network.get_submodule(layer.node.module)
    _refuse_more(network, old, layer)
    module = RegroupedConvolution(layer, old)
    module.train(old.training)
    network.get_submodule(path)._modules[leaf] = module
    object.__setattr__(network, _ATTRIBUTE, layer)
    return network


def regrouped_of(network: nn.Module) -> RegroupedLayer | None:
    """The layer of a network that takes regrouped images; None if it takes images as they are."""
    layer: RegroupedLayer | None = getattr(network, _ATTRIBUTE, None)
    return layer


def keep_zeros(weight: nn.Parameter, is_weight: Tensor) -> None:
    """Keeps structural zeros zero: sets their gradients to zero as they are made.

    Args:
        weight: A weight, or this rank's part of one.
        is_weight: Of the same shape, false for structural zeros.
    """
    if weight.requires_grad and not bool(is_weight.all()):
        weight.register_hook(_Masking(~is_weight))


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
    moved = x_NC.reshape(regrouping.blocked_shape(x_NC.shape)).permute(regrouping.block_order)
    moved = moved.reshape(x_NC.shape[0], -1, *sizes)
    if regrouping.num_zeros:
        moved = torch.cat([moved, moved.new_zeros(moved.shape[0], regrouping.num_zeros, *sizes)], dim=1)
    return moved if regrouping.order is None else moved[:, list(regrouping.order)]


class _Masking:
    """Sets the gradients of structural zeros to zero, whatever they are: also what is not finite."""

    def __init__(self, is_zero: Tensor) -> None:
        self._is_zero = is_zero

    def __call__(self, gradient: Tensor) -> Tensor:
        self._is_zero = self._is_zero.to(gradient.device)
        return gradient.masked_fill(self._is_zero, 0)


def _regrouped(weight: nn.Parameter, layer: RegroupedLayer) -> nn.Parameter:
    value = to_tensor(layer.convolution.to_regrouped(to_array(weight))).to(weight)
    if weight.ndim == 4 and not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last):
        value = value.contiguous(memory_format=torch.channels_last)
    return nn.Parameter(value, requires_grad=weight.requires_grad)


def _refuse_more(network: nn.Module, old: nn.Module, layer: RegroupedLayer) -> None:
    own = {entry.name.rpartition(".")[2] for entry in layer.node.parameters}
    surplus = sorted(old.state_dict().keys() - own)
    if surplus:
        raise ModelError(
            f"{layer.node.name} can't take regrouped images: its module holds more than the convolution needs",
            got=", ".join(surplus),
        )
    weight = network.get_parameter(layer.weight)
    names = [name for name, entry in network.named_parameters(remove_duplicate=False) if entry is weight]
    if len(names) > 1:
        raise ModelError(
            f"{layer.node.name} can't take regrouped images: its weight is shared", got=" and ".join(names)
        )

"""The networks that ConvMesh ships, by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from convmesh.errors import ModelError
from convmesh.models.torch.cnn_small import CnnSmall
from convmesh.models.torch.resnet import resnet18, resnet50, resnet152

NETWORKS: Mapping[str, Callable[..., nn.Module]] = {
    "cnn-small": CnnSmall,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "resnet152": resnet152,
}
"""Network name to the function or class that builds it."""


def build(name: str, **args: Any) -> nn.Module:
    """Builds one of our networks with initial weights from PyTorch's global generator.

    Args:
        name: A key of ``NETWORKS``.
        **args: Keyword arguments of the network, for example ``num_classes``, ``num_channels``, ``small_images``.

    Returns:
        The network on the CPU in float32.

    Raises:
        ModelError: If there is no such network, or it has no such argument.
    """
    if name not in NETWORKS:
        raise ModelError(f"there is no network '{name}'", expected=", ".join(NETWORKS), fix=_nearest(name, NETWORKS))
    known = inspect.signature(NETWORKS[name]).parameters
    unknown = [argument for argument in args if argument not in known]
    if unknown:
        raise ModelError(
            f"the network '{name}' has no argument {', '.join(map(repr, unknown))}",
            expected=", ".join(known),
            fix=_nearest(unknown[0], known),
        )
    return NETWORKS[name](**args)


def _nearest(word: str, known: Mapping[str, Any]) -> str | None:
    near = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {near[0]}?" if near else None

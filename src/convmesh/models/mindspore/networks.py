"""The networks that ConvMesh ships, by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mindspore import nn

from convmesh.errors import ModelError
from convmesh.models.mindspore.cnn_small import CnnSmall
from convmesh.models.mindspore.resnet import resnet18, resnet50, resnet152

NETWORKS: Mapping[str, Callable[..., nn.Cell]] = {
    "cnn-small": CnnSmall,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "resnet152": resnet152,
}
"""Network name to the function or class that builds it."""


def build(name: str, *, seed: int = 0, **args: Any) -> nn.Cell:
    """Builds one of our networks.

    Args:
        name: A key of ``NETWORKS``.
        seed: Seed of the initial weights; nothing else decides them.
        **args: Keyword arguments of the network, for example ``num_classes``, ``num_channels``, ``small_images``.

    Returns:
        The network in float32.

    Raises:
        ModelError: If there is no such network, or it has no such argument.
    """
    if name not in NETWORKS:
        raise ModelError(f"there is no network '{name}'", expected=", ".join(NETWORKS), fix=_nearest(name, NETWORKS))
    known = {key: rule for key, rule in inspect.signature(NETWORKS[name]).parameters.items() if key != "seed"}
    unknown = [argument for argument in args if argument not in known]
    if unknown:
        raise ModelError(
            f"the network '{name}' has no argument {', '.join(map(repr, unknown))}",
            expected=", ".join(known),
            fix=_nearest(unknown[0], known),
        )
    return NETWORKS[name](seed=seed, **args)


def _nearest(word: str, known: Mapping[str, Any]) -> str | None:
    near = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {near[0]}?" if near else None

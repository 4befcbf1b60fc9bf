"""Reading an ``nn.Module`` into a graph: by ``torch.export``, and piece by piece by ``torch.fx`` where that fails.

Nothing is computed with the network's weights, and its buffers stay as they are.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import traceback

from convmesh.engines.torch.calls import Numbering
from convmesh.engines.torch.trace_export import TracedNetwork, read_export
from convmesh.engines.torch.trace_pieces import read_pieces
from convmesh.errors import ConvMeshError, ModelError, brief
from convmesh.graph import Graph
from convmesh.graph.canonical import build_graph

Example = Sequence[int] | Any


def trace(network: nn.Module, example: Example) -> Graph:
    """Reads a network as it is in training.

    Args:
        network: The network, on any device; it is not changed.
        example: One batch of its input: a shape such as (8, 3, 32, 32), a tensor or an array.

    Returns:
        The graph.

    Raises:
        ModelError: If neither way can read it; what stopped it is told.
    """
    x = _as_tensor(network, example)
    with _training(network), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = _read(network, x)
    return build_graph(traced.operators, traced.outputs)


def _read(network: nn.Module, x: Tensor) -> TracedNetwork:
    try:
        with traceback.preserve_node_meta(), Numbering():
            program = torch.export.export(network, (x,), strict=False)
    except Exception as first:
        try:
            return read_pieces(network, x)
        except ConvMeshError:
            raise
        except Exception as second:
            raise ModelError(
                f"the network {type(network).__name__} can't be read for input of shape {tuple(x.shape)}",
                got=f"torch.export: {brief(first)}; torch.fx: {brief(second)}",
                fix="Make forward take one tensor and not depend on its values",
            ) from first
    return read_export(program, network)


@contextlib.contextmanager
def _training(network: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in network.modules()}
    network.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _as_tensor(network: nn.Module, example: Example) -> Tensor:
    like = next(iter(network.parameters()), torch.zeros(()))
    if isinstance(example, Tensor):
        return example.detach().to(like.device)
    if isinstance(example, list | tuple | torch.Size) and all(isinstance(size, int) for size in example):
        return torch.zeros(tuple(example), dtype=like.dtype, device=like.device)
    try:
        return torch.as_tensor(example).to(like.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            "the example is no batch of images", got=brief(error), expected="a shape, a tensor or an array"
        ) from None

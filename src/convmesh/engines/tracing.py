"""Reading a network of either engine into a graph."""

from __future__ import annotations

import importlib
from typing import Any

from convmesh.engines import engine_of
from convmesh.graph import Graph


def trace(network: object, example: Any) -> Graph:
    """Reads a network as it is in training.

    Args:
        network: An ``nn.Cell`` or an ``nn.Module``; it is not changed.
        example: One batch of its input: a shape such as ``(8, 3, 32, 32)``, a tensor or an array.

    Returns:
        The graph, equal for the same network on either engine.

    Raises:
        EngineError: If the network is of no known engine.
        ModelError: If the network can't be read; what stopped it is told.
    """
    module = importlib.import_module(f"convmesh.engines.{engine_of(network)}.trace")
    graph: Graph = module.trace(network, example)
    return graph

"""The graph of a network, written beside its plan, so that ranks need not read the network again.

Whoever starts a run has read the network already. PyTorch's own reading loads what takes a rank 100 MiB until it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from convmesh.errors import ModelError
from convmesh.graph import Graph
from convmesh.graph.graph import Shape
from convmesh.plan.network import fingerprint
from convmesh.plan.plan import Plan


def beside(path: str | Path) -> Path:
    """Where the graph of a plan file is."""
    return Path(path).with_suffix(".graph.json")


def graph_beside(path: str | Path, plan: Plan, shapes: Mapping[str, Shape], *, num_samples: int) -> Graph | None:
    """The graph beside a plan, if it is of this network.

    Args:
        path: The plan's file.
        plan: Read from it.
        shapes: Of all parameters and buffers of the network, by name.
        num_samples: Samples that the graph shall be for.

    Returns:
        The graph; None if there is none, or another network's or for other samples: then the network must be read.
    """
    try:
        graph = Graph.from_json(beside(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ModelError):
        return None
    if plan.network is None or fingerprint(graph) != plan.network.fingerprint:
        return None
    if [source.shape[0] for source in graph.inputs] != [num_samples]:
        return None
    own = {entry.name: entry.shape for entry in graph.parameters}
    return graph if all(shapes.get(name) == shape for name, shape in own.items()) else None

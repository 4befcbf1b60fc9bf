"""In which type each operator of a run computes, as the engines' mixed precision decides it.

| engine | convolution, dense | norms, softmax | the others |
|---|---|---|---|
| PyTorch on CPU | the half type | as their input | as the widest of their inputs |
| PyTorch on CUDA | the half type | batch and instance norm as their input, the others float32 | as on CPU |
| MindSpore on CPU | the half type | float32 | float32 |
| MindSpore elsewhere | the half type | float32 | as the widest of their inputs |

Sources: PyTorch's lists of autocast operators (https://docs.pytorch.org/docs/stable/amp.html); for MindSpore
`convmesh.engines.mindspore.objective.compute_in_half`. Parameters, their gradients and optimizer state stay float32.
"""

from __future__ import annotations

import dataclasses

from convmesh.graph import Graph, Node
from convmesh.graph.graph import DTYPE_BYTES, SOURCES
from convmesh.plan.weighted import WEIGHTED
from convmesh.planner.prediction import Training

_IN_FLOAT32 = {
    "torch": ("group_norm", "layer_norm", "softmax"),
    "mindspore": ("batch_norm", "group_norm", "instance_norm", "layer_norm", "softmax"),
}


def with_precision(graph: Graph, training: Training, *, device_kind: str) -> Graph:
    """The graph with the type in which each operator computes and hands on its result.

    Args:
        graph: The network as traced.
        training: Says which type convolutions and dense layers compute in.
        device_kind: ``"cpu"``, ``"cuda"`` or ``"ascend"``.

    Returns:
        The same graph in float32, or one with other types.
    """
    if training.compute_dtype == "float32":
        return graph
    dtypes: dict[str, str] = {}
    for node in graph:
        dtypes[node.name] = _dtype(node, training, device_kind, dtypes)
    if all(node.dtype == dtypes[node.name] for node in graph):
        return graph
    nodes = tuple(dataclasses.replace(node, dtype=dtypes[node.name]) for node in graph)
    return Graph(nodes, outputs=graph.outputs)


def _dtype(node: Node, training: Training, device_kind: str, dtypes: dict[str, str]) -> str:
    if node.kind in SOURCES:
        return node.dtype
    if node.kind in WEIGHTED:
        return training.compute_dtype
    on_cpu = device_kind == "cpu"
    if training.engine == "mindspore" and on_cpu:
        return "float32"
    if node.kind in _IN_FLOAT32[training.engine] and (training.engine == "mindspore" or not on_cpu):
        return "float32"
    inputs = [dtypes[edge.node] for edge in node.inputs]
    return max(inputs, key=DTYPE_BYTES.__getitem__, default=node.dtype)

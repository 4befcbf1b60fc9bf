"""Graphs, clusters and candidates that the tests of the planner share."""

from __future__ import annotations

from typing import Any

from convmesh.graph import Edge, Graph, Node, Parameter, kinds
from convmesh.graph.rules import output_shapes
from convmesh.mesh import Mesh
from convmesh.plan import ResolvedPlan, resolve
from convmesh.plan.by_rule import plan_by_rule
from convmesh.planner.cluster import Cluster
from convmesh.planner.cluster_file import parse_cluster
from convmesh.planner.prediction import Candidate, Training


class Network:
    """Writes a network operator by operator; each is a module of its own."""

    def __init__(self, *, samples: int = 4, channels: int = 3, size: int = 16) -> None:
        self.nodes = [Node(name="input", kind="input", output_shapes=((samples, channels, size, size),))]

    def add(
        self, kind: str, name: str, *sources: str, parameters: tuple[Parameter, ...] = (), **attributes: Any
    ) -> str:
        by_name = {node.name: node for node in self.nodes}
        shapes = output_shapes(kind, attributes, [by_name[source].shape for source in sources])
        assert shapes is not None
        self.nodes.append(
            Node(
                name=name,
                kind=kind,
                attributes=attributes,
                inputs=tuple(map(Edge, sources)),
                output_shapes=shapes,
                parameters=parameters,
                module=name,
            )
        )
        return name

    def channels(self, name: str) -> int:
        return next(node for node in self.nodes if node.name == name).shape[1]

    def convolution(self, name: str, source: str, out: int, *, kernel: int = 3, stride: int = 1) -> str:
        pad = (kernel // 2, kernel // 2)
        attributes = kinds.convolution(
            in_channels=self.channels(source), out_channels=out, kernel=(kernel,) * 2, stride=stride, padding=(pad, pad)
        )
        weight = Parameter(f"{name}.weight", kinds.convolution_weight(attributes), "weight")
        return self.add("convolution", name, source, parameters=(weight,), **attributes)

    def norm(self, name: str, source: str) -> str:
        shape = (self.channels(source),)
        roles = (("weight", True), ("bias", True), ("running_mean", False), ("running_var", False))
        parameters = tuple(Parameter(f"{name}.{role}", shape, role, trainable) for role, trainable in roles)
        return self.add("batch_norm", name, source, parameters=parameters, momentum=0.1, eps=1e-5, statistics="batch")

    def unit(self, name: str, source: str, out: int, *, kernel: int = 3, stride: int = 1) -> str:
        made = self.norm(f"{name}.bn", self.convolution(f"{name}.conv", source, out, kernel=kernel, stride=stride))
        return self.add("elementwise", f"{name}.relu", made, function="relu")

    def head(self, source: str, classes: int = 10) -> Graph:
        width = self.channels(source)
        pooled = self.add("adaptive_pool", "pool", source, function="mean", output_size=(1, 1))
        flat = self.add("flatten", "flatten", pooled, start_dim=1, end_dim=3)
        parameters = (
            Parameter("fc.weight", (classes, width), "weight"),
            Parameter("fc.bias", (classes,), "bias"),
        )
        self.add("dense", "fc", flat, parameters=parameters, in_features=width, out_features=classes, bias=True)
        return Graph(tuple(self.nodes), outputs=(Edge("fc"),))


def plain_network(*, samples: int = 4, width: int = 16, depth: int = 4, size: int = 16) -> Graph:
    """A stem and units of convolution, norm and ReLU."""
    network = Network(samples=samples, size=size)
    made = network.unit("stem", "input", width)
    for number in range(depth):
        made = network.unit(f"unit{number}", made, width)
    return network.head(made)


def residual_network(*, samples: int = 4, width: int = 16, depth: int = 3, size: int = 16) -> Graph:
    """A stem and residual blocks of two convolutions."""
    network = Network(samples=samples, size=size)
    made = network.unit("stem", "input", width)
    for number in range(depth):
        inner = network.unit(f"block{number}.first", made, width)
        inner = network.norm(f"block{number}.bn", network.convolution(f"block{number}.second", inner, width))
        summed = network.add("add", f"block{number}.add", inner, made)
        made = network.add("elementwise", f"block{number}.relu", summed, function="relu")
    return network.head(made)


def resnet(depths: tuple[int, ...], *, samples: int = 2, size: int = 224) -> Graph:
    """A residual network of bottleneck blocks: (3, 4, 6, 3) is ResNet-50, (3, 8, 36, 3) ResNet-152."""
    network = Network(samples=samples, size=size)
    made = network.unit("stem", "input", 64, kernel=7, stride=2)
    pads = ((1, 1), (1, 1))
    made = network.add("max_pool", "maxpool", made, **kinds.max_pool(kernel=(3, 3), stride=2, padding=pads))
    for stage, depth in enumerate(depths):
        for number in range(depth):
            made = _bottleneck(
                network, f"layer{stage + 1}.{number}", made, 64 * 2**stage, 2 if stage and not number else 1
            )
    return network.head(made, classes=1000)


def _bottleneck(network: Network, name: str, source: str, width: int, stride: int) -> str:
    inner = network.unit(f"{name}.1", source, width, kernel=1)
    inner = network.unit(f"{name}.2", inner, width, stride=stride)
    inner = network.norm(f"{name}.bn", network.convolution(f"{name}.3", inner, 4 * width, kernel=1))
    if network.channels(source) != 4 * width:
        source = network.convolution(f"{name}.down", source, 4 * width, kernel=1, stride=stride)
        source = network.norm(f"{name}.down_bn", source)
    summed = network.add("add", f"{name}.add", inner, source)
    return network.add("elementwise", f"{name}.relu", summed, function="relu")


def cluster_of(*, ranks_per_node: int = 8, nodes: int = 1, **changes: Any) -> Cluster:
    """A cluster with round numbers: 1 TFLOP/s, 100 GB/s of memory, 10 GB/s inside and 1 GB/s between nodes."""
    kinds_of_collectives = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")

    def link(kind: str, rate: float) -> dict[str, Any]:
        return {"kind": kind, "num_ranks": 2, "alpha_seconds": 1e-5, "seconds_per_byte": 1 / rate}

    return parse_cluster(
        {
            "name": "round",
            "sources": {"measured": "made up for tests"},
            "device": {"name": "round", "memory_bytes": "16GiB", "fixed_bytes": "100MiB", "workspace_share": 0.5},
            "nodes": nodes,
            "devices_per_node": ranks_per_node,
            "compute": [
                {"operator": "convolution", "points": [{"flops": 1e9, "seconds": 1e-3}]},
                {"operator": "copy", "points": [{"num_bytes": 1e8, "seconds": 1e-3}]},
            ],
            "links": {
                "inside": [link(kind, 1e10) for kind in kinds_of_collectives],
                "between": [link(kind, 1e9) for kind in kinds_of_collectives],
            },
            "overlap": 0.5,
            **changes,
        },
        where="a test",
    )


def resolved_by_rule(graph: Graph, **axes: int) -> ResolvedPlan:
    """The plan by rule for a mesh, every layer split however small."""
    return resolve(graph, plan_by_rule(graph, Mesh(axes), min_multiply_adds=0))


def candidate_of(graph: Graph, *, global_batch: int = 32, axes: dict[str, int] | None = None, **rest: Any) -> Candidate:
    """A candidate by rule."""
    training = rest.pop("training", Training(global_batch=global_batch))
    return Candidate(resolved=resolved_by_rule(graph, **(axes or {"data": 2})), training=training, **rest)

"""Small graphs made operator by operator, and networks as graphs without any framework."""

from __future__ import annotations

from typing import Any

from convmesh.graph import Edge, Graph, Node, Parameter, kinds


class Builder:
    """Makes a graph operator by operator; every operator is a module of its own unless it is told otherwise."""

    def __init__(self, channels: int = 3, *, samples: int = 2, size: int = 8) -> None:
        self.nodes = [Node(name="input", kind="input", output_shapes=((samples, channels, size, size),))]

    def add(self, name: str, kind: str, inputs: Any, shape: Any, module: str | None = None, **rest: Any) -> str:
        sources = (inputs,) if isinstance(inputs, str) else inputs
        self.nodes.append(
            Node(
                name=name,
                kind=kind,
                inputs=tuple(Edge(source) for source in sources),
                output_shapes=(tuple(shape),),
                module=name if module is None else module,
                **rest,
            )
        )
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return next(node for node in self.nodes if node.name == name).shape

    def convolution(self, name: str, source: str, out: int, *, groups: int = 1, module: str | None = None) -> str:
        samples, num_in, *size = self.shape(source)
        attributes = kinds.convolution(
            in_channels=num_in, out_channels=out, kernel=(3, 3), padding=((1, 1), (1, 1)), groups=groups, bias=True
        )
        parameters = (
            Parameter(f"{name}.weight", (out, num_in // groups, 3, 3), role="weight"),
            Parameter(f"{name}.bias", (out,), role="bias"),
        )
        return self.add(
            name, "convolution", source, (samples, out, *size), module, attributes=attributes, parameters=parameters
        )

    def relu(self, name: str, source: str, module: str | None = None) -> str:
        return self.add(name, "elementwise", source, self.shape(source), module, attributes={"function": "relu"})

    def batch_norm(self, name: str, source: str) -> str:
        width = self.shape(source)[1]
        parameters = tuple(
            Parameter(f"{name}.{part}", (width,), role=role, trainable=role in ("weight", "bias"))
            for part, role in (
                ("weight", "weight"), ("bias", "bias"), ("running_mean", "running_mean"), ("running_var", "running_var")
            )
        )  # fmt: skip
        attributes = {"statistics": "batch", "epsilon": 1e-5, "momentum": 0.1}
        return self.add(name, "batch_norm", source, self.shape(source), attributes=attributes, parameters=parameters)

    def concat(self, name: str, sources: tuple[str, ...]) -> str:
        samples, _, *size = self.shape(sources[0])
        width = sum(self.shape(source)[1] for source in sources)
        return self.add(name, "concat", sources, (samples, width, *size), module="", attributes={"dim": 1})

    def sum(self, name: str, sources: tuple[str, str]) -> str:
        return self.add(name, "add", sources, self.shape(sources[0]), module="")

    def dense_head(self, source: str, classes: int = 10) -> str:
        samples, width, *_ = self.shape(source)
        pool = self.add(
            "pool",
            "adaptive_pool",
            source,
            (samples, width, 1, 1),
            attributes={"function": "mean", "output_size": (1, 1)},
        )
        flat = self.add(
            "flatten", "flatten", pool, (samples, width), module="", attributes={"start_dim": 1, "end_dim": 3}
        )
        attributes = {"in_features": width, "out_features": classes, "bias": True}
        parameters = (
            Parameter("fc.weight", (classes, width), role="weight"),
            Parameter("fc.bias", (classes,), role="bias"),
        )
        return self.add("fc", "dense", flat, (samples, classes), attributes=attributes, parameters=parameters)

    def graph(self, *outputs: str) -> Graph:
        return Graph(tuple(self.nodes), outputs=tuple(Edge(name) for name in outputs))


def residual(num_blocks: int = 2, *, width: int = 16, samples: int = 4, size: int = 8) -> Graph:
    """A small residual network; its last block doubles the channels."""
    build = Builder(samples=samples, size=size)
    x = build.relu("relu0", build.batch_norm("bn0", build.convolution("conv0", "input", width)))
    for number in range(num_blocks):
        block, out = f"block{number}", width * (2 if number == num_blocks - 1 else 1)
        y = build.batch_norm(f"{block}.bn1", build.convolution(f"{block}.conv1", x, out))
        y = build.convolution(f"{block}.conv2", build.relu(f"{block}.relu1", y, module=block), out)
        y = build.batch_norm(f"{block}.bn2", y)
        shortcut = x if out == build.shape(x)[1] else build.convolution(f"{block}.down", x, out)
        x = build.relu(f"{block}.relu2", build.sum(f"{block}.add", (y, shortcut)), module=block)
    return build.graph(build.dense_head(x))


def dense_net(num_layers: int = 3, *, growth: int = 4, samples: int = 4, size: int = 8, num_blocks: int = 1) -> Graph:
    """DenseNet's way: each layer reads all before it in its block (https://arxiv.org/abs/1608.06993)."""
    build = Builder(samples=samples, size=size)
    x = build.convolution("conv0", "input", 2 * growth)
    for block in range(num_blocks):
        features = [x]
        for number in range(num_layers):
            name = f"block{block}.layer{number}"
            y = features[0] if number == 0 else build.concat(f"{name}.concat", tuple(features))
            y = build.relu(f"{name}.relu1", build.batch_norm(f"{name}.bn1", y))
            y = build.convolution(f"{name}.conv1", y, 4 * growth)
            y = build.relu(f"{name}.relu2", build.batch_norm(f"{name}.bn2", y))
            features.append(build.convolution(f"{name}.conv2", y, growth))
        joined = build.concat(f"block{block}.concat", tuple(features))
        x = build.convolution(f"transition{block}", joined, build.shape(joined)[1] // 2)
    return build.graph(build.dense_head(x))


def mobile(*, samples: int = 4) -> Graph:
    """Depthwise and grouped convolutions, whose groups don't divide evenly, with a shortcut."""
    build = Builder(samples=samples)
    x = build.relu("relu0", build.convolution("conv0", "input", 12))
    y = build.relu("relu1", build.convolution("depthwise", x, 12, groups=12))
    y = build.convolution("grouped", build.convolution("project", y, 18), 12, groups=3)
    return build.graph(build.dense_head(build.sum("add", (x, y))))


GRAPHS = {"residual": residual, "dense_net": dense_net, "mobile": mobile}
"""Name to a function that makes a graph."""

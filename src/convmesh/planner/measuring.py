"""What is worth measuring: operators for the curves of all classes, and those of one network on meshes of N ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

from convmesh.errors import ConvMeshError
from convmesh.graph import Edge, Graph, Node, Parameter, kinds
from convmesh.graph.graph import BUFFERS, DTYPE_BYTES, Shape
from convmesh.graph.resize import with_samples
from convmesh.mesh import Mesh
from convmesh.plan import CHANNEL, Choice, Entry, Plan, ResolvedPlan, resolve
from convmesh.plan.by_rule import plan_by_rule
from convmesh.plan.resolve import hosts
from convmesh.plan.weighted import WEIGHTED, refusals
from convmesh.planner.signature import FREE, Signature, signatures

MOST_OPERATORS, MOST_BYTES = 48, 2**29
"""Of one chunk that is measured at once: its tensors are held together, as in a training step."""

_SIDES = (8, 16, 32)
_NORM = {"momentum": 0.1, "eps": 1e-5, "statistics": "batch"}
_SPLITS = ("out_channels", "in_channels", "groups")


def meshes_of(num_ranks: int) -> tuple[Mesh, ...]:
    """All meshes of data and channel axis with so many ranks, the longest data axis first."""
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    return tuple(Mesh({"data": num_ranks // size, CHANNEL: size}) for size in divisors)


def network_signatures(
    graph: Graph, *, num_ranks: int, global_batch: int, accumulations: Sequence[int] = (1, 2, 4)
) -> list[Signature]:
    """The distinct operators of a network at the shapes at which the ranks of any mesh may compute them.

    Args:
        graph: The network, with any number of samples.
        num_ranks: Ranks.
        global_batch: Samples per update.
        accumulations: Numbers of micro-batches per update, the most wanted first.

    Returns:
        The operators, the most wanted first; those that compute nothing are left out.
    """
    plans = [(mesh.size("data"), [*_resolved(graph, mesh)]) for mesh in meshes_of(num_ranks)]
    found: dict[str, Signature] = {}
    for accumulation in accumulations:
        for num_shards, resolved in plans:
            local = with_samples(graph, math.ceil(global_batch / (num_shards * accumulation)))
            for plan in resolved:
                for signature in signatures(dataclasses.replace(plan, graph=local)):
                    if signature.kind not in FREE:
                        found.setdefault(signature.text, signature)
    return list(found.values())


def _resolved(graph: Graph, mesh: Mesh) -> Iterator[ResolvedPlan]:
    for plan in _plans(graph, mesh):
        # One way to split may not be possible for all operators at once.
        with contextlib.suppress(ConvMeshError):
            yield resolve(graph, plan)


def _plans(graph: Graph, mesh: Mesh) -> Iterator[Plan]:
    """Everything whole, what the rule says, and each way to split for all operators that can be split so."""
    yield Plan(mesh=mesh)
    if mesh.size(CHANNEL) == 1:
        return
    yield plan_by_rule(graph, mesh)
    replaceable = hosts(graph)
    layers = [node for node in graph if node.kind in WEIGHTED and node.name in replaceable]
    for split in _SPLITS:
        choice = Choice(split=split)  # type: ignore[arg-type]
        entries = [
            Entry(pattern=node.name, axes={CHANNEL: choice})
            for node in layers
            if not _refuses(graph, node, choice, mesh)
        ]
        if entries:
            yield Plan(mesh=mesh, entries=tuple(entries))


def _refuses(graph: Graph, node: Node, choice: Choice, mesh: Mesh) -> bool:
    return bool(refusals(graph, node, choice, num_ranks=mesh.size(CHANNEL)))


def chunks_of(found: Sequence[Signature]) -> list[list[int]]:
    """Places of signatures, in order, in chunks that are measured at once."""
    chunks: list[list[int]] = []
    filled = 0
    for place, signature in enumerate(found):
        size = _held_bytes(signature)
        if not chunks or len(chunks[-1]) >= MOST_OPERATORS or filled + size > MOST_BYTES:
            chunks.append([])
            filled = 0
        chunks[-1].append(place)
        filled += size
    return chunks


def _held_bytes(signature: Signature) -> int:
    shapes = [*signature.input_shapes, *signature.output_shapes, *(entry.shape for entry in signature.parameters)]
    return sum(map(math.prod, shapes)) * DTYPE_BYTES[signature.dtype]


def curve_signatures() -> list[Signature]:
    """Operators of every class at several sizes, for networks that nobody has measured."""
    found: list[Signature] = []
    for side in _SIDES:
        for num_channels in (32, 128):
            found += [_convolution(num_channels, side, kernel) for kernel in (3, 1)]
        found += [
            _convolution(64, side, 3, groups=8),
            _convolution(64, side, 3, groups=64),
            _convolution(32, side, 2, transposed=True),
            _dense(8, 16 * side, 512),
            *_moving((8, 64, side, side)),
        ]
    return found


def _convolution(num_channels: int, side: int, kernel: int, *, groups: int = 1, transposed: bool = False) -> Signature:
    """Of 4 images, with as many channels out as in; a transposed one doubles their size."""
    pad, stride = (0, 2) if transposed else (kernel // 2, 1)
    attributes = kinds.convolution(
        in_channels=num_channels,
        out_channels=num_channels,
        kernel=(kernel, kernel),
        stride=stride,
        padding=((pad, pad), (pad, pad)),
        groups=groups,
        transposed=transposed,
    )
    weight = Parameter("weight", kinds.convolution_weight(attributes), "weight")
    shape, output = (4, num_channels, side, side), (4, num_channels, side * stride, side * stride)
    return _signature("convolution", attributes, [shape], output, weight)


def _dense(num_samples: int, num_in: int, num_out: int) -> Signature:
    attributes = {"in_features": num_in, "out_features": num_out, "bias": False}
    weight = Parameter("weight", (num_out, num_in), "weight")
    return _signature("dense", attributes, [(num_samples, num_in)], (num_samples, num_out), weight)


def _moving(shape: Shape) -> list[Signature]:
    """Operators that pass over memory, on tensors of one shape."""
    channels, half = shape[1], (*shape[:2], shape[2] // 2, shape[3] // 2)
    pool = kinds.max_pool(kernel=(2, 2), stride=2, padding=((0, 0), (0, 0)))
    joined = (shape[0], 2 * channels, *shape[2:])
    return [
        _signature("batch_norm", _NORM, [shape], shape, *_norm_parameters(channels)),
        _signature("max_pool", pool, [shape], half),
        _signature("elementwise", {"function": "relu"}, [shape], shape),
        _signature("concat", {"dim": 1}, [shape, shape], joined),
    ]


def _signature(
    kind: str, attributes: kinds.Attributes, inputs: Sequence[Shape], output: Shape, *parameters: Parameter
) -> Signature:
    return Signature(
        kind=kind,
        attributes=tuple(sorted(attributes.items())),
        input_shapes=tuple(inputs),
        output_shapes=(output,),
        parameters=parameters,
        gradients=(True,) * len(inputs),
    )


def probe_graph(*, num_layers: int, num_channels: int, num_samples: int, side: int) -> Graph:
    """Convolutions, norms and activations, a global pool and a classifier of two classes: a network of known tensors.

    Args:
        num_layers: Convolutions.
        num_channels: Channels of each.
        num_samples: Samples.
        side: Pixels of an image's side.

    Returns:
        The graph.
    """
    image, pooled = (num_samples, num_channels, side, side), (num_samples, num_channels, 1, 1)
    nodes = [Node(name="x", kind="input", output_shapes=((num_samples, 3, side, side),))]

    def add(kind: str, shape: Shape, attributes: kinds.Attributes, parameters: Sequence[Parameter] = ()) -> None:
        name = f"{len(nodes)}"
        own = tuple(dataclasses.replace(entry, name=f"{name}.{entry.name}") for entry in parameters)
        before = Edge(nodes[-1].name)
        nodes.append(
            Node(name=name, kind=kind, attributes=attributes, inputs=(before,), output_shapes=(shape,), parameters=own)
        )

    for number in range(num_layers):
        attributes = kinds.convolution(
            in_channels=num_channels if number else 3,
            out_channels=num_channels,
            kernel=(3, 3),
            padding=((1, 1), (1, 1)),
        )
        add("convolution", image, attributes, [Parameter("weight", kinds.convolution_weight(attributes), "weight")])
        add("batch_norm", image, _NORM, _norm_parameters(num_channels))
        add("elementwise", image, {"function": "relu"})
    add("adaptive_pool", pooled, {"function": "mean", "output_size": (1, 1)})
    add("flatten", pooled[:2], {"start_dim": 1, "end_dim": 3})
    dense = {"in_features": num_channels, "out_features": 2, "bias": True}
    weights = [Parameter("weight", (2, num_channels), "weight"), Parameter("bias", (2,), "bias")]
    add("dense", (num_samples, 2), dense, weights)
    return Graph(tuple(nodes), outputs=(Edge(nodes[-1].name),))


def _norm_parameters(num_channels: int) -> list[Parameter]:
    own = [Parameter(role, (num_channels,), role) for role in ("weight", "bias")]
    return own + [Parameter(role, (num_channels,), role, trainable=False) for role in ("running_mean", "running_var")]


def update_shapes(graph: Graph | None) -> list[list[Shape]]:
    """Shapes of parameters whose update is measured: all of a network, and a half and a quarter of each.

    Args:
        graph: The network; without one, parameters as residual networks have them.

    Returns:
        Lists of shapes.
    """
    if graph is not None:
        shapes = [entry.shape for entry in graph.parameters if entry.trainable and entry.role not in BUFFERS]
    else:
        shapes = [(64 * 2**stage, 64 * 2**stage, 3, 3) for stage in range(4) for _ in range(2)]
        shapes += [(64 * 2**stage,) for stage in range(4) for _ in range(4)]
    return [[(max(1, shape[0] // part), *shape[1:]) for shape in shapes] for part in (1, 2, 4)]

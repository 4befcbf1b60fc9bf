"""One convolution split by PyTorch's DTensor and by ConvMesh, each against one device; runs on every rank.

Legend: N samples, C channels, H rows, W columns.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from benchmarks.contenders.convolution import Answer, Sizes, SplitConvolution
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_module, distribute_tensor

import convmesh
from convmesh.engines.contract import Engine, World

Named = tuple[str, Tensor | None]
"""A whole tensor, or None where it should be, by name: "output", "input gradient" or "weight gradient"."""

Found = dict[str, Tensor | None]

_DIMS: dict[str, tuple[Placement, Placement]] = {
    "samples": (Shard(0), Replicate()),
    "width": (Shard(3), Replicate()),
    "height": (Shard(2), Replicate()),
    "in_channels": (Shard(1), Shard(1)),
    "out_channels": (Replicate(), Shard(0)),
    "groups": (Shard(1), Shard(0)),
}
"""Placement of input and weight."""


def compare(engine: Engine, world: World, *, peer: str, split: SplitConvolution, sizes: Sizes) -> Answer:
    """Runs a convolution through one peer and on one device: a forward, and a backward from half the output's square.

    Returns:
        What this rank saw.
    """
    torch.manual_seed(0)
    channels = sizes.num_channels
    network = Alone(
        nn.Conv2d(channels, channels, split.kernel, split.stride, split.padding, groups=split.groups, bias=False)
    ).double()
    x_NCHW = torch.randn(sizes.num_samples, channels, sizes.side, sizes.side, dtype=torch.float64)
    alone, x = copy.deepcopy(network), x_NCHW.clone().requires_grad_()
    y = alone(x)
    (y.square().sum() / 2).backward()
    right = {"output": y.detach(), "input gradient": x.grad, "weight gradient": alone.conv.weight.grad}
    tensors: Found = {}
    try:
        for name, tensor in {"DTensor": _dtensor, "ConvMesh": _convmesh}[peer](world, split, network, x_NCHW):
            tensors[name] = tensor
    except Exception as error:  # Whatever a peer raises, it has refused.
        refusal = first_sentence(str(error)) or type(error).__name__
    else:
        refusal = ""
    return Answer({name: _difference(tensor, right[name]) for name, tensor in tensors.items()}, refusal)


class Alone(nn.Module):
    """A network of one convolution."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """The convolution."""
        y: Tensor = self.conv(x_NCHW)
        return y


def first_sentence(text: str) -> str:
    """The text up to its first full stop before a space, on one line."""
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def _dtensor(world: World, split: SplitConvolution, network: Alone, x_NCHW: Tensor) -> Iterator[Named]:
    of_input, of_weight = _DIMS[split.split]

    def place(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter, mesh, [of_weight])))

    mesh = init_device_mesh("cpu", (world.num_ranks,))
    network = distribute_module(network, mesh, place)
    x = distribute_tensor(x_NCHW, mesh, [of_input]).requires_grad_()
    y = network(x)
    yield "output", y.detach().full_tensor()
    (y.square().sum() / 2).backward()
    for name, tensor in (("input gradient", x), ("weight gradient", network.conv.weight)):
        yield name, None if tensor.grad is None else tensor.grad.full_tensor()


def _convmesh(world: World, split: SplitConvolution, network: Alone, x_NCHW: Tensor) -> Iterator[Named]:
    axis = {"samples": "data", "width": "width", "height": "height"}.get(split.split, "channel")
    mesh = convmesh.Mesh({axis: world.num_ranks})
    plan = convmesh.plan_by_rule(convmesh.trace(network, tuple(x_NCHW.shape)), mesh)
    content = yaml.safe_load(convmesh.dump_plan(plan))
    # Samples are divided by the data axis alone; everything else a plan says of each operator.
    content["operators"] = {} if axis == "data" else {"conv": {axis: split.split}}
    path = Path("plan.yaml")
    if world.rank == 0:
        path.write_text(yaml.safe_dump(content))
    dist.barrier()
    network = convmesh.parallelize(network, convmesh.load_plan(path))
    num_own = len(x_NCHW) // mesh.size("data")
    first = mesh.coordinate(world.rank).get("data", 0) * num_own
    x = x_NCHW[first : first + num_own].clone().requires_grad_()
    y = network(x)
    yield "output", _whole(y.detach(), mesh)
    (y.square().sum() / 2).backward()
    convmesh.reduce_gradients(network)
    yield "input gradient", _whole(x.grad, mesh)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.grad)  # So that gather_state makes the gradient whole.
    yield "weight gradient", torch.from_numpy(convmesh.gather_state(network)["conv.weight"])


def _whole(tensor: Tensor, mesh: convmesh.Mesh) -> Tensor:
    """All ranks' samples; on other axes than the data axis every rank has all of them."""
    if mesh.size("data") == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(mesh.num_ranks)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def _difference(found: Tensor | None, right: Tensor) -> float | str:
    if found is None:
        return "missing"
    if found.shape != right.shape:
        return f"of shape {tuple(found.shape)} instead of {tuple(right.shape)}"
    return float((found - right).norm() / right.norm())

"""A training loop as people write it, with a network that ConvMesh splits."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

import convmesh
from convmesh.engines.contract import Engine, World
from convmesh.plan import Choice, Entry
from tests.multiprocess.channel_networks import EXTRA
from tests.networks_torch import NETWORKS


def train(
    _engine: Engine, world: World, *, sizes: Mapping[str, int], regroup: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The loop; ``alone`` never sees regrouped channels."""
    torch.manual_seed(0)
    network = NETWORKS["swish"]().double()
    alone = copy.deepcopy(network)
    mesh = convmesh.Mesh(sizes)
    regrouping = convmesh.ChannelRegrouping.of(3, **(regroup or {}))
    if regroup is not None:
        network = convmesh.regroup_channels(network, regrouping, (4, 3, 16, 16))
    graph = convmesh.trace(network, (4, regrouping.num_regrouped, *regrouping.sizes((16, 16))))
    plan = convmesh.plan_by_rule(graph, mesh, min_multiply_adds=0)
    network = convmesh.parallelize(network, plan)
    images, labels = torch.randn(8, 3, 16, 16).double(), torch.arange(8)
    own = slice(4 * mesh.coordinate(world.rank)["data"], 4 * mesh.coordinate(world.rank)["data"] + 4)
    for net, part in ((network, own), (alone, slice(0, 8))):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            x = convmesh.regroup_images(images[part], regrouping) if net is network else images[part]
            loss = F.cross_entropy(net(x), labels[part], reduction="sum") / len(labels)
            loss.backward()
            if net is network:
                convmesh.reduce_gradients(net)
            optimizer.step()
    return {
        "state": convmesh.gather_state(network),
        "alone": {name: tensor.detach().numpy() for name, tensor in alone.state_dict().items()},
        "num_held": sum(p.numel() for p in network.parameters()),
        "num_whole": sum(p.numel() for p in alone.parameters()),
    }


def train_head(_engine: Engine, world: World, *, sizes: Mapping[str, int]) -> dict[str, Any]:
    """A head split along data; the first rank has more samples than the others."""
    torch.manual_seed(0)
    network = EXTRA["dense_head_plain"]().double()
    alone = copy.deepcopy(network)
    mesh = convmesh.Mesh(sizes)
    graph = convmesh.trace(network, (4, 3, 12, 12))
    plan = convmesh.plan_by_rule(graph, mesh)
    splits = {"head.1": "out_channels", "head.4": "in_channels", "head.7": "in_channels"}
    entries = tuple(Entry(pattern=name, axes={"data": Choice(split=split)}) for name, split in splits.items())
    network = convmesh.parallelize(network, dataclasses.replace(plan, entries=entries))
    images, labels = torch.randn(8, 3, 12, 12).double(), torch.arange(8)
    own = slice(0, 5) if world.rank == 0 else slice(5, 8)
    for net, part in ((network, own), (alone, slice(0, 8))):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images[part]), labels[part], reduction="sum") / len(labels)
            loss.backward()
            if net is network:
                convmesh.reduce_gradients(net)
            optimizer.step()
    return {
        "state": convmesh.gather_state(network),
        "alone": {name: tensor.detach().numpy() for name, tensor in alone.state_dict().items()},
        "num_held": sum(p.numel() for p in network.parameters()),
        "num_whole": sum(p.numel() for p in alone.parameters()),
    }


def mistakes(_engine: Engine, world: World) -> tuple[str, ...]:
    network = NETWORKS["swish"]()
    graph = convmesh.trace(network, (2, 3, 16, 16))
    plan = convmesh.plan_by_rule(graph, convmesh.Mesh({"channel": world.num_ranks}), min_multiply_adds=0)
    not_split = said(lambda: convmesh.reduce_gradients(network))
    convmesh.parallelize(network, plan)
    twice = said(lambda: convmesh.parallelize(network, plan))
    larger = convmesh.plan_by_rule(graph, convmesh.Mesh({"channel": 2 * world.num_ranks}), min_multiply_adds=0)
    rows = convmesh.plan_by_rule(graph, convmesh.Mesh({"height": world.num_ranks}))
    return not_split, twice, *(said(lambda p=p: convmesh.parallelize(NETWORKS["swish"](), p)) for p in (larger, rows))


def said(action: Callable[[], object]) -> str:
    try:
        action()
    except convmesh.ConvMeshError as error:
        return str(error)
    return ""

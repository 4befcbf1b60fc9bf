"""Runs of PyTorch with a mistake planted after the network was split, for verification to find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from convmesh.config import RunConfig
from convmesh.engines.contract import Engine, Exercise, Observation, World
from convmesh.engines.torch.engine import TorchEngine
from convmesh.engines.torch.layers import ShardedWeighted
from convmesh.engines.torch.trace import trace
from convmesh.engines.torch.train_step import TorchTrainStep
from convmesh.engines.torch.verification import observe_one_device, observe_ranks
from convmesh.graph import Graph
from convmesh.plan.placement import Change
from tests.multiprocess.channel_cases import on_mesh
from tests.multiprocess.channel_training import network_of
from tests.multiprocess.faults import observe_faulty


def graph_of(name: str, shape: Sequence[int]) -> Graph:
    """The graph of a network."""
    return trace(network_of(name, "float32"), tuple(shape))


def alone(run: RunConfig, name: str, exercises: Sequence[Exercise]) -> list[Observation]:
    """What one device sees."""
    return observe_one_device(TorchEngine(), network_of(name, "float32"), run, exercises)


def observe(
    _engine: Engine,
    world: World,
    *,
    run: RunConfig,
    sizes: Mapping[str, int],
    name: str,
    exercise: Exercise,
    fault: str,
) -> Observation:
    """What a rank sees of a run with a fault."""
    engine, placed = on_mesh(world, sizes)
    return observe_faulty(
        engine,
        placed,
        network_of(name, "float32"),
        run=run,
        exercise=exercise,
        plant=partial(_plant, fault, rank=world.rank),
        observe_ranks=observe_ranks,
    )


def _plant(fault: str, network: nn.Module, step: TorchTrainStep, *, rank: int) -> None:
    sharded = [module for module in network.modules() if isinstance(module, ShardedWeighted)]
    if fault == "gradient" and rank == 1:
        for parameter in network.parameters():
            parameter.register_hook(lambda gradient: 1.01 * gradient)
    if fault == "buffer" and rank == 1:
        combine = step._buffers.combine

        def combine_wrongly(**arguments: Any) -> None:
            combine(**arguments)
            with torch.no_grad():
                for name, buffer in network.named_buffers():
                    if name.endswith("running_var"):
                        buffer.mul_(1.01)

        step._buffers.combine = combine_wrongly  # type: ignore[method-assign]
    if fault == "sum of activations":
        module = next(module for module in sharded if module._after.kind == "all_reduce")
        module._after = Change(kind="none")
    if fault == "sum of gradients":
        step._parallel = network
    if fault == "bias":
        module = next(module for module in sharded if module._adds_bias_last and module._bias_name is not None)
        module._adds_bias_last = False

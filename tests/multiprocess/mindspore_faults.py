"""Runs of MindSpore with a mistake planted after the network was split, for verification to find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mindspore import Tensor, nn

from convmesh.config import RunConfig
from convmesh.engines.contract import Engine, Exercise, Observation, World
from convmesh.engines.mindspore.channel_axis import Keep, Sum, hide
from convmesh.engines.mindspore.engine import MindSporeEngine
from convmesh.engines.mindspore.layers import ShardedWeighted
from convmesh.engines.mindspore.redistribution import Redistribution
from convmesh.engines.mindspore.state import assign_array, named_parameters
from convmesh.engines.mindspore.trace import trace
from convmesh.engines.mindspore.train_step import MindSporeTrainStep
from convmesh.engines.mindspore.verification import observe_one_device, observe_ranks
from convmesh.graph import Graph
from tests.multiprocess.faults import observe_faulty
from tests.multiprocess.mindspore_channel_training import network_of, on_mesh


def graph_of(name: str, shape: Sequence[int]) -> Graph:
    """The graph of a network."""
    return trace(network_of(name), tuple(shape))


def alone(run: RunConfig, name: str, exercises: Sequence[Exercise]) -> list[Observation]:
    """What one device sees."""
    return observe_one_device(MindSporeEngine(), network_of(name), run, exercises)


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
        network_of(name),
        run=run,
        exercise=exercise,
        plant=partial(_plant, fault, rank=world.rank),
        observe_ranks=observe_ranks,
    )


def _plant(fault: str, network: nn.Cell, step: MindSporeTrainStep, *, rank: int) -> None:
    sharded = [cell for _, cell in network.cells_and_names() if isinstance(cell, ShardedWeighted)]
    if fault == "gradient" and rank == 1:
        step._backward = _Scaled(step._backward)  # type: ignore[assignment]
    if fault == "buffer" and rank == 1:
        combine = step._buffers.combine

        def combine_wrongly(**arguments: Any) -> None:
            combine(**arguments)
            for name, parameter in named_parameters(network).items():
                if name.endswith("running_var"):
                    assign_array(parameter, 1.01 * parameter.asnumpy())

        step._buffers.combine = combine_wrongly  # type: ignore[method-assign]
    if fault == "sum of activations":
        hide(
            next(cell for cell in sharded if isinstance(cell.after, Redistribution) and _sums(cell.after)), after=Keep()
        )
    if fault == "sum of gradients":
        step._sum = _Unsummed(step._sum)  # type: ignore[assignment]
    if fault == "bias":
        next(cell for cell in sharded if cell.adds_bias_last and cell.has_bias).adds_bias_last = False


def _sums(change: nn.Cell) -> bool:
    return isinstance(change, Redistribution) and isinstance(change.there, Sum)


class _Scaled:
    """A backward whose gradients are a hundredth too large."""

    def __init__(self, backward: Any) -> None:
        self._backward = backward

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        loss, scores_NK, *gradients = self._backward(*inputs)
        return loss, scores_NK, *(1.01 * gradient for gradient in gradients)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backward, name)


class _Unsummed:
    """A sum over the data axis that is left out."""

    def __init__(self, gradients_sum: Any) -> None:
        self._sum = gradients_sum

    def __call__(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        return gradients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sum, name)

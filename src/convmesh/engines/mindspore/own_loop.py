"""What a training loop of one's own needs besides a split network: where this rank stands, and sums of gradients."""

from __future__ import annotations

import os
from collections.abc import Sequence

import mindspore as ms
from mindspore import Tensor, communication, nn

from convmesh.engines.contract import World
from convmesh.engines.mindspore.channel_axis import Sum
from convmesh.engines.mindspore.channel_split import ChannelSplit, Equalizer
from convmesh.engines.mindspore.collectives import BucketedSum, DataAxis, enable_fusion
from convmesh.engines.mindspore.partition import plan_buckets
from convmesh.engines.mindspore.state import named_parameters
from convmesh.engines.mindspore.threads import plan_convolutions_for
from convmesh.errors import ConfigError, ModelError
from convmesh.mesh import Mesh

_BUCKET_BYTES = 25 * 2**20
_DEVICES = {"CPU": "cpu", "GPU": "cuda", "Ascend": "ascend"}


def own_world(mesh: Mesh) -> World:
    """Where this rank stands among those that ``mindspore.communication.init`` has brought together.

    Args:
        mesh: The mesh of all ranks.

    Returns:
        The world.

    Raises:
        ConfigError: If the mesh has another number of ranks, or MindSpore is not in graph mode.
    """
    try:
        rank, num_ranks = communication.get_rank(), communication.get_group_size()
    except (RuntimeError, ValueError):
        rank, num_ranks = 0, 1
    if num_ranks != mesh.num_ranks:
        raise ConfigError(
            f"the plan's mesh {mesh} does not fit the ranks that were started",
            got=num_ranks,
            expected=mesh.num_ranks,
            fix=f"Start {mesh.num_ranks} ranks and call mindspore.communication.init first",
        )
    if num_ranks > 1 and ms.get_context("mode") != ms.GRAPH_MODE:
        raise ConfigError(
            "a split network runs in MindSpore's graph mode only, whose collectives a CPU has",
            fix="Call mindspore.set_context(mode=mindspore.GRAPH_MODE) first",
        )
    device = _DEVICES[ms.get_context("device_target")]
    num_threads = _num_threads(num_ranks) if device == "cpu" else 1
    if device == "cpu":
        plan_convolutions_for(num_threads)
    return World(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=rank,
        num_local_ranks=num_ranks,
        mesh=mesh,
        device=device,
        num_threads=num_threads,
    )


class Reduction:
    """Sums of the gradients of a split network over the ranks.

    Args:
        network: The network.
        axis: The data axis.
        split: How it is split along channels, or None.
    """

    def __init__(self, network: nn.Cell, axis: DataAxis, split: ChannelSplit | None) -> None:
        trained = {name: entry for name, entry in named_parameters(network).items() if entry.requires_grad}
        sizes = [parameter.nbytes for parameter in trained.values()]
        self._count = len(trained)
        self._axis = axis
        self._over_data = BucketedSum(axis, plan_buckets(sizes, bucket_bytes=_BUCKET_BYTES))
        self._summed = [place for place, name in enumerate(trained) if split is not None and name in split.summed]
        self._over_channels = Sum(split.axis) if split is not None else None
        self._equalizer = Equalizer(trained, split) if split is not None and split.replicas_may_differ else None
        if axis.size > 1:
            enable_fusion()

    def __call__(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The sums.

        Args:
            gradients: One per trainable parameter.

        Returns:
            The same order.

        Raises:
            ModelError: If there are not as many.
        """
        if len(gradients) != self._count:
            raise ModelError(
                "there are not as many gradients as trainable parameters",
                got=len(gradients),
                expected=self._count,
                fix="Differentiate by network.trainable_params() as it is after parallelize",
            )
        _arrive(gradients)
        found = list(gradients)
        for place in self._summed:
            if self._over_channels is not None:
                found[place] = self._over_channels(found[place])
        if self._axis.size > 1:
            found = list(self._over_data(found))
        if self._equalizer is not None:
            found = self._equalizer(found)
        return tuple(found)


def _num_threads(num_ranks: int) -> int:
    """Threads of a rank whose launcher is not ours: what it was given, or its share of the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else max(1, (os.cpu_count() or 1) // num_ranks)


def _arrive(tensors: Sequence[Tensor]) -> None:
    """Waits until tensors are computed, asleep.

    MindSpore runs a differentiated function behind its caller's back. Who then reads a tensor, or computes with it,
    waits in a loop that keeps a core busy which other ranks compute on: half of the processor time of ResNet-50's step
    at channel=2 on two cores. Who asks for its shape waits asleep.
    """
    for tensor in tensors:
        _ = tensor.shape

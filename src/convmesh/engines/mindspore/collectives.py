"""What the ranks say to each other; the only place that knows which collectives a device has.

On CPU (MCCL) messages are matched by their order alone: a rank that sends others, or in another order, gets an error at
best and wrong numbers without a word at worst. So each collective, or chain of them, is a graph of its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, communication, nn, ops

from convmesh.engines.contract import World
from convmesh.engines.mindspore.shared_memory import SharedSum
from convmesh.engines.shared_exchange import is_wanted
from convmesh.profiling.recorder import RECORDER


class DataAxis:
    """The ranks among which samples are split.

    Args:
        position: Of this rank on the axis.
        size: Ranks on the axis.
        group: Name of their group; None for all ranks of the run.
        first_rank: Rank of position 0.

    Attributes:
        shares_memory: Whether they compute on the CPU of one machine and are all ranks of the run.
        shared: What they sum through shared memory, by the shapes of the tensors; None where memory did not suffice.
    """

    def __init__(self, *, position: int = 0, size: int = 1, group: str | None = None, first_rank: int = 0) -> None:
        self.position = position
        self.size = size
        self.first_rank = first_rank
        self.shares_memory = False
        self.shared: dict[tuple[tuple[int, ...], ...], SharedSum | None] = {}
        self._group = group

    @property
    def group(self) -> str | None:
        """Name of the group; None for all ranks of the run."""
        return self._group

    def all_reduce(self, *, bucket: int = 0, index: int = 0) -> ops.AllReduce:
        """A sum over the axis, for use in a graph.

        Args:
            bucket: Those of one graph with the same number from 1 are fused into one; 0 stays alone.
            index: Order within the bucket, from 1.

        Returns:
            The operator.
        """
        operator = ops.AllReduce() if self._group is None else ops.AllReduce(group=self._group)
        operator.add_prim_attr("fusion", bucket)
        operator.add_prim_attr("index", index)
        return operator

    def broadcast(self, parameters: Sequence[Parameter]) -> None:
        """Overwrites parameters with those of position 0, bit for bit but for the sign of zeros."""
        if self.size == 1:
            return
        floating = [parameter for parameter in parameters if parameter.dtype in (ms.float32, ms.float16)]
        if floating:
            _Broadcast(floating, axis=self)()
        others = [parameter for parameter in parameters if parameter.dtype not in (ms.float32, ms.float16)]
        if others:
            arrays = gather_values([parameter.asnumpy() for parameter in others])[self.first_rank]
            for parameter, array in zip(others, arrays, strict=True):
                ops.assign(parameter, Tensor(array))


class BucketedSum:
    """Sums many tensors over the data axis, fused in buckets.

    Each bucket is a graph of its own with exactly one collective, so that all ranks send the same buckets in the same
    order whatever else they compute. (Within one graph MindSpore orders collectives by the graph: two ranks whose
    graphs differed were seen to mix up their buckets.)

    Args:
        axis: The data axis.
        buckets: The bucket of each tensor, from `partition.plan_buckets`.
        dtype: Type in which the tensors travel; they come back in float32.
        purpose: What the recorder calls them.
    """

    def __init__(
        self, axis: DataAxis, buckets: Sequence[int], *, dtype: Any = ms.float32, purpose: str = "gradients"
    ) -> None:
        members: dict[int, list[int]] = {}
        for index, bucket in enumerate(buckets):
            members.setdefault(bucket, []).append(index)
        self._members = [members[bucket] for bucket in sorted(members)]
        self._graphs = [_FusedSum(axis, len(indices), dtype=dtype) for indices in self._members]
        self._axis = axis
        self._width = 4 if dtype == ms.float32 else 2
        self._name = f"all-reduce {purpose}"
        self._may_share = axis.shares_memory and axis.size > 1 and dtype == ms.float32 and is_wanted()
        self._shared: SharedSum | None = None

    @property
    def num_buckets(self) -> int:
        """Sums of one call: one of all tensors in shared memory, or one per bucket."""
        return 1 if self._shared is not None else len(self._graphs)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums the tensors.

        Args:
            tensors: One per bucket entry, in float32.

        Returns:
            The sums, in the same order, in float32; the next call may overwrite them.
        """
        if self._may_share and self._shared is None:
            self._share(tuple(tuple(tensor.shape) for tensor in tensors))
        if self._shared is not None:
            with self._noted(tensors):
                return self._shared(tensors)
        sums = list(tensors)
        for indices, graph in zip(self._members, self._graphs, strict=True):
            parts = [tensors[index] for index in indices]
            with self._noted(parts):
                totals = graph(*parts)
            for index, total in zip(indices, totals, strict=True):
                sums[index] = total
        return sums

    def _noted(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Notes one collective."""
        num_bytes = self._width * sum(tensor.size for tensor in tensors)
        return RECORDER.span("communication", self._name, axis="data", num_bytes=num_bytes)

    def _share(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        if shapes not in self._axis.shared:
            barrier, one = _FusedSum(self._axis, 1, dtype=ms.float32), as_scalar(1.0)

            def wait() -> None:
                barrier(one)[0].asnumpy()

            shared = SharedSum(position=self._axis.position, size=self._axis.size, barrier=wait, gather=gather_values)
            self._axis.shared[shapes] = shared if shared.prepare(shapes) else None
        self._shared = self._axis.shared[shapes]
        self._may_share = self._shared is not None


class _FusedSum(nn.Cell):
    """One bucket."""

    def __init__(self, axis: DataAxis, count: int, *, dtype: Any) -> None:
        super().__init__(auto_prefix=False)
        self.operators = tuple(axis.all_reduce(bucket=1, index=index + 1) for index in range(count))
        self.count = count
        self.dtype = dtype

    def construct(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        sums: tuple[Tensor, ...] = ()
        for index in range(self.count):
            tensor = ops.cast(tensors[index], self.dtype)
            sums += (ops.cast(self.operators[index](tensor), ms.float32),)
        return sums


def enable_fusion() -> None:
    """Makes the compiler fuse what has the same bucket; without this it ignores buckets without a word."""
    ms.set_auto_parallel_context(comm_fusion={"allreduce": {"mode": "auto", "config": None}})


def data_axis(world: World) -> DataAxis:
    """The data axis of a rank; all ranks must call it."""
    position, size, group, first_rank = place_on_axis(world, "data")
    axis = DataAxis(position=position, size=size, group=group, first_rank=first_rank)
    axis.shares_memory = world.device == "cpu" and size == world.num_ranks == world.num_local_ranks
    return axis


def place_on_axis(world: World, axis: str) -> tuple[int, int, str | None, int]:
    """Makes the group of a rank along an axis; all ranks must call it.

    Args:
        world: Of this rank.
        axis: An axis of the mesh.

    Returns:
        This rank's position, the size of the axis, the name of the group (None for all ranks) and its first rank.
    """
    size = world.mesh.size(axis)
    if size == world.num_ranks:
        return world.rank, size, None, 0
    place: tuple[int, int, str | None, int] = (0, 1, None, 0)
    for ranks in world.mesh.groups(axis):
        # MindSpore refuses a group on a rank that is none of its own.
        if world.rank in ranks:
            name = f"convmesh_{axis}_{ranks[0]}_of_{len(ranks)}" if len(ranks) > 1 else None
            if name is not None:
                communication.create_group(name, list(ranks))
            place = ranks.index(world.rank), len(ranks), name, ranks[0]
    return place


def gather_values(value: Any) -> list[Any]:
    """Gathers a small picklable value of every rank of the run, in rank order; floats come through exactly."""
    from mindspore.mint.distributed import all_gather_object

    # MindSpore's own unpickler admits few types, so that it gets bytes; these come from our own ranks.
    packed: list[bytes] = [b""] * communication.get_group_size()
    all_gather_object(packed, pickle.dumps(value))
    return [pickle.loads(content) for content in packed]  # noqa: S301


class _Broadcast(nn.Cell):
    """Sums tensors of which all but position 0 hold zeros; works on every device and group."""

    def __init__(self, parameters: Sequence[Parameter], *, axis: DataAxis) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ms.ParameterTuple(parameters)
        self.operators = tuple(axis.all_reduce() for _ in parameters)
        self.is_first = axis.position == 0

    def construct(self) -> Tensor:
        """Overwrites the parameters."""
        done = Tensor(0, ms.int32)
        for index in range(len(self.operators)):
            own = self.parameters[index]
            own = own if self.is_first else ops.zeros_like(own)
            total = self.operators[index](ops.depend(own, done))
            done = ops.depend(done, ops.assign(self.parameters[index], total))
        return done


def as_scalar(value: float) -> Tensor:
    """A number as input of a graph, so that another number does not compile it again."""
    return Tensor(np.float32(value))

"""Looks at MindSpore for the doctor; see `convmesh.engines.probing`.

The order of the trials matters: MCCL pairs messages by order alone, so one that fails halfway could feed its data to
the next. Those that may be missing come last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

from convmesh.engines.probing import CollectiveLog, run_probe


def describe() -> Mapping[str, Any]:
    """Versions and devices, after a convolution and an array of NumPy have gone through."""
    convolution = nn.Conv2d(3, 4, 3, has_bias=True)
    convolution(Tensor(np.ones((1, 3, 8, 8), np.float32))).sum().asnumpy()
    return {"version": ms.__version__, "numpy": np.__version__, "devices": _devices()}


def try_collectives(path: Path) -> None:
    """Tries the collectives in graph mode on all ranks of a launch.

    Args:
        path: The file of lines that rank 0 writes.
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    rank, size = get_rank(), get_group_size()
    log = CollectiveLog(path, writes=rank == 0)
    for name, (operator, expected) in _trials(size).items():
        log.attempt(name, partial(_run, operator, expected))


class _Communicate(nn.Cell):
    """One collective as a network."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator

    def construct(self, x: Any) -> Any:
        """Communicates a tensor."""
        return self.operator(x)


class _Broadcast(nn.Cell):
    """A broadcast takes and gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.operator = ops.Broadcast(0)

    def construct(self, x: Any) -> Any:
        """Communicates a tensor."""
        return self.operator((x,))[0]


def _trials(size: int) -> dict[str, tuple[Callable[[], Any], float]]:
    """Per collective how its network is made, and the last value of its result when rank r holds r + 1."""
    total = size * (size + 1) / 2
    return {
        "all-reduce": (lambda: _Communicate(ops.AllReduce()), total),
        "all-gather": (lambda: _Communicate(ops.AllGather()), size),
        "broadcast": (_Broadcast, 1),
        "reduce-scatter": (lambda: _Communicate(ops.ReduceScatter()), total),
        "all-to-all": (lambda: _Communicate(ops.AlltoAll(size, 0, 0)), size),
    }


def _run(operator: Callable[[], Any], expected: float, num_bytes: int) -> Callable[[], None]:
    size = get_group_size()
    network = operator()
    x = Tensor(np.full((size, num_bytes // 4 // size), get_rank() + 1, np.float32))

    def run() -> None:
        last = float(network(x).asnumpy().ravel()[-1])
        if last != expected:
            raise RuntimeError(f"wrong result: got {last}, expected {expected}")

    return run


def _devices() -> list[str]:
    devices = []
    for kind in ("Ascend", "GPU"):
        try:
            devices += [str(ms.hal.get_device_name(index, kind)) for index in range(ms.hal.device_count(kind))]
        except (AttributeError, RuntimeError, ValueError):
            continue  # this build of MindSpore has no such device
    return ["CPU", *devices]


if __name__ == "__main__":
    run_probe(sys.argv[1:], describe=describe, collectives=try_collectives)

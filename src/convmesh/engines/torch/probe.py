"""Looks at PyTorch for the doctor; see `convmesh.engines.probing`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from convmesh.engines.probing import CollectiveLog, run_probe

Trial = Callable[[int, torch.device], Callable[[], None]]


def describe() -> Mapping[str, Any]:
    """Versions and devices, after a convolution and an array of NumPy have gone through."""
    convolution = torch.nn.Conv2d(3, 4, 3)
    convolution(torch.from_numpy(np.ones((1, 3, 8, 8), np.float32))).sum().backward()
    devices = ["CPU"] + [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"version": torch.__version__, "numpy": np.__version__, "devices": devices}


def try_collectives(path: Path) -> None:
    """Tries the collectives on all ranks of a launch: NCCL where each has a GPU, Gloo otherwise.

    Args:
        path: The file of lines that rank 0 writes.
    """
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    log = CollectiveLog(path, writes=dist.get_rank() == 0)
    for name, make in _TRIALS.items():
        log.attempt(name, partial(_run, make, device))
    dist.destroy_process_group()


def _run(make: Trial, device: torch.device, num_bytes: int) -> Callable[[], None]:
    communicate = make(num_bytes // 4, device)

    def run() -> None:
        communicate()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _all_reduce(count: int, device: torch.device) -> Callable[[], None]:
    ones = torch.ones(count, device=device)

    def run() -> None:
        sums = ones.clone()
        dist.all_reduce(sums)
        _expect(sums, dist.get_world_size())

    return run


def _all_gather(count: int, device: torch.device) -> Callable[[], None]:
    own = torch.full((count,), float(dist.get_rank()), device=device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]

    def run() -> None:
        dist.all_gather(parts, own)
        _expect(parts[-1], dist.get_world_size() - 1)

    return run


def _broadcast(count: int, device: torch.device) -> Callable[[], None]:
    values = torch.full((count,), 1.0 if dist.get_rank() == 0 else 0.0, device=device)

    def run() -> None:
        dist.broadcast(values, src=0)
        _expect(values, 1)

    return run


def _reduce_scatter(count: int, device: torch.device) -> Callable[[], None]:
    parts = [torch.ones(count, device=device) for _ in range(dist.get_world_size())]
    own = torch.empty(count, device=device)

    def run() -> None:
        dist.reduce_scatter(own, parts)
        _expect(own, dist.get_world_size())

    return run


def _all_to_all(count: int, device: torch.device) -> Callable[[], None]:
    size = dist.get_world_size()
    sent = torch.full((size * (count // size or 1),), float(dist.get_rank()), device=device)
    got = torch.empty_like(sent)

    def run() -> None:
        dist.all_to_all_single(got, sent)
        _expect(got[-1:], size - 1)

    return run


def _send_receive(count: int, device: torch.device) -> Callable[[], None]:
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, got = torch.full((count,), float(rank), device=device), torch.empty(count, device=device)

    def run() -> None:
        pair = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, got, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        _expect(got, (rank - 1) % size)

    return run


def _expect(values: torch.Tensor, expected: float) -> None:
    if float(values[0]) != expected or float(values[-1]) != expected:
        raise RuntimeError(f"wrong result: got {float(values[0])}, expected {expected}")


_TRIALS: dict[str, Trial] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "broadcast": _broadcast,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "send/receive": _send_receive,
}

if __name__ == "__main__":
    run_probe(sys.argv[1:], describe=describe, collectives=try_collectives)

"""How ranks of PyTorch are started, and what its devices can do. Imports no torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from convmesh.config.schema import RunConfig
from convmesh.engines.contract import LaunchRequest
from convmesh.errors import ConfigError, ConvMeshError, EngineError, ModelError

WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt")
"""Files that ``model.weights`` may name."""

LOOPBACK = "127.0.0.1"

_KEPT_BLOCK_BYTES = 32 * 2**20  # glibc refuses more.
_KEPT_HEAP_BYTES = 2**36
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_INT = 2**31 - 1


class TorchLauncher:
    """Starts ranks with torchrun; implements `convmesh.engines.contract.Launcher`."""

    def command(self, request: LaunchRequest) -> list[str]:
        """The command line of torchrun: one machine, loopback, no restarts.

        Args:
            request: What to start. ``static`` rendezvous makes the ranks meet at exactly its port.

        Returns:
            The arguments, starting with the interpreter.
        """
        options = [
            "--nnodes=1",
            f"--nproc-per-node={request.num_ranks}",
            "--rdzv-backend=static",
            f"--master-addr={LOOPBACK}",
            f"--master-port={request.port}",
            "--max-restarts=0",
            f"--log-dir={request.log_dir}",
            "--no-python",
        ]
        return [sys.executable, "-m", "torch.distributed.run", *options, *request.command]

    def environment(self, *, num_threads: int) -> Mapping[str, str]:
        """Variables for every rank on this machine.

        Args:
            num_threads: Threads that a rank may compute with.

        Returns:
            Thread counts of OpenMP and MKL, Gloo and NCCL bound to the loopback interface, and settings by which glibc
            keeps freed memory: PyTorch frees activations and gradients in each update, and getting their pages back
            from the kernel took 7 % of the processor's time of ResNet-50 on the CPU.
        """
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        return {
            "OMP_NUM_THREADS": str(num_threads),
            "MKL_NUM_THREADS": str(num_threads),
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": loopback,
            "MALLOC_MMAP_THRESHOLD_": str(_KEPT_BLOCK_BYTES),
            "MALLOC_TRIM_THRESHOLD_": str(_KEPT_HEAP_BYTES),
            # DDP warns of find_unused_parameters, which is on for good reason (see `collectives`), where users look
            # for the cause of a failure.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
        }

    def resolve_device(self, device: str) -> str:
        """Turns ``"auto"`` into ``"cuda"`` where GPUs and a PyTorch for them are found, else ``"cpu"``."""
        if device != "auto":
            return device
        return "cuda" if count_gpus() and not _is_cpu_build() else "cpu"

    def check(self, run: RunConfig, *, device: str, num_ranks: int) -> list[ConvMeshError]:
        """Everything in the run that PyTorch can't do on this device.

        Args:
            run: The run. Every precision works on CPU and CUDA: convolution, batch norm and dense layer were measured
                forward and backward under autocast in float16 and bfloat16.
            device: ``"cpu"`` or ``"cuda"``; others are refused.
            num_ranks: Ranks on this machine.

        Returns:
            The mistakes; empty if there are none.
        """
        return [*_check_device(device, num_ranks), *_check_weights(run)]


def create_launcher() -> TorchLauncher:
    """The launch rules of this engine."""
    return TorchLauncher()


def keep_freed_memory() -> bool:
    """Lets glibc keep freed memory in this process, as `TorchLauncher.environment` tells ranks that are started.

    Returns:
        Whether it does; not with another C library, nor where the user has set ``MALLOC_TRIM_THRESHOLD_``.
    """
    if "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK_BYTES) and mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use, by what the driver and ``CUDA_VISIBLE_DEVICES`` show."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(1 for node in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name))
    if visible is None:
        return present
    named = 0
    for entry in visible.split(","):
        if entry.strip() in ("", "-1"):
            break
        named += 1
    return min(named, present)


def _is_cpu_build() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True


def _check_device(device: str, num_ranks: int) -> Iterator[ConvMeshError]:
    if device == "cpu":
        return
    if device != "cuda":
        yield EngineError(
            f"PyTorch does not run on the device '{device}'",
            expected="cpu or cuda",
            fix="Set 'train.device: auto', or 'engine: mindspore' for Ascend",
        )
        return
    num_gpus = count_gpus()
    if _is_cpu_build():
        yield EngineError(
            "this PyTorch was built for the CPU only",
            fix="Install a CUDA build of PyTorch, or set 'train.device: cpu'",
        )
    elif num_gpus == 0:
        yield EngineError("no CUDA GPU was found", fix="Set 'train.device: cpu', or look at CUDA_VISIBLE_DEVICES")
    elif num_ranks > num_gpus:
        yield EngineError(
            "there are more ranks than GPUs",
            got=f"{num_ranks} ranks, {num_gpus} GPUs",
            fix=f"Use --ranks {num_gpus} and a larger 'strategy.accumulation' for the same global batch",
        )


def _check_weights(run: RunConfig) -> Iterator[ConvMeshError]:
    if run.model.weights is None:
        return
    path = Path(run.model.weights)
    if path.suffix not in WEIGHT_SUFFIXES:
        yield ConfigError(
            "model.weights is not a file of weights", got=path.name, expected="a " + " or ".join(WEIGHT_SUFFIXES)
        )
    elif not path.is_file():
        yield ModelError(f"there is no file of weights {path}", fix="Set 'model.weights' to an existing file")

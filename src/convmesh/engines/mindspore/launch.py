"""How ranks of MindSpore are started, and what its devices can do. Imports no MindSpore."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from convmesh.config.schema import RunConfig
from convmesh.engines.contract import LaunchRequest
from convmesh.engines.mindspore import kernels
from convmesh.errors import ConfigError, ConvMeshError, EngineError, ModelError

LOOPBACK = "127.0.0.1"
CLUSTER_SECONDS = 120
"""Time for all ranks to meet; importing MindSpore takes a busy machine half a minute."""

_ACCELERATORS = {"ascend": "davinci", "cuda": "nvidia"}
_PACKAGES = {"cuda": "a GPU build of MindSpore", "ascend": "the Ascend build of MindSpore and CANN"}


class MindSporeLauncher:
    """Starts ranks with msrun; implements `convmesh.engines.contract.Launcher`."""

    def command(self, request: LaunchRequest) -> list[str]:
        """The command line of msrun: one machine, loopback; the death of one rank ends all.

        Args:
            request: What to start. msrun takes ``python`` from PATH (see ``environment``), whatever interpreter the
                command names.

        Returns:
            The arguments, starting with the interpreter.
        """
        interpreter = "python" if Path(sys.executable).with_name("python").exists() else "python3"
        options = [
            f"--worker_num={request.num_ranks}",
            f"--local_worker_num={request.num_ranks}",
            f"--master_addr={LOOPBACK}",
            f"--master_port={request.port}",
            f"--log_dir={request.log_dir}",
            "--join=True",
            f"--cluster_time_out={CLUSTER_SECONDS}",
        ]
        return [sys.executable, "-m", "mindspore.parallel.cluster.run", *options, interpreter, *request.command[1:]]

    def environment(self, *, num_threads: int) -> Mapping[str, str]:
        """Variables for every rank on this machine.

        Args:
            num_threads: Threads that a rank may compute with.

        Returns:
            PATH with this interpreter's folder first, thread counts, and what `kernels.environment` explains, where the
            user has not set it.
        """
        folder = str(Path(sys.executable).parent)
        settings = {name: os.environ.get(name, value) for name, value in kernels.environment().items()}
        return {
            **settings,
            "PATH": os.pathsep.join([folder, os.environ.get("PATH", os.defpath)]),
            "OMP_NUM_THREADS": str(num_threads),
            "PYTHONUNBUFFERED": "1",
        }

    def resolve_device(self, device: str) -> str:
        """Turns ``"auto"`` into the accelerator that the machine and the installed MindSpore share, else ``"cpu"``."""
        if device != "auto":
            return device
        return next((kind for kind in _ACCELERATORS if count_devices(kind) and _supports(kind)), "cpu")

    def check(self, run: RunConfig, *, device: str, num_ranks: int) -> list[ConvMeshError]:
        """Everything in the run that MindSpore can't do on this device.

        Args:
            run: The run.
            device: ``"cpu"``, ``"cuda"`` or ``"ascend"``.
            num_ranks: Ranks on this machine.

        Returns:
            The mistakes; empty if there are none.
        """
        return [
            *_check_numpy(),
            *_check_device(device, num_ranks),
            *_check_precision(run, device),
            *_check_weights(run),
        ]


def create_launcher() -> MindSporeLauncher:
    """The launch rules of this engine."""
    return MindSporeLauncher()


def count_devices(kind: str) -> int:
    """Accelerators of a kind that the machine's drivers show.

    Args:
        kind: ``"cuda"`` or ``"ascend"``.

    Returns:
        Their number.
    """
    stem = _ACCELERATORS[kind]
    return sum(1 for node in Path("/dev").glob(f"{stem}*") if re.fullmatch(rf"{stem}\d+", node.name))


def _supports(kind: str) -> bool:
    """Whether the installed MindSpore brings the plugin of a device, told by its files."""
    try:
        files = importlib.metadata.files("mindspore") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    plugin = {"cuda": "libmindspore_gpu", "ascend": "libmindspore_ascend"}[kind]
    return any(plugin in file.name for file in files)


def _check_numpy() -> Iterator[ConvMeshError]:
    version = importlib.metadata.version("numpy")
    if int(version.partition(".")[0]) >= 2:
        yield EngineError(
            "MindSpore 2.10 fails with NumPy 2",
            got=f"numpy {version}",
            expected="numpy 1.26",
            fix="Install it with: pip install 'numpy>=1.26,<2'",
        )


def _check_device(device: str, num_ranks: int) -> Iterator[ConvMeshError]:
    if device == "cpu":
        return
    if device not in _ACCELERATORS:
        yield EngineError(f"MindSpore does not run on the device '{device}'", expected="cpu, cuda or ascend")
    elif not _supports(device):
        yield EngineError(
            f"this MindSpore has no support for the device '{device}'",
            fix=f"Install {_PACKAGES[device]}, or set 'train.device: cpu'",
        )
    elif (num_devices := count_devices(device)) < num_ranks:
        yield EngineError(
            "there are more ranks than devices",
            got=f"{num_ranks} ranks, {num_devices} devices",
            fix=f"Use --ranks {num_devices} and a larger 'strategy.accumulation'"
            if num_devices
            else "Set 'train.device: cpu'",
        )


def _check_precision(run: RunConfig, device: str) -> Iterator[ConvMeshError]:
    if device == "ascend":
        return
    if run.precision.compute == "bfloat16":
        yield EngineError(
            f"MindSpore has no bfloat16 convolution on '{device}'",
            fix="Set 'precision.compute: float16' or float32, or 'engine: torch'",
        )
    if run.precision.gradient_reduction == "bfloat16":
        yield EngineError(
            f"MindSpore can't reduce bfloat16 on '{device}'",
            fix="Set 'precision.gradient_reduction: float16' or float32",
        )


def _check_weights(run: RunConfig) -> Iterator[ConvMeshError]:
    if run.model.weights is None:
        return
    path = Path(run.model.weights)
    if path.suffix in (".pth", ".pt"):
        yield ConfigError(
            "the MindSpore engine reads weights from .safetensors files only",
            got=path.name,
            fix="Convert it where PyTorch is installed: safetensors.torch.save_file("
            f"torch.load('{path.name}', weights_only=True), '{path.stem}.safetensors')",
        )
    elif path.suffix != ".safetensors":
        yield ConfigError("model.weights is not a file of weights", got=path.name, expected="a .safetensors")
    elif not path.is_file():
        yield ModelError(f"there is no file of weights {path}", fix="Set 'model.weights' to an existing file")

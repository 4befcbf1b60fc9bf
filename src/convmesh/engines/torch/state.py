"""Networks and optimizers as arrays with engine-neutral names, and back; for any ``nn.Module`` and ``torch.optim``.

Names are those of ``state_dict``, which are torchvision's for its networks. Arrays are plain: contiguous in NCHW order,
whatever the memory format on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from convmesh.engines.contract import Arrays
from convmesh.errors import CheckpointError, ConvMeshError

OPTIONAL_SUFFIX = "num_batches_tracked"
"""Counters that other engines and older checkpoints don't have."""

_SLOT_NAMES = {"momentum_buffer": "momentum"}
_TORCH_NAMES = {neutral: name for name, neutral in _SLOT_NAMES.items()}


def to_array(tensor: Tensor) -> npt.NDArray[Any]:
    """A copy of a tensor as a contiguous array; bfloat16, which NumPy lacks, as float32."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return np.array(tensor.cpu().numpy(), order="C", copy=True)


def to_tensor(array: npt.NDArray[Any]) -> Tensor:
    """A copy of an array as a tensor on the CPU; arrays mapped from a file are read-only, which tensors can't be."""
    return torch.from_numpy(np.array(array, order="C", copy=True))


def export_network(network: nn.Module) -> Arrays:
    """Copies all parameters and persistent buffers of a network.

    Args:
        network: Any network; parameters that several modules share appear under each name.

    Returns:
        Arrays by name.
    """
    return {name: to_array(tensor) for name, tensor in network.state_dict().items()}


def import_network(
    network: nn.Module, arrays: Arrays, *, error: type[ConvMeshError] = CheckpointError, source: str = "the checkpoint"
) -> None:
    """Copies arrays into a network, in place.

    Args:
        network: Changed only if all names and shapes fit.
        arrays: One array for each parameter and persistent buffer; ``num_batches_tracked`` may be absent.
        error: Type of the error.
        source: Where the arrays are from, for its message.

    Raises:
        ConvMeshError: If names are missing or unexpected or shapes differ; all of them are listed.
    """
    tensors = network.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    refuse_misfits(find_misfits(arrays, shapes, source=source), error)
    copy_arrays(tensors, arrays)


def export_optimizer(optimizer: torch.optim.Optimizer, network: nn.Module) -> Arrays:
    """Copies the tensors of an optimizer.

    Args:
        optimizer: Any optimizer over parameters of the network.
        network: Gives the parameters their names.

    Returns:
        Arrays as ``slot/parameter``; slots have PyTorch's names, but ``momentum`` for SGD's ``momentum_buffer``. A
        scalar such as Adam's ``step`` is an array without dims.
    """
    arrays: Arrays = {}
    for name, parameter in network.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                array = to_array(value) if isinstance(value, Tensor) else np.asarray(value)
                arrays[f"{_SLOT_NAMES.get(slot, slot)}/{name}"] = array
    return arrays


def import_optimizer(optimizer: torch.optim.Optimizer, network: nn.Module, arrays: Arrays) -> None:
    """Gives an optimizer the state that ``export_optimizer`` copied; its parameter groups stay as they are.

    Args:
        optimizer: Its present state is replaced, if all names and shapes fit.
        network: Gives the parameters their names.
        arrays: Arrays as ``slot/parameter``.

    Raises:
        CheckpointError: If arrays belong to no parameter of the optimizer, or shapes differ; all of them are listed.
    """
    fused = {id(p): bool(group.get("fused")) for group in optimizer.param_groups for p in group["params"]}
    parameters = {name: p for name, p in network.named_parameters() if id(p) in fused}
    wanted = {name: _parameter_of(name) for name in arrays}
    shapes = {
        name: tuple(parameters[of].shape) if array.ndim or not parameters[of].ndim else ()
        for (name, of), array in zip(wanted.items(), arrays.values(), strict=True)
        if of in parameters
    }
    refuse_misfits(find_misfits(arrays, shapes, source="the optimizer state"), CheckpointError)
    optimizer.state.clear()
    for name, array in arrays.items():
        slot = name.partition("/")[0]
        parameter = parameters[wanted[name]]
        if array.ndim == parameter.ndim:
            value = torch.empty_like(parameter, requires_grad=False).copy_(to_tensor(array))
        else:
            # Counters stay on the CPU, except those of fused kernels.
            value = torch.tensor(array.item(), device=parameter.device if fused[id(parameter)] else "cpu")
        optimizer.state[parameter][_TORCH_NAMES.get(slot, slot)] = value


def find_misfits(arrays: Arrays, shapes: Mapping[str, tuple[int, ...]], *, source: str) -> list[str]:
    """Compares arrays with the names and shapes that are wanted.

    Args:
        arrays: What there is.
        shapes: Wanted names and shapes.
        source: Where the arrays are from.

    Returns:
        Up to three clauses: names that are missing, names that are unexpected, and shapes that differ, all listed.
    """
    missing = [name for name in shapes if name not in arrays and not name.endswith(OPTIONAL_SUFFIX)]
    unexpected = [name for name in arrays if name not in shapes]
    misshaped = [
        f"{name} {tuple(arrays[name].shape)} for {shape}"
        for name, shape in shapes.items()
        if name in arrays and tuple(arrays[name].shape) != tuple(shape)
    ]
    findings = (("lacks", "", missing), ("has", "unexpected ", unexpected), ("has", "misshaped ", misshaped))
    return [
        f"{source} {verb} {len(names)} {kind}tensor{'s' if len(names) > 1 else ''}: {', '.join(names)}"
        for verb, kind, names in findings
        if names
    ]


def refuse_misfits(misfits: Sequence[str], error: type[ConvMeshError]) -> None:
    """Raises one error that holds all clauses, if there are any."""
    if misfits:
        raise error("; ".join(misfits), fix="Use tensors of the same network and optimizer")


@torch.no_grad()
def copy_arrays(tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
    """Copies arrays into tensors of the same names, in place; tensors without an array stay."""
    for name, tensor in tensors.items():
        if name in arrays:
            tensor.copy_(to_tensor(arrays[name]))


def _parameter_of(name: str) -> str:
    return name.partition("/")[2]

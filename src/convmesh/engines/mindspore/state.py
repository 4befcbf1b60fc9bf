"""Networks and optimizers as arrays with engine-neutral names, and back; for any ``nn.Cell`` and ``nn.Optimizer``.

Neutral names are PyTorch's: those of torchvision for its networks. MindSpore names the tensors of its normalisation
layers and embeddings differently; all else keeps the name it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from convmesh.engines.contract import Arrays
from convmesh.errors import CheckpointError, ConvMeshError

OPTIONAL_SUFFIX = "num_batches_tracked"
"""Counters of PyTorch's batch norm, which MindSpore does not have."""

_NORM = {"gamma": "weight", "beta": "bias"}
_MOVING = {"moving_mean": "running_mean", "moving_variance": "running_var"}
_RENAMED: tuple[tuple[tuple[type, ...], Mapping[str, str]], ...] = (
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), {**_NORM, **_MOVING}),
    (
        (nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        _NORM,
    ),
    ((nn.Embedding,), {"embedding_table": "weight"}),
)
_SLOT_NAMES = {
    "moments": "momentum",
    "accum": "momentum",
    "moment1": "exp_avg",
    "moments1": "exp_avg",
    "moment2": "exp_avg_sq",
    "moments2": "exp_avg_sq",
}


def named_parameters(network: nn.Cell) -> dict[str, Parameter]:
    """All parameters and buffers of a network by neutral name, in the order of its cells.

    Args:
        network: Any network; a parameter that several cells share appears under its first name.

    Returns:
        ``bn1.running_mean`` for the ``moving_mean`` of the batch norm ``bn1``, and so on.
    """
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for cell_name, cell in network.cells_and_names():
        renamed = _renamed(cell)
        for attribute, parameter in cell.parameters_and_names(expand=False):
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            own = attribute.rpartition(".")[2]
            found[".".join(filter(None, [cell_name, renamed.get(own, own)]))] = parameter
    return found


def export_network(network: nn.Cell) -> Arrays:
    """Copies all parameters and buffers of a network.

    Args:
        network: Any network.

    Returns:
        Arrays by neutral name.
    """
    return export_parameters(named_parameters(network))


def import_network(
    network: nn.Cell,
    arrays: Arrays,
    *,
    error: type[ConvMeshError] = CheckpointError,
    source: str = "the checkpoint",
    compiled: bool = True,
) -> None:
    """Copies arrays into a network, in place; compiled graphs see the new values.

    Args:
        network: Changed only if all names and shapes fit.
        arrays: One array for each parameter and buffer by neutral name; ``num_batches_tracked`` is ignored.
        error: Type of the error.
        source: Where the arrays are from, for its message.
        compiled: Whether something may be compiled already. A network that is new can still be cut into parts, which a
            parameter that was once assigned to can't: MindSpore remembers its shape.

    Raises:
        ConvMeshError: If names are missing or unexpected or shapes differ; all of them are listed.
    """
    parameters = named_parameters(network)
    refuse_misfits(find_misfits(arrays, shapes_of(parameters), source=source), error)
    if compiled:
        import_parameters(parameters, arrays)
        return
    for name, parameter in parameters.items():
        parameter.set_data(Tensor(np.array(arrays[name], order="C", copy=True)).astype(parameter.dtype))


def export_optimizer(optimizer: nn.Optimizer, network: nn.Cell) -> Arrays:
    """Copies the tensors of an optimizer.

    Args:
        optimizer: Any optimizer over parameters of the network.
        network: Gives the parameters their neutral names.

    Returns:
        Arrays as ``slot/parameter``; the slots of MindSpore's SGD, Momentum and Adam have PyTorch's names
        (``momentum``, ``exp_avg``, ``exp_avg_sq``). Counters such as ``global_step`` have no slash.
    """
    return export_parameters(_optimizer_tensors(optimizer, network))


def import_optimizer(optimizer: nn.Optimizer, network: nn.Cell, arrays: Arrays) -> None:
    """Gives an optimizer the state that ``export_optimizer`` copied.

    Args:
        optimizer: Changed only if all names and shapes fit.
        network: Gives the parameters their neutral names.
        arrays: Arrays as ``slot/parameter``.

    Raises:
        CheckpointError: If names are missing or unexpected, or shapes differ; all of them are listed.
    """
    tensors = _optimizer_tensors(optimizer, network)
    refuse_misfits(find_misfits(arrays, shapes_of(tensors), source="the optimizer state"), CheckpointError)
    import_parameters(tensors, arrays)


def shapes_of(parameters: Mapping[str, Parameter]) -> dict[str, tuple[int, ...]]:
    """Shapes by name."""
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def export_parameters(parameters: Mapping[str, Parameter]) -> Arrays:
    """Copies of parameters as arrays."""
    return {name: np.array(parameter.asnumpy(), order="C", copy=True) for name, parameter in parameters.items()}


def import_parameters(parameters: Mapping[str, Parameter], arrays: Arrays) -> None:
    """Copies arrays into parameters of the same names; parameters without an array stay."""
    for name, parameter in parameters.items():
        if name in arrays:
            assign_array(parameter, arrays[name])


def assign_array(parameter: Parameter, array: np.ndarray) -> None:
    """Overwrites a parameter where it lies: compiled graphs don't see the other memory that ``set_data`` would give."""
    tensor = Tensor(np.array(array, order="C", copy=True)).astype(parameter.dtype)
    ops.assign(parameter, tensor)


def find_misfits(arrays: Arrays, shapes: Mapping[str, tuple[int, ...]], *, source: str) -> list[str]:
    """Compares arrays with the names and shapes that are wanted.

    Args:
        arrays: What there is.
        shapes: Wanted names and shapes.
        source: Where the arrays are from.

    Returns:
        Up to three clauses: names that are missing, names that are unexpected, and shapes that differ, all listed.
    """
    missing = [name for name in shapes if name not in arrays]
    unexpected = [name for name in arrays if name not in shapes and not name.endswith(OPTIONAL_SUFFIX)]
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


def _renamed(cell: nn.Cell) -> Mapping[str, str]:
    return next((names for kinds, names in _RENAMED if isinstance(cell, kinds)), {})


def _optimizer_tensors(optimizer: nn.Optimizer, network: nn.Cell) -> dict[str, Parameter]:
    neutral = {parameter.name: name for name, parameter in named_parameters(network).items()}
    own = {id(parameter) for parameter in network.get_parameters()}
    found: dict[str, Parameter] = {}
    for parameter in optimizer.get_parameters():
        if id(parameter) in own:
            continue
        slot, _, of = parameter.name.partition(".")
        name = f"{_SLOT_NAMES.get(slot, slot)}/{neutral[of]}" if of in neutral else parameter.name
        found[name] = parameter
    return found

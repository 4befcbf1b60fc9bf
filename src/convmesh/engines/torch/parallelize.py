"""Splitting a network by channels: modules are replaced in place, by others of the same name.

Parameters are cut one by one; a whole one is freed when its part is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from convmesh.engines.contract import Arrays
from convmesh.engines.torch.along import Along
from convmesh.engines.torch.calls import Call, replace_calls
from convmesh.engines.torch.channel_axis import ChannelAxis
from convmesh.engines.torch.channel_split import ChannelSplit, Parts, note_split, split_of
from convmesh.engines.torch.collectives import DataAxis
from convmesh.engines.torch.layers import ShardedWeighted
from convmesh.engines.torch.layers_local import ShardedDropout, ShardedGroupNorm
from convmesh.engines.torch.recompute import recompute
from convmesh.engines.torch.recompute import refusals as refused_blocks
from convmesh.engines.torch.redistribution import redistribute
from convmesh.engines.torch.regroup import keep_zeros, regrouped_of
from convmesh.engines.torch.sample_axis import SampleAxis
from convmesh.engines.torch.state import export_network
from convmesh.engines.torch.trace import trace
from convmesh.errors import ConfigError, ConvMeshError, ModelError, raise_all
from convmesh.graph import Graph, Node
from convmesh.plan import CHANNEL, Plan, Resolved, ResolvedPlan, resolve
from convmesh.plan.network import plan_mismatches
from convmesh.plan.placement import Change, ParameterShard, Shard
from convmesh.plan.plan import DATA
from convmesh.plan.repetition import Repetition, repetition
from convmesh.plan.weighted import WEIGHTED

REGION = "region"
"""Name of a second group of the data axis: its exchanges and the sums of gradients are not to wait for each other."""

_DATA_AXIS, _RECOMPUTED = "_convmesh_data_axis", "_convmesh_recomputed"


def parallelize(
    network: nn.Module,
    plan: Plan,
    *,
    num_samples: int = 2,
    groups: Mapping[str, Any] | None = None,
    graph: Graph | None = None,
) -> nn.Module:
    """Splits a network by channels, along ``channel`` and where its plan says so ``data``, and recomputes its blocks.

    All ranks call it with equal networks.

    Args:
        network: Changed in place; its parameters and buffers are equal on all ranks.
        plan: The plan; it must note the network that it was made for.
        num_samples: Samples with which the network is read; any number that it takes.
        groups: Process group of this rank per axis of the mesh, and under ``REGION`` a second one of the data axis;
            made from the mesh if left out.
        graph: Of the network, if it has been read already.

    Returns:
        The network.

    Raises:
        ConfigError: If the plan does not fit the ranks.
        ModelError: If the network is not the plan's, or can't be split so.
        MistakeList: If several things are wrong.
    """
    if plan.network is None:
        raise ConfigError("the plan does not say what network it is for", fix="Make it with plan_by_rule(graph, mesh)")
    unsplit = [axis for axis, size in plan.mesh.sizes.items() if size > 1 and axis not in ("data", CHANNEL)]
    if unsplit:
        raise ConfigError(
            f"networks are split along data and channel only, not along '{unsplit[0]}'", got=str(plan.mesh)
        )
    if split_of(network) is not None or hasattr(network, _RECOMPUTED):
        raise ModelError("the network is split already", fix="Build it anew")
    graph = graph or trace(network, (num_samples, *plan.network.input_shape))
    raise_all(plan_mismatches(plan, graph, mesh=plan.mesh))
    if groups is None and plan.mesh.size("data") > 1:
        object.__setattr__(network, _DATA_AXIS, DataAxis(make_group(plan, "data")))
    resolved = resolve(graph, plan)
    raise_all(refusals(network, resolved))
    if resolved.split_axes:
        is_last = _is_channels_last(network)
        given = groups or {}
        channel = data = None
        if plan.mesh.size(CHANNEL) > 1:
            channel = given[CHANNEL] if groups is not None else make_group(plan, CHANNEL)
        if resolved.region is not None:
            data = SampleAxis(given[REGION] if groups is not None else make_group(plan, DATA), channels_last=is_last)
        apply(network, resolved, ChannelAxis(channel, channels_last=is_last), data)
    if resolved.recomputed:
        recompute(network, resolved.recomputed)
        object.__setattr__(network, _RECOMPUTED, True)
    return network


def refusals(network: nn.Module, resolved: ResolvedPlan) -> list[ConvMeshError]:
    """What of a resolved plan can't be done with the modules of a network.

    Args:
        network: Not changed.
        resolved: The plan, applied to the graph of this network.

    Returns:
        One error per thing.
    """
    return refused_blocks(network, resolved.recomputed)


def reduce_gradients(network: nn.Module) -> None:
    """Sums the gradients over the data axis, after the last backward of an update; all ranks call it.

    Every rank back-propagates its own samples' losses divided by the number of samples of the *global* batch. Gradients
    of split parameters, and of whole ones, are right on the channel axis already, and so are those of parameters that
    are split along the data axis.

    Args:
        network: Split by ``parallelize``.

    Raises:
        ModelError: If it is not.
    """
    axis, split = getattr(network, _DATA_AXIS, None), split_of(network)
    if axis is None and split is None:
        raise ModelError("this network is not split", fix="Split it with convmesh.parallelize(network, plan)")
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    if axis is not None:
        for name, gradient in gradients.items():
            if split is None or not split.is_of_data(name):
                axis.sum_(gradient, purpose="gradients")
    if split is not None:
        split.equalize_(gradients)


def gather_state(network: nn.Module) -> Arrays:
    """Whole parameters and buffers of a split network, by the names of the network it was made of; all ranks call it.

    Args:
        network: Split by ``parallelize``.

    Returns:
        Arrays by name.
    """
    split, layer = split_of(network), regrouped_of(network)
    tensors = export_network(network)
    tensors = tensors if split is None else split.gather(tensors)
    return tensors if layer is None else layer.to_original(tensors)


def apply(
    network: nn.Module, resolved: ResolvedPlan, axis: ChannelAxis, data_axis: SampleAxis | None = None
) -> nn.Module:
    """Replaces what a resolved plan splits.

    Args:
        network: Changed in place.
        resolved: The plan, applied to the graph of this network.
        axis: The channel axis.
        data_axis: The data axis, if channels are split along it.

    Returns:
        The network.

    Raises:
        ModelError: If a module that has to be replaced holds more than its operator.
    """
    shards: dict[str, ParameterShard] = {}
    of_data, dropouts = None, []
    calls: dict[str, dict[int, Call]] = {}
    if axis.size > 1:
        shards = _cut_parameters(network, resolved, axis)
        _replace_all(network, resolved, axis, calls)
        _sum_gradients(network, resolved, axis)
        _keep_zeros(network, shards, axis)
    if data_axis is not None and resolved.region is not None:
        of_data = Parts(data_axis, _cut_parameters(network, resolved.region, data_axis))
        _replace_all(network, resolved.region, data_axis, calls)
        _keep_zeros(network, of_data.shards, data_axis)
        shards |= of_data.shards
        names = [node.module for node in resolved.graph if resolved.region.operators[node.name].split == "channels"]
        modules = (network.get_submodule(name) for name in names)
        dropouts = [module for module in modules if isinstance(module, ShardedDropout)]
    for path, of_module in calls.items():
        replace_calls(network.get_submodule(path), of_module)
    note_split(network, ChannelSplit(resolved, axis, shards, of_data, tuple(dropouts)))
    return network


def _replace_all(
    network: nn.Module, resolved: ResolvedPlan, axis: ChannelAxis, calls: dict[str, dict[int, Call]]
) -> None:
    again = repetition(resolved)
    for node in resolved.graph:
        entry = resolved.operators[node.name]
        if entry.changes_nothing and node.kind not in ("dropout", "group_norm"):
            continue
        if node.kind in WEIGHTED and entry.split != "whole":
            own = _own_parameters(network, node)
            _replace(network, node, ShardedWeighted(node, entry, axis, own, again=again))
            continue
        taken = entry.taken
        if node.kind == "dropout" and isinstance(taken, Shard):
            _replace(network, node, ShardedDropout(node, taken, axis))
        elif node.kind == "group_norm" and isinstance(taken, Shard):
            _replace(network, node, ShardedGroupNorm(node, taken, axis, _own_parameters(network, node)))
        elif node.kind == "instance_norm" and entry.shards:
            _tell_width(network.get_submodule(node.module), len(next(iter(entry.shards.values())).lists[axis.position]))
        if entry.along or node.call is not None:
            call = calls.setdefault(node.module, {}).setdefault(node.call or 0, Call(node))
            _change_call(call, node, entry, axis, again)
        if node.call is None:
            _change_at_border(network, node, entry, axis, again)


def make_group(plan: Plan, axis: str) -> Any:
    """This rank's process group along an axis of a plan's mesh, over all ranks that were initialised.

    Args:
        plan: The plan.
        axis: An axis of its mesh.

    Returns:
        The group.

    Raises:
        ConfigError: If the mesh has another number of ranks.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks != plan.mesh.num_ranks:
        raise ConfigError(
            f"the plan's mesh {plan.mesh} does not fit the ranks that were started",
            got=num_ranks,
            expected=plan.mesh.num_ranks,
            fix=f"Start {plan.mesh.num_ranks} ranks and call torch.distributed.init_process_group first",
        )
    own = None
    for ranks in plan.mesh.groups(axis):
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own = group
    return own


def _cut_parameters(network: nn.Module, resolved: ResolvedPlan, axis: ChannelAxis) -> dict[str, ParameterShard]:
    tensors: dict[str, Tensor] = {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(network.named_buffers(remove_duplicate=False)),
    }
    aliases: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        aliases.setdefault(id(tensor), []).append(name)
    shards: dict[str, ParameterShard] = {}
    for name, shard in resolved.parameters.items():
        if name in shards:
            continue
        names = aliases[id(tensors[name])]
        _refuse_torn(names, resolved)
        whole = tensors[name]
        part = axis.own(whole.detach(), shard.lists, dim=shard.dim)
        tensor = nn.Parameter(part, requires_grad=whole.requires_grad) if isinstance(whole, nn.Parameter) else part
        for alias in names:
            _set_tensor(network, alias, tensor)
            tensors.pop(alias)
            shards[alias] = shard
        del whole
    return shards


def _refuse_torn(names: list[str], resolved: ResolvedPlan) -> None:
    """Refuses one parameter of several names that operators would split differently."""
    used = {parameter.name for parameter in resolved.graph.parameters} & set(names)
    if len({resolved.parameters.get(name) for name in used}) > 1:
        raise ModelError(
            "one parameter is shared by operators that split it differently",
            got=" and ".join(sorted(used)),
            fix="Keep all of them whole",
        )


def _set_tensor(network: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = network.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = tensor  # type: ignore[assignment]
    else:
        owner._buffers[leaf] = tensor
    if leaf == "running_mean":
        _tell_width(owner, tensor.shape[0])


def _tell_width(module: nn.Module, num_channels: int) -> None:
    # Norms compare it with their input.
    if isinstance(getattr(module, "num_features", None), int):
        module.num_features = num_channels  # type: ignore[assignment]


def _own_parameters(network: nn.Module, node: Node) -> dict[str, nn.Parameter | None]:
    return dict(network.get_submodule(node.module)._parameters)


def _replace(network: nn.Module, node: Node, module: nn.Module) -> None:
    old = network.get_submodule(node.module)
    surplus = sorted(old.state_dict().keys() - module.state_dict().keys())
    if surplus:
        raise ModelError(
            f"{node.name} can't be replaced: its module holds more than the operator needs", got=", ".join(surplus)
        )
    module.train(old.training)
    for hook in old._forward_pre_hooks.values():
        if isinstance(hook, _BeforeHook):
            module.register_forward_pre_hook(hook)
    for after in old._forward_hooks.values():
        if isinstance(after, _AfterHook):
            module.register_forward_hook(after)
    path, _, leaf = node.module.rpartition(".")
    network.get_submodule(path)._modules[leaf] = module


def _change_at_border(network: nn.Module, node: Node, entry: Resolved, axis: ChannelAxis, again: Repetition) -> None:
    module = network.get_submodule(node.module) if node.module else network
    # What is split along the data axis has all channels of the channel axis, and the other way round: the axis along
    # which the operator itself is split makes its changes next to it, inside of those of the other.
    samples = entry.split == "samples"
    if entry.before.kind != "none":
        before = _BeforeHook(entry.before, axis, spared=again.spares_before(node.name))
        module.register_forward_pre_hook(before, prepend=samples)
    if entry.after.kind != "none":
        after = _AfterHook(entry.after, axis, spared=again.spares_after(node.name))
        module.register_forward_hook(after, prepend=not samples and axis.name == DATA)


def _change_call(call: Call, node: Node, entry: Resolved, axis: ChannelAxis, again: Repetition) -> None:
    """The changes at the border of a call, in the order of `_change_at_border`, and what is done in its place."""
    if entry.along:
        call.work = Along(node, entry.along, axis, spared=again.spares_along(node.name))
    if node.call is None:
        return
    samples = entry.split == "samples"
    if entry.before.kind != "none":
        before = partial(redistribute, change=entry.before, axis=axis, spared=again.spares_before(node.name))
        call.before.insert(0 if samples else len(call.before), before)
    if entry.after.kind != "none":
        after = partial(redistribute, change=entry.after, axis=axis, spared=again.spares_after(node.name))
        call.after.insert(0 if not samples and axis.name == DATA else len(call.after), after)


class _BeforeHook:
    def __init__(self, change: Change, axis: ChannelAxis, *, spared: bool) -> None:
        self._change, self._axis, self._spared = change, axis, spared

    def __call__(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (redistribute(inputs[0], self._change, self._axis, spared=self._spared), *inputs[1:])


class _AfterHook:
    def __init__(self, change: Change, axis: ChannelAxis, *, spared: bool) -> None:
        self._change, self._axis, self._spared = change, axis, spared

    def __call__(self, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return redistribute(output, self._change, self._axis, spared=self._spared)


def _sum_gradients(network: nn.Module, resolved: ResolvedPlan, axis: ChannelAxis) -> None:
    """Whole parameters that every rank uses for own channels only: their gradients are summed as they are made."""
    parameters = dict(network.named_parameters(remove_duplicate=False))
    for name in dict.fromkeys(name for entry in resolved.operators.values() for name in entry.summed):
        parameters[name].register_hook(axis.all_reduce)


def _keep_zeros(network: nn.Module, shards: Mapping[str, ParameterShard], axis: ChannelAxis) -> None:
    """A cut weight is another parameter than the one that was made to keep its structural zeros."""
    layer = regrouped_of(network)
    if layer is not None and layer.weight in shards:
        shard = shards[layer.weight]
        own = axis.own(torch.from_numpy(layer.convolution.is_weight), shard.lists, dim=shard.dim)
        keep_zeros(network.get_parameter(layer.weight), own)


def _is_channels_last(network: nn.Module) -> bool:
    return any(
        parameter.ndim == 4
        and not parameter.is_contiguous()
        and parameter.is_contiguous(memory_format=torch.channels_last)
        for parameter in network.parameters()
    )

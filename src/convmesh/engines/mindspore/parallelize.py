"""Splitting a network along channels: cells are replaced in place, by others of the same name.

Parameters are cut where they lie: each stays the object that it is and gets this rank's part as its value, so that
whoever refers to it has the part.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn

from convmesh.engines.contract import Arrays
from convmesh.engines.mindspore.along import share_along
from convmesh.engines.mindspore.channel_axis import ChannelAxis, channel_axis, hide
from convmesh.engines.mindspore.channel_split import ChannelSplit, note_split, split_of
from convmesh.engines.mindspore.collectives import DataAxis, data_axis
from convmesh.engines.mindspore.layers import ShardedWeighted
from convmesh.engines.mindspore.layers_local import DROPOUTS, ExchangedDropout, ShardedDropout, narrow_norm
from convmesh.engines.mindspore.own_loop import Reduction, own_world
from convmesh.engines.mindspore.recompute import recompute
from convmesh.engines.mindspore.recompute import refusals as refused_blocks
from convmesh.engines.mindspore.redistribution import redistribution
from convmesh.engines.mindspore.regroup import regrouped_of, replace_cell, zeros_keeper
from convmesh.engines.mindspore.sample_axis import SampleAxis
from convmesh.engines.mindspore.state import export_network, named_parameters
from convmesh.engines.mindspore.trace import trace
from convmesh.errors import ConfigError, ConvMeshError, ModelError, raise_all
from convmesh.graph import Graph, Node
from convmesh.plan import Plan, Resolved, ResolvedPlan, resolve
from convmesh.plan.network import plan_mismatches
from convmesh.plan.placement import ParameterShard, Shard
from convmesh.plan.regrouping import RegroupedLayer
from convmesh.plan.weighted import UNSPLIT, WEIGHTED


def parallelize(
    network: nn.Cell,
    plan: Plan,
    *,
    axis: ChannelAxis | None = None,
    num_samples: int = 2,
    own_loop: bool = True,
    graph: Graph | None = None,
) -> nn.Cell:
    """Splits a network by channels and recomputes the blocks of its plan; ranks call it with equal networks.

    Args:
        network: Changed in place; its parameters and buffers are equal on all ranks.
        plan: The plan; it must note the network that it was made for.
        axis: The channel axis, or None; for a plan that splits channels along the data axis, a `SampleAxis`. A loop of
            one's own leaves it out.
        num_samples: Samples with which the network is read; any number that it takes.
        own_loop: Whether the axes are made from the plan's mesh, for a loop of one's own.
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
    if split_of(network) is not None or _RECOMPUTED in network.__dict__:
        raise ModelError("the network is split already", fix="Build it anew")
    graph = graph or trace(network, (num_samples, *plan.network.input_shape))
    raise_all(plan_mismatches(plan, graph, mesh=plan.mesh))
    resolved = resolve(graph, plan)
    raise_all(refusals(network, resolved))
    if resolved.region is not None and not isinstance(axis, SampleAxis):
        raise ConfigError(
            "on MindSpore channels are split along the axis 'data' by convmesh train only: graphs know the numbers of "
            "samples, and a loop of one's own would have to tell them",
            fix="Use convmesh train, PyTorch, or the axis 'channel'",
        )
    if own_loop:
        world = own_world(plan.mesh)
        hide(network, **{_DATA_AXIS: data_axis(world)})
        axis = channel_axis(world)
    if axis is not None:
        apply(network, resolved.region or resolved, axis)
    if resolved.recomputed:
        recompute(network, resolved.recomputed)
        hide(network, **{_RECOMPUTED: True})
    return network


def reduce_gradients(network: nn.Cell, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Sums gradients over the data axis, once per update; all ranks call it.

    Every rank differentiates its own samples' losses; they, or the sums, are divided by the number of samples of the
    *global* batch. Gradients of what is split are right on the channel axis already; those of whole parameters that
    every rank uses for own channels only are summed over it. It waits asleep until they are computed: so it is best
    called before anything computes with them.

    Args:
        network: Split by ``parallelize``.
        gradients: In the order of ``network.trainable_params()``.

    Returns:
        The sums, in the same order.

    Raises:
        ModelError: If the network is not split, or there are not as many gradients as trainable parameters.
    """
    axis: DataAxis | None = network.__dict__.get(_DATA_AXIS)
    if axis is None:
        raise ModelError("this network is not split", fix="Split it with convmesh.parallelize(network, plan)")
    if _REDUCTION not in network.__dict__:
        hide(network, **{_REDUCTION: Reduction(network, axis, split_of(network))})
    reduction: Reduction = network.__dict__[_REDUCTION]
    return reduction(gradients)


def gather_state(network: nn.Cell) -> Arrays:
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


_DATA_AXIS, _REDUCTION, _RECOMPUTED = "convmesh_data_axis", "convmesh_reduction", "convmesh_recomputed"


def refusals(network: nn.Cell, resolved: ResolvedPlan) -> list[ConvMeshError]:
    """What of a resolved plan can't be done with the cells of a network.

    Args:
        network: Not changed.
        resolved: The plan, applied to the graph of this network.

    Returns:
        One error per cell.
    """
    if resolved.region is not None and resolved.num_ranks > 1:
        return [
            ConfigError(
                "on MindSpore channels are split along one axis, 'channel' or 'data'",
                got=str(resolved.plan.mesh),
                fix="Use --engine torch, or leave one of the axes out of the plan",
            )
        ]
    cells = dict(network.cells_and_names())
    operators = (resolved.region or resolved).operators
    return [
        error
        for node in resolved.graph
        for error in _refusals(node, operators[node.name], cells.get(node.module, network))
    ] + refused_blocks(network, resolved.recomputed)


def apply(network: nn.Cell, resolved: ResolvedPlan, axis: ChannelAxis) -> nn.Cell:
    """Replaces what a resolved plan splits.

    Args:
        network: Changed in place; ``refusals`` has found nothing.
        resolved: The plan, applied to the graph of this network.
        axis: The axis that it tells of.

    Returns:
        The network.
    """
    cells = dict(network.cells_and_names())
    shards = _cut_parameters(network, resolved, axis)
    for node in resolved.graph:
        entry = resolved.operators[node.name]
        if node.kind in WEIGHTED and entry.split not in UNSPLIT:
            cell = ShardedWeighted(node, entry, axis, dict(cells[node.module]._params))
            _keep_zeros(cell, node, entry, regrouped_of(network), axis)
            replace_cell(cells, node.module, cell)
            continue
        if entry.along:
            share_along(cells[node.module], node, entry.along, axis)
        taken = entry.taken
        if isinstance(taken, Shard):
            if node.kind == "dropout" and isinstance(axis, SampleAxis):
                replace_cell(cells, node.module, ExchangedDropout(cells[node.module], taken, axis, node))
            elif node.kind == "dropout":
                replace_cell(cells, node.module, ShardedDropout(cells[node.module], taken, axis, node))
            elif node.kind in ("batch_norm", "group_norm", "instance_norm"):
                narrow_norm(cells[node.module], taken, axis)
        if entry.before.kind != "none" or entry.after.kind != "none":
            _change_at_border(cells[node.module], entry, axis)
    for cell in cells.values():
        cell.compile_cache.clear()  # What was compiled before is of the whole network.
    note_split(network, ChannelSplit(resolved, axis, shards))
    return network


def _refusals(node: Node, entry: Resolved, cell: nn.Cell) -> Iterator[ConvMeshError]:
    if node.kind in WEIGHTED and entry.split not in UNSPLIT:
        own = {parameter.name.rpartition(".")[2] for parameter in node.parameters}
        surplus = sorted({name.partition(".")[0] for name in _names_below(cell)} - own)
        if surplus:
            yield ModelError(
                f"{node.name} can't be replaced: its cell holds more than the operator needs", got=", ".join(surplus)
            )
    if entry.split == "channels" and node.kind == "group_norm" and not isinstance(cell, nn.GroupNorm):
        yield ModelError(
            f"{node.name} can't normalise own channels: it is no nn.GroupNorm",
            got=type(cell).__name__,
            fix=f"Use nn.GroupNorm, or keep the layer whole in the plan: '{node.name}: {{channel: whole}}'",
        )
    if entry.along and node.kind == "layer_norm" and not isinstance(cell, nn.LayerNorm):
        yield ModelError(
            f"{node.name} can't normalise own channels: it is no nn.LayerNorm",
            got=type(cell).__name__,
            fix=f"Use nn.LayerNorm, or keep the layer whole in the plan: '{node.name}: {{channel: whole}}'",
        )
    if entry.split == "channels" and node.kind == "dropout" and not isinstance(cell, DROPOUTS):
        yield ModelError(
            f"{node.name} can't drop own channels only: it is no nn.Dropout, nn.Dropout2d or nn.Dropout3d",
            got=type(cell).__name__,
            fix=f"Use one of them, or keep the layer whole in the plan: '{node.name}: {{channel: whole}}'",
        )


def _names_below(cell: nn.Cell) -> list[str]:
    return list(named_parameters(cell))


def _cut_parameters(network: nn.Cell, resolved: ResolvedPlan, axis: ChannelAxis) -> dict[str, ParameterShard]:
    named = named_parameters(network)
    shards = resolved.parameters
    for name, shard in shards.items():
        _cut(named[name], axis.own(named[name].asnumpy(), shard.lists, dim=shard.dim))
    return shards


def _cut(parameter: Parameter, part: np.ndarray) -> None:
    parameter.set_data(Tensor(part, parameter.dtype), slice_shape=True)


def _keep_zeros(
    cell: ShardedWeighted, node: Node, entry: Resolved, layer: RegroupedLayer | None, axis: ChannelAxis
) -> None:
    if layer is None or layer.node.name != node.name or not layer.convolution.num_zeros:
        return
    shard = entry.shards[layer.weight]

    def own(is_weight: np.ndarray) -> np.ndarray:
        part: np.ndarray = axis.own(is_weight, shard.lists, dim=shard.dim)
        return part

    cell.keep_zeros_by(zeros_keeper(layer, cell.kernel, own=own))


def _change_at_border(cell: nn.Cell, entry: Resolved, axis: ChannelAxis) -> None:
    hide(
        cell,
        convmesh_construct=cell.construct,
        convmesh_before=redistribution(entry.before, axis),
        convmesh_after=redistribution(entry.after, axis),
        construct=types.MethodType(_changed_construct, cell),
    )


def _changed_construct(self, x, *others):  # type: ignore[no-untyped-def]
    return self.convmesh_after(self.convmesh_construct(self.convmesh_before(x), *others))

"""Recomputing blocks of a network: MindSpore's own ``Cell.recompute``, made exact for batch norm.

MindSpore 2.10 recomputes every primitive that the backward needs, the batch norm among them, which changes its running
statistics each time it runs. So within recomputed blocks it changes values that nobody reads but the forward, which
brings them into the statistics once: nothing in the backward needs that step, so that it is not run again.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence

from mindspore import Parameter, nn, ops

from convmesh.engines.mindspore.channel_axis import hide
from convmesh.errors import ConvMeshError, ModelError
from convmesh.graph import Block

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)  # A BatchNorm3d holds one of two dims.


def recompute(network: nn.Cell, blocks: Sequence[Block]) -> None:
    """Makes a network keep only the inputs of blocks, and compute them again in the backward.

    Args:
        network: Changed in place; its cells and their names stay. ``refusals`` has found nothing.
        blocks: Blocks of its graph that share no operator.
    """
    cells = dict(network.cells_and_names())
    for block in blocks:
        *first, last = _cells(network, block)
        for cell in first:
            cell._recompute(output_recompute=True)
        last.recompute()
        for path in block.modules if not block.is_run else [_path(cells, cell) for cell in (*first, last)]:
            for name, cell in cells.items():
                if isinstance(cell, _NORMS) and f"{name}.".startswith(f"{path}."):
                    _learn_once(cell)
    for cell in cells.values():
        cell.compile_cache.clear()


def refusals(network: nn.Cell, blocks: Sequence[Block]) -> list[ConvMeshError]:
    """Blocks that can't be recomputed exactly.

    Args:
        network: Not changed.
        blocks: Blocks of its graph.

    Returns:
        One error per block and reason.
    """
    return [error for block in blocks for error in _refusals(network, block)]


def _refusals(network: nn.Cell, block: Block) -> Iterator[ConvMeshError]:
    cells = dict(network.cells_and_names())
    container = cells.get(block.modules[0].rpartition(".")[0], network)
    if block.is_run and type(container).construct is not nn.SequentialCell.construct:
        yield ModelError(
            f"the cells {block.name} can't be recomputed together: only an nn.SequentialCell calls its children one "
            "after the other",
            got=type(container).__name__,
            fix="Make it an nn.SequentialCell, or name other blocks in 'recompute'",
        )


def _cells(network: nn.Cell, block: Block) -> list[nn.Cell]:
    cells = dict(network.cells_and_names())
    first, last = block.modules
    if not block.is_run:
        return [cells[first]]
    names = list(cells[first.rpartition(".")[0]]._cells)
    begin, end = names.index(first.rpartition(".")[2]), names.index(last.rpartition(".")[2])
    container = cells[first.rpartition(".")[0]]
    return [container._cells[name] for name in names[begin : end + 1]]


def _path(cells: dict[str, nn.Cell], wanted: nn.Cell) -> str:
    return next(name for name, cell in cells.items() if cell is wanted)


def _learn_once(cell: nn.Cell) -> None:
    def scratch(role: str) -> Parameter:
        return Parameter(ops.zeros_like(cell.moving_mean), name=f"again.{role}.{cell.moving_mean.name}",
                         requires_grad=False)  # fmt: skip

    hide(
        cell,
        # The momentum of 1 leaves the statistics of this batch, as the device takes them.
        convmesh_normalize=ops.BatchNorm(is_training=True, epsilon=cell.eps, momentum=1.0),
        convmesh_mean=scratch("mean"),
        convmesh_variance=scratch("variance"),
        construct=types.MethodType(_construct_once, cell),
    )


def _construct_once(self, x):  # type: ignore[no-untyped-def]
    if self.use_batch_statistics or (self.use_batch_statistics is None and self.training):
        # An infinite value of an earlier update would stay.
        ops.assign(self.convmesh_mean, ops.zeros_like(self.convmesh_mean))
        ops.assign(self.convmesh_variance, ops.zeros_like(self.convmesh_variance))
        y = self.convmesh_normalize(x, self.gamma, self.beta, self.convmesh_mean, self.convmesh_variance)[0]
        share = self.momentum
        ops.assign(self.moving_mean, self.moving_mean * (1.0 - share) + self.convmesh_mean * share)
        ops.assign(self.moving_variance, self.moving_variance * (1.0 - share) + self.convmesh_variance * share)
        return y
    shape = x.shape
    if len(shape) == 2:
        x = ops.reshape(x, (shape[0], shape[1], 1, 1))
    elif len(shape) == 3:
        x = ops.reshape(x, (shape[0], shape[1], shape[2], 1))
    y = self.bn_infer(x, self.gamma, self.beta, self.moving_mean, self.moving_variance)[0]
    return ops.reshape(y, shape)

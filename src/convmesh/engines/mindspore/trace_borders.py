"""Marks in the compiled graph where each call of a cell begins and ends.

MindSpore names each primitive's cell itself, but what a Python function contains (``ops.relu(x)``, ``x + y``) is parsed
once and keeps the name of the first cell that called it. So every cell's ``construct`` is replaced while it is compiled
by one that passes its tensors through primitives that do nothing but carry the path of the cell.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from mindspore import Tensor, nn
from mindspore.ops import PrimitiveWithInfer, prim_attr_register

BORDER = "Border"
"""Name of the primitive; its attributes are ``path`` and ``side``, ``"enter"`` or ``"leave"``."""

DIRECT = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Sigmoid)
"""Cells that call primitives of their own and no function: MindSpore names those right, and they need no mark."""

_OWN = "convmesh_construct"
_ENTER, _LEAVE = "convmesh_enter", "convmesh_leave"


class Border(PrimitiveWithInfer):
    """Passes a tensor on.

    Args:
        path: Path of the cell.
        side: ``"enter"`` or ``"leave"``.
    """

    @prim_attr_register
    def __init__(self, path: str, side: str) -> None:
        self.add_prim_attr("path", path)
        self.add_prim_attr("side", side)

    def infer_shape(self, shape: Any) -> Any:
        """The shape of the input."""
        return shape

    def infer_dtype(self, dtype: Any) -> Any:
        """The data type of the input."""
        return dtype


def _bordered_construct(self, *inputs, **options):  # type: ignore[no-untyped-def]
    inner = inputs[:0]
    for x in inputs:
        if isinstance(x, Tensor):
            inner += (self.convmesh_enter(x),)
        else:
            inner += (x,)
    result = self.convmesh_construct(*inner, **options)
    if isinstance(result, Tensor):
        return self.convmesh_leave(result)
    if isinstance(result, tuple):
        outer = result[:0]
        for y in result:
            if isinstance(y, Tensor):
                outer += (self.convmesh_leave(y),)
            else:
                outer += (y,)
        return outer
    return result


@contextlib.contextmanager
def borders(network: nn.Cell) -> Iterator[None]:
    """Marks the calls of all cells of a network in what is compiled meanwhile.

    Args:
        network: Any network; it is as before afterwards.

    Yields:
        Nothing.
    """
    cells = [(path, cell) for path, cell in network.cells_and_names() if type(cell) not in DIRECT]
    before = [cell.__dict__.get("construct") for _, cell in cells]
    try:
        for path, cell in cells:
            cell.__dict__[_OWN] = cell.construct
            cell.__dict__[_ENTER], cell.__dict__[_LEAVE] = Border(path, "enter"), Border(path, "leave")
            cell.__dict__["construct"] = types.MethodType(_bordered_construct, cell)
        yield
    finally:
        for (_, cell), construct in zip(cells, before, strict=True):
            for name in (_OWN, _ENTER, _LEAVE, "construct"):
                cell.__dict__.pop(name, None)
            if construct is not None:
                cell.__dict__["construct"] = construct

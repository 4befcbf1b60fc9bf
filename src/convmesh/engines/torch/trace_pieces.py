"""The second way: ``torch.fx`` finds the calls, one run tells their shapes, and each call is exported alone.

It reads networks with an operator that ``torch.export`` can't take; that operator alone becomes opaque.
"""

from __future__ import annotations

import operator as python_operators
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from convmesh.engines.torch.trace_export import ExportReader, TracedNetwork
from convmesh.graph.graph import Parameter, Shape
from convmesh.graph.operator import Operator, Port


def read_pieces(network: nn.Module, x: Tensor) -> TracedNetwork:
    """Reads a network call by call.

    Args:
        network: The network, in training mode; it is run once on ``x``, its buffers are put back.
        x: One batch.

    Returns:
        Its operators.

    Raises:
        Exception: Whatever ``torch.fx`` says of a ``forward`` that it can't follow.
    """
    module = fx.symbolic_trace(network)
    recorder = _Recorder(module)
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    try:
        with torch.no_grad():
            recorder.run(x)
    finally:
        for name, buffer in network.named_buffers():
            buffer.copy_(before[name])
    return _PieceReader(module, recorder.values).read()


class _Recorder(fx.Interpreter):
    """Runs a network and remembers the value of every node, in place changes not applied."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n] = result
        return result


class _Function(nn.Module):
    """A call of a function or method, as a module of its tensors alone."""

    def __init__(self, node: fx.Node, values: dict[fx.Node, Any], tensors: list[fx.Node]) -> None:
        super().__init__()
        self.node, self.values, self.tensors = node, values, tensors

    def forward(self, *given: Tensor) -> Any:
        known = {**self.values, **dict(zip(self.tensors, given, strict=True))}
        args = map_arg(self.node.args, known.__getitem__)
        kwargs = map_arg(self.node.kwargs, known.__getitem__)
        if self.node.op == "call_method":
            own, *rest = args
            return getattr(own, str(self.node.target))(*rest, **kwargs)
        return self.node.target(*args, **kwargs)  # type: ignore[operator]


class _PieceReader:
    def __init__(self, module: fx.GraphModule, values: dict[fx.Node, Any]) -> None:
        self.module, self.values = module, values
        self.found = TracedNetwork()
        self.results: dict[fx.Node, tuple[Port, ...]] = {}
        self.next_key = 0

    def read(self) -> TracedNetwork:
        for node in self.module.graph.nodes:
            value = self.values[node]
            if node.op == "placeholder":
                key = "input" if not self.found.operators else node.name
                self._add(node, Operator(key=key, kind="input", output_shapes=_shapes(value), dtype=_dtype(value)))
            elif node.op == "get_attr":
                self._add_own(node, value)
            elif node.op == "output":
                wanted = node.all_input_nodes
                self.found.outputs = tuple(port for source in wanted for port in self.results[source])
            elif _shapes(value):
                self._read_call(node)
        return self.found

    def _read_call(self, node: fx.Node) -> None:
        tensors = [source for source in node.all_input_nodes if isinstance(self.values[source], Tensor)]
        given = tuple(self.results[source][0] for source in tensors)
        part: nn.Module = _Function(node, self.values, tensors)
        prefix = _owner(node)
        if node.op == "call_module":
            prefix = str(node.target)
            part = self.module.get_submodule(prefix)
        elif self._is_selection(node):
            return
        try:
            program = torch.export.export(part, tuple(self.values[source].clone() for source in tensors), strict=False)
        except Exception:
            self._add_opaque(node, given, prefix)
            return
        reader = ExportReader(program, part, prefix=prefix, inputs=given, first_key=self.next_key)
        piece = reader.read()
        self.next_key = reader.next_key
        self.found.operators += piece.operators
        self.results[node] = piece.outputs

    def _is_selection(self, node: fx.Node) -> bool:
        """Whether a node takes one of several results of another."""
        source, index = (*node.args, None)[:2] if node.target is python_operators.getitem else (None, None)
        if not isinstance(source, fx.Node) or isinstance(self.values[source], Tensor) or not isinstance(index, int):
            return False
        self.results[node] = (self.results[source][index],)
        return True

    def _add(self, node: fx.Node, operator: Operator) -> None:
        self.found.operators.append(operator)
        self.results[node] = tuple((operator.key, output) for output in range(len(operator.output_shapes)))

    def _add_own(self, node: fx.Node, value: Tensor) -> None:
        trainable = isinstance(value, nn.Parameter) and value.requires_grad
        name = str(node.target)
        role = "value" if isinstance(value, nn.Parameter) else "buffer"
        own = Parameter(name, tuple(value.shape), role=role, trainable=trainable)
        operator = Operator(
            key=name,
            kind="constant" if role == "buffer" else "parameter",
            output_shapes=_shapes(value),
            parameters=(own,),
            dtype=_dtype(value),
        )
        if any(known.key == name for known in self.found.operators):
            self.results[node] = ((name, 0),)
        else:
            self._add(node, operator)

    def _add_opaque(self, node: fx.Node, given: tuple[Port, ...], prefix: str) -> None:
        key = f"op{self.next_key}"
        self.next_key += 1
        name = str(getattr(node.target, "__name__", node.target))
        parameters: tuple[Parameter, ...] = ()
        if node.op == "call_module":
            part = self.module.get_submodule(prefix)
            name = type(part).__name__
            parameters = tuple(
                Parameter(f"{prefix}.{entry}", tuple(value.shape), role="value", trainable=value.requires_grad)
                for entry, value in part.named_parameters()
            )
        value = self.values[node]
        operator = Operator(
            key=key,
            kind="opaque",
            attributes={"operator": name},
            inputs=given,
            output_shapes=_shapes(value),
            parameters=parameters,
            dtype=_dtype(value),
            module=prefix,
            origin=name,
        )
        self._add(node, operator)


def _owner(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _shapes(value: Any) -> tuple[Shape, ...]:
    entries = value if isinstance(value, list | tuple) else [value]
    return tuple(tuple(entry.shape) for entry in entries if isinstance(entry, Tensor))


def _dtype(value: Any) -> str:
    entries = value if isinstance(value, list | tuple) else [value]
    return str(next(entry.dtype for entry in entries if isinstance(entry, Tensor))).removeprefix("torch.")

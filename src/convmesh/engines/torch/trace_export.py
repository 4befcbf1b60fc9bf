"""From an exported program of PyTorch to operators."""

from __future__ import annotations

import operator as python_operators
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from convmesh.engines.torch.calls import KINDS, numbers_of
from convmesh.engines.torch.trace_call import Call, Meaning
from convmesh.engines.torch.trace_operators import OPERATORS
from convmesh.errors import ModelError
from convmesh.graph.graph import BUFFERS, Parameter, Shape
from convmesh.graph.operator import Operator, Port

_VIEWS = ("reshape", "flatten", "transpose", "split", "slice", "identity")


@dataclass
class TracedNetwork:
    """What was read of a network.

    Args:
        operators: In order of execution.
        outputs: What it returns.
    """

    operators: list[Operator] = field(default_factory=list)
    outputs: tuple[Port, ...] = ()


def read_export(program: ExportedProgram, network: nn.Module) -> TracedNetwork:
    """Reads an exported program.

    Args:
        program: What ``torch.export.export`` made of the network.
        network: The network, for what of it is trainable.

    Returns:
        Its operators, an ``input`` for each tensor that it takes.

    Raises:
        ModelError: If it changes in place a tensor that is used under another name as well.
    """
    return ExportReader(program, network).read()


class ExportReader:
    """Reads one exported program; see `read_export`.

    Args:
        program: The program.
        network: The network or the part of it that was exported.
        prefix: Where that part stands in the whole network.
        inputs: What its inputs are, if it is a part.
        first_key: Number of the first operator, so that keys are unique in the whole network.
    """

    def __init__(
        self,
        program: ExportedProgram,
        network: nn.Module,
        *,
        prefix: str = "",
        inputs: tuple[Port, ...] | None = None,
        first_key: int = 0,
    ) -> None:
        self.program = program
        self.prefix = prefix
        self.inputs = inputs
        self.next_key = first_key
        self.operators: dict[str, Operator] = {}
        self.ports: dict[fx.Node, Port] = {}
        self.own: dict[fx.Node, Parameter] = {}
        self.trainable = {name for name, value in network.named_parameters() if value.requires_grad}
        self.base: dict[fx.Node, fx.Node] = {}
        self.numbers = numbers_of(program.graph)

    def read(self) -> TracedNetwork:
        """Reads all nodes in order."""
        self._read_placeholders()
        outputs: tuple[Port, ...] = ()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._read_call(node)
            elif node.op == "output":
                outputs = tuple(self._port(result) for result in self._user_outputs(node))
        return TracedNetwork(list(self.operators.values()), outputs)

    def _read_placeholders(self) -> None:
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        given = iter(self.inputs or ())
        num_inputs = 0
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = specs[node.name]
            if spec.kind == InputKind.USER_INPUT:
                if self.inputs is not None:
                    self.ports[node] = next(given)
                    continue
                num_inputs += 1
                key = "input" if num_inputs == 1 else f"input@{num_inputs}"
                self._add(Operator(key=key, kind="input", output_shapes=_shapes(node), dtype=_dtype(node)), node)
            else:
                name = self._full(str(spec.target or node.name))
                trainable = str(spec.target) in self.trainable
                role = "value" if spec.kind == InputKind.PARAMETER else "buffer"
                self.own[node] = Parameter(name, _shapes(node)[0], role=role, trainable=trainable)

    def _user_outputs(self, node: fx.Node) -> Iterator[fx.Node]:
        wanted = set(self.program.graph_signature.user_outputs)
        for result in node.args[0]:  # type: ignore[union-attr]
            if isinstance(result, fx.Node) and result.name in wanted:
                yield result

    def _read_call(self, node: fx.Node) -> None:
        if node.target is python_operators.getitem:
            key, _ = self._port(node.args[0])
            self.ports[node] = (key, cast(int, node.args[1]))
            return
        if not isinstance(node.meta.get("val"), Tensor | list | tuple):
            return  # Assertions and numbers.
        target = node.args[0] if node.args and _in_place(node) else None
        if isinstance(target, fx.Node) and target in self.own:
            # A buffer that is counted up, such as num_batches_tracked; a second call counts it up again.
            self.own[node] = self.own[target]
            return
        meaning = self._meaning(node) or self._opaque(node)
        self._refuse_aliasing(node, meaning, target)
        shapes = _shapes(node) if meaning.kind in ("split", "opaque") else _shapes(node)[:1]
        key = f"op{self.next_key}"
        self.next_key += 1
        operator = Operator(
            key=key,
            kind=meaning.kind,
            attributes=meaning.attributes,
            inputs=tuple(self._port(source) for source in meaning.inputs),
            output_shapes=shapes,
            parameters=tuple(self._parameter(tensor, role) for role, tensor in meaning.parameters.items()),
            dtype=_dtype(node),
            module=self._full(_module_path(node)),
            origin=str(node.target),
            call=self.numbers.get(node) if meaning.kind in KINDS.values() else None,
        )
        self._add(operator, node)
        if isinstance(target, fx.Node):
            self.ports[target] = (key, 0)

    def _meaning(self, node: fx.Node) -> Meaning | None:
        name = _operator_name(node)
        if not name.startswith("aten.") or _uses_more_than_first(node):
            return None
        short = name.removeprefix("aten.").rstrip("_") if _in_place(node) else name.removeprefix("aten.")
        rule = OPERATORS.get(short)
        if rule is None:
            return None
        return rule(Call(short, _bind(node), output_shapes=_shapes(node), own=self.own.__contains__))

    def _opaque(self, node: fx.Node) -> Meaning:
        tensors = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
        own = {f"value{index}": tensor for index, tensor in enumerate(tensors) if tensor in self.own}
        inputs = tuple(tensor for tensor in tensors if tensor not in self.own)
        return Meaning("opaque", {"operator": str(node.target)}, inputs, own)

    def _refuse_aliasing(self, node: fx.Node, meaning: Meaning, target: Any) -> None:
        """An operator in place changes every tensor that shares memory with its target: none may be used later."""
        if meaning.kind in _VIEWS and meaning.inputs:
            self.base[node] = self.base.get(meaning.inputs[0], meaning.inputs[0])
        if not isinstance(target, fx.Node):
            return
        base = self.base.get(target, target)
        family = {other for other, root in self.base.items() if root == base} | {base}
        later = set(_after(node))
        for other in family - {target, node}:
            if any(user in later for user in other.users):
                raise ModelError(
                    f"{_operator_name(node)} in '{self._full(_module_path(node)) or 'forward'}' changes in place a "
                    "tensor that is used under another name later",
                    fix="Use the variant that is not in place there",
                )
        self.base[node] = base

    def _port(self, node: Any) -> Port:
        if node in self.own and node not in self.ports:
            own = self.own[node]
            key = own.name
            kind = "constant" if own.role == "buffer" else "parameter"
            parameters = (own,)
            self._add(
                Operator(key=key, kind=kind, output_shapes=(own.shape,), parameters=parameters, dtype=_dtype(node)),
                node,
            )
        return self.ports[node]

    def _parameter(self, node: fx.Node, role: str) -> Parameter:
        own = self.own[node]
        role = own.role if role.startswith("value") else role
        return Parameter(own.name, own.shape, role=role, trainable=own.trainable and role not in BUFFERS)

    def _add(self, operator: Operator, node: fx.Node) -> None:
        self.operators[operator.key] = operator
        self.ports[node] = (operator.key, 0)

    def _full(self, path: str) -> str:
        return ".".join(part for part in (self.prefix, path) if part)


def _shapes(node: fx.Node) -> tuple[Shape, ...]:
    value = node.meta["val"]
    tensors = [value] if isinstance(value, Tensor) else [entry for entry in value if isinstance(entry, Tensor)]
    return tuple(tuple(int(size) for size in tensor.shape) for tensor in tensors)


def _dtype(node: fx.Node) -> str:
    value = node.meta["val"]
    first = value if isinstance(value, Tensor) else next(entry for entry in value if isinstance(entry, Tensor))
    return str(first.dtype).removeprefix("torch.")


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _operator_name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(packet)


def _in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.arguments:
        return False
    alias = schema.arguments[0].alias_info
    return bool(alias is not None and alias.is_write)


def _uses_more_than_first(node: fx.Node) -> bool:
    """Whether someone takes a second result, such as the places of the maxima, of what has one by its kind."""
    if _operator_name(node).removeprefix("aten.") in ("split", "split_with_sizes", "chunk", "tensor_split"):
        return False
    return any(
        user.target is python_operators.getitem and user.args[1] != 0 and bool(user.users) for user in node.users
    )


def _bind(node: fx.Node) -> Mapping[str, Any]:
    schema = node.target._schema  # type: ignore[union-attr]
    bound: dict[str, Any] = {}
    for index, argument in enumerate(schema.arguments):
        if index < len(node.args):
            bound[argument.name] = node.args[index]
        else:
            bound[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return bound


def _after(node: fx.Node) -> Iterator[fx.Node]:
    following = node.next
    while following.op != "root":
        yield following
        following = following.next

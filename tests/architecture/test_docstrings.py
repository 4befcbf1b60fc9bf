"""Whatever is public says what it does, and what it says about arguments and errors is true."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "convmesh").rglob("*.py"))

CONTRACT = ROOT / "src" / "convmesh" / "engines" / "contract.py"

# Signs of a mistake in ConvMesh itself: nobody handles them.
OWN_MISTAKES = {"AssertionError", "NotImplementedError"}

# Up to this many parameters, a sentence that names them reads better than a list.
MAX_PARAMETERS_WITHOUT_ARGS = 3

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def public_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Functions and methods of public names, not those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try):
            yield from public_functions(node, prefix)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if isinstance(node, ast.ClassDef):
                yield from public_functions(node, f"{prefix}{node.name}.")
            else:
                yield f"{prefix}{node.name}", node


def public_classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node


def parameters(function: Function) -> list[str]:
    arguments = function.args
    names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [arg.arg for arg in (arguments.vararg, arguments.kwarg) if arg]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def documented_arguments(docstring: str) -> list[str]:
    """Names listed in the section ``Args`` of a Google-style docstring."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n|\n)*)", docstring + "\n", re.MULTILINE)
    return re.findall(r"^    \*{0,2}(\w+)[^:\n]*:", section.group(1), re.MULTILINE) if section else []


def own_errors(function: Function) -> set[str]:
    """Names of errors that a function raises itself, outside inner functions."""
    raised: set[str] = set()
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop()
        if isinstance(node, Function | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            target = node.exc.func
            name = (
                target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""
            )
            raised |= {name} if name.endswith("Error") else set()
        stack.extend(ast.iter_child_nodes(node))
    return raised


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_everything_public_is_documented(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    missing = [] if ast.get_docstring(tree) or not tree.body else ["the module"]
    missing += [node.name for node in public_classes(tree) if not ast.get_docstring(node)]
    missing += [name for name, function in public_functions(tree) if not is_described(function)]
    assert not missing


def test_the_rules_find_what_they_look_for() -> None:
    told = '''def f(a, *, b, **rest):
    """Does.

    Args:
        a: First: with a colon.
        b (int): Second,
            over two lines.
        **rest: More.

    Returns:
        c: no argument.
    """
    def inner():
        raise KeyError("not its own")
    if a:
        raise errors.DataError("own")
'''
    ((name, function),) = public_functions(ast.parse(told))
    assert name == "f"
    assert documented_arguments(ast.get_docstring(function) or "") == ["a", "b", "rest"] == parameters(function)
    assert own_errors(function) == {"DataError"}
    assert "update" in contract_methods()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_arguments_are_described_and_exist(path: Path) -> None:
    wrong = []
    for name, function in public_functions(ast.parse(path.read_text("utf-8"))):
        wanted, listed = parameters(function), documented_arguments(ast.get_docstring(function) or "")
        if listed and set(listed) != set(wanted):
            wrong.append(f"{name}: Args lists {listed}, the function takes {wanted}")
        if not listed and len(wanted) > MAX_PARAMETERS_WITHOUT_ARGS and not is_told_elsewhere(name, function):
            wrong.append(f"{name}: {len(wanted)} parameters and no Args")
    assert not wrong


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_errors_are_described(path: Path) -> None:
    wrong = []
    for name, function in public_functions(ast.parse(path.read_text("utf-8"))):
        docstring = ast.get_docstring(function) or ""
        untold = sorted(error for error in own_errors(function) - OWN_MISTAKES if error not in docstring)
        if untold and not is_told_elsewhere(name, function):
            wrong.append(f"{name}: raises {', '.join(untold)}, and its docstring doesn't say so")
    assert not wrong


def is_described(function: Function) -> bool:
    return bool(ast.get_docstring(function)) or decorated(function, "overload")


def is_command(function: Function) -> bool:
    """Whether the docstring is the help of a command, whose options carry their own help."""
    return any("typer" in ast.unparse(arg) or "Option" in ast.unparse(arg) for arg in annotations(function))


def is_told_elsewhere(name: str, function: Function) -> bool:
    """Whether a method is described by the contract that its class implements, or options by their own help."""
    return is_command(function) or ("." in name and name.rpartition(".")[2] in contract_methods())


@cache
def contract_methods() -> frozenset[str]:
    names = (name for name, _ in public_functions(ast.parse(CONTRACT.read_text("utf-8"))))
    return frozenset(name.rpartition(".")[2] for name in names if "." in name)


def decorated(function: Function, name: str) -> bool:
    return any(ast.unparse(decorator).split(".")[-1] == name for decorator in function.decorator_list)


def annotations(function: Function) -> list[ast.expr]:
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return [arg.annotation for arg in arguments if arg.annotation is not None]

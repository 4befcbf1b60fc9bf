"""Files and functions stay small enough to read at once."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "convmesh").rglob("*.py"))
FILES = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40

# Longer for a reason that a reader would accept; each entry says why. No more than a handful.
ALLOWED_FUNCTIONS: dict[str, str] = {}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_fit_in_a_head(path: Path) -> None:
    num_lines = len(path.read_text("utf-8").splitlines())
    assert num_lines <= MAX_FILE_LINES, f"{num_lines} lines: split it by what it speaks of"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_fit_on_a_screen(path: Path) -> None:
    text = path.read_text("utf-8")
    code = code_lines(text)
    too_long = []
    for name, function in functions(ast.parse(text)):
        length = body_length(function, code)
        if length > MAX_FUNCTION_LINES and f"{name_of(path)}:{name}" not in ALLOWED_FUNCTIONS:
            too_long.append(f"{name}: {length} lines of code")
    assert not too_long


def test_allowances_are_few_and_needed() -> None:
    assert len(ALLOWED_FUNCTIONS) <= 5
    for entry in ALLOWED_FUNCTIONS:
        path, _, wanted = entry.partition(":")
        text = (ROOT / path).read_text("utf-8")
        lengths = {name: body_length(node, code_lines(text)) for name, node in functions(ast.parse(text))}
        assert lengths[wanted] > MAX_FUNCTION_LINES, f"{entry} needs no allowance any more"


def test_the_measure_counts_statements_alone() -> None:
    text = 'def f():\n    """Doc.\n\n    More.\n    """\n    # why\n\n    x = (\n        1\n    )\n    return x\n'
    ((_, function),) = functions(ast.parse(text))
    assert body_length(function, code_lines(text)) == 4


def functions(tree: ast.AST, prefix: str = "") -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions of a module with their dotted names; inner ones count to the outer one and on their own."""
    found: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                found.append((name, node))
            found += functions(node, f"{name}.")
        else:
            found += functions(node, prefix)
    return found


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code: not blank, not comments."""
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


def body_length(function: ast.FunctionDef | ast.AsyncFunctionDef, code: set[int]) -> int:
    """Lines of code of a function's statements: without signature, docstring, comments and blank lines."""
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not statements:
        return 0
    return sum(line in code for line in range(statements[0].lineno, (function.end_lineno or 0) + 1))

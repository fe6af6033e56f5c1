"""No module over 400 lines and no function over 60: a file is read in one sitting, a function at one glance."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MODULE, FUNCTION = 400, 60  # lines; a function's without its docstring, which may describe many arguments
FOLDERS = ("npu_backend", "patches", "tests", "docs", "docker", "examples", ".ci")


def longer(checkout: Path) -> Iterator[str]:
    """The modules and functions that are over their limit."""
    for path in (path for folder in FOLDERS for path in sorted((checkout / folder).rglob("*.py"))):
        name, text = path.relative_to(checkout).as_posix(), path.read_text(encoding="utf-8")
        if text.count("\n") > MODULE:
            yield name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and lines(node) - lines(docstring(node)) > FUNCTION:
                yield f"{name}: {node.name}"


def lines(node: ast.stmt | None) -> int:
    return 0 if node is None else node.end_lineno - node.lineno + 1


def docstring(function: ast.FunctionDef) -> ast.stmt | None:
    return function.body[0] if ast.get_docstring(function) else None


def test_modules_and_functions_are_short(checkout: Path) -> None:
    assert list(longer(checkout)) == []

"""The case log and the tests speak of the same cases: no unknown id, and no case silently without a test."""

from __future__ import annotations

import ast
import csv
from pathlib import Path

TESTS = Path(__file__).parent


def claimed_cases() -> dict[str, set[str]]:
    """Case id -> names of the test files with a `pytest.mark.case("A01", ...)` that names it."""
    found: dict[str, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.case"):
                for argument in node.args:
                    found.setdefault(ast.literal_eval(argument), set()).add(path.name)
    return found


def logged_cases() -> set[str]:
    """The ids of the case log."""
    with (TESTS / "cases" / "case_log.csv").open(encoding="utf-8", newline="") as file:
        return {row["id"] for row in csv.DictReader(file)}


def test_every_claimed_case_is_logged() -> None:
    unknown = {case: files for case, files in claimed_cases().items() if case not in logged_cases()}
    assert not unknown


def test_every_logged_case_is_claimed() -> None:
    assert sorted(logged_cases() - claimed_cases().keys()) == []

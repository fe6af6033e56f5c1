"""Examples with `>>>` do what they say: those of the pages, and of docstrings."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [p for p in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"] if ">>> " in p.read_text(encoding="utf-8")]
MODULES = [
    p
    for p in ROOT.glob("npu_backend/**/*.py")
    if ">>> " in p.read_text(encoding="utf-8") and "virtual_npu/site" not in str(p)
]


@pytest.fixture(autouse=True)
def reverted():
    yield
    importlib.import_module("npu_backend").revert_patches()


def run(test: doctest.DocTest) -> None:
    said: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    assert results.attempted
    assert not results.failed, "".join(said)


def test_there_are_examples() -> None:
    assert len(PAGES) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    run(doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0))


@pytest.mark.parametrize("file", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_docstrings(file: Path) -> None:
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    for test in doctest.DocTestFinder().find(module):
        if test.examples:
            run(test)

"""What every test starts from: no patch applied, no NPU_BACKEND_* variable set, no network, fixed random numbers.

`pytest --cases` lists at the end which public bug reports (tests/cases/case_log.csv) the tests of this run claim, and
how they came out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_OUTCOMES: dict[str, set[str]] = {}  # case id -> outcomes of the tests that claim it


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the settings of the caller's shell away before each test, and what the test patched after it."""
    for name in [name for name in os.environ if name.startswith("NPU_BACKEND_")]:
        if name != "NPU_BACKEND_VIRTUAL_NPU":  # says where this process runs
            monkeypatch.delenv(name)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    yield
    if "npu_backend.patches.engine" in sys.modules:
        engine = sys.modules["npu_backend.patches.engine"].ENGINE
        try:
            engine.revert()
        finally:  # one test that left a foreign patch fails; those after it start afresh
            engine.ledger.clear()
    if "npu_backend.log" in sys.modules:
        sys.modules["npu_backend.log"].forget_warnings()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", action="store_true", help="list the public bug reports that this run covers")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        for marker in item.iter_markers("case"):
            for case in marker.args:
                _OUTCOMES.setdefault(case, set()).add(report.outcome)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("cases"):
        terminalreporter.section("public bug reports covered")
        for case, outcomes in sorted(_OUTCOMES.items()):
            terminalreporter.write_line(f"{case}  {', '.join(sorted(outcomes))}")

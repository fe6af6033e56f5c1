"""What every test starts from: no patch applied, no NPU_BACKEND_* variable set, no network, fixed random numbers.

`pytest -m cases` runs the tests that claim a public bug report (tests/cases/case_log.csv) and lists every report with
how its tests came out in this run. `make test` does the same over all its runs: some reports need a virtual NPU, some a
compiler.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    import hypothesis
except ImportError:  # in the environment of `make test-torch-npu`
    pass
else:  # its clocks know nothing of how busy the machine is
    hypothesis.settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any machine")

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


def pytest_itemcollected(item: pytest.Item) -> None:
    claimed = [case for marker in item.iter_markers("case") for case in marker.args]
    if claimed:
        item.add_marker("cases")
        item.user_properties += [("case", case) for case in claimed]  # for the XML report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        for marker in item.iter_markers("case"):
            for case in marker.args:
                _OUTCOMES.setdefault(case, set()).add(report.outcome)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("markexpr") == "cases":
        terminalreporter.section("public bug reports")
        with (Path(__file__).parent / "cases" / "case_log.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                outcomes = ", ".join(sorted(_OUTCOMES.get(row["id"], ()))) or "no test in this run"
                terminalreporter.write_line(f"{row['id']}  {outcomes:24} {row['symptom'][:90]}")

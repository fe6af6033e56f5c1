"""Run the repository's checks, two side by side, all of them even when one fails, and sum them up.

    .venv/bin/python .ci/checks.py lint | test | test-all

`test` is lint, then the tests on each supported transformers, on plain CPU and on a virtual NPU, then the packaging
tests; `test-all` takes the tests marked slow as well. The last line is `N passed, N failed, N skipped`, summed over
pytest's runs; a step that fails without a failing test (a crash, no test found, lint) counts as one failure. Exit
status 1 if there is any.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

REPORTS = Path("build/reports")
MAIN, TRANSFORMERS4 = ".venv/bin/python", ".venv-tf4/bin/python"
AT_ONCE = 2  # steps that run side by side, each on one core
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # the tests' models are too small to share among cores
PRINTING = threading.Lock()
APART = ("--ignore=tests/virtual_npu", "--ignore=tests/packaging")  # each is a run of its own


@dataclass
class Step:
    """One command. `report` is the file where pytest counts its tests, if the command is a pytest run."""

    name: str
    command: list[str]
    report: Path | None = None
    result: str = "not run"
    counts: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        """Run the command, print its output when it has ended, and note its result."""
        print(f"--- {self.name} starts", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            where = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            status = subprocess.call(self.command, env={**os.environ, **ONE_THREAD}, **where)
            output.seek(0)
            with PRINTING:
                print(f"\n=== {self.name}: {' '.join(self.command)}\n{output.read()}", flush=True)
        self.counts = read_counts(self.report) if self.report else {}
        if status and not self.counts.get("failed"):
            self.counts["failed"] = 1
        counted = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        self.result = f"{'failed' if status else 'ok'} in {time.monotonic() - start:.0f} s  {counted}"


def read_counts(report: Path) -> dict[str, int]:
    """Passed, failed and skipped tests of one pytest run; empty when it did not come to write its report."""
    if not report.exists():
        return {}
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return {"passed": tests - failed - skipped, "failed": failed, "skipped": skipped}


def lint_steps() -> list[Step]:
    """Style, types, the direction of imports, and the link that stands for `patches/` inside the package."""
    return [
        Step("ruff check", [MAIN, "-m", "ruff", "check"]),
        Step("ruff format", [MAIN, "-m", "ruff", "format", "--check"]),
        Step("mypy", [MAIN, "-m", "mypy"]),
        Step("import-linter", [".venv/bin/lint-imports"]),
        Step("patches link", ["test", "-L", "npu_backend/patches"]),
    ]


def test_steps(*, slow: bool) -> list[Step]:
    """The pytest runs. Those on the virtual NPU only where torch_npu has a wheel."""
    selected = [] if slow else ["-m", "not slow"]

    def pytest(name: str, python: str, *arguments: str, virtual: bool = False) -> Step:
        report = REPORTS / f"{name.replace(' ', '-')}.xml"
        launch = [python, "-m", "npu_backend", "run", "--virtual-npu=2", "--"] if virtual else []
        return Step(name, [*launch, python, "-m", "pytest", *arguments, *selected, f"--junitxml={report}"], report)

    steps = [
        pytest("transformers 5", MAIN, "tests", *APART),
        pytest("transformers 5 virtual NPU", MAIN, "tests/virtual_npu", virtual=True),
        pytest("transformers 4", TRANSFORMERS4, "tests", *APART, "--ignore=tests/liger"),
        pytest("transformers 4 virtual NPU", TRANSFORMERS4, "tests/virtual_npu", virtual=True),
        pytest("packaging", MAIN, "tests/packaging"),
    ]
    if platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64"):
        return steps
    print("not run: the tests on the virtual NPU, for which torch_npu has no wheel here")
    return [step for step in steps if "virtual NPU" not in step.name]


def main(what: str) -> int:
    """Run the steps and print what came out, with the sum on the last line."""
    steps = lint_steps()
    if what != "lint":
        steps += test_steps(slow=what == "test-all")
    for old in REPORTS.glob("*.xml"):
        old.unlink()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(Step.run, steps))
    print("\n" + "\n".join(f"{step.name:28} {step.result}" for step in steps))
    total = {name: sum(step.counts.get(name, 0) for step in steps) for name in ("passed", "failed", "skipped")}
    if what != "lint":
        print(", ".join(f"{count} {name}" for name, count in total.items()))
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Run the repository's checks, two side by side, all of them even when one fails, and sum them up.

    .venv/bin/python .ci/checks.py lint | test | slow

`test` is lint, the build of the documentation, then the tests on each supported transformers, on plain CPU and on a
virtual NPU, the kernels through the vendor's compiler and what it makes of them through an emulator, then the packaging
tests. Then every public bug report of tests/cases/case_log.csv has a line: how many tests of it passed; none at all
counts as a failure. `slow` takes the tests that are marked so, which CI has no time for, and writes what came out to
tests/slow_tests.md, which is committed. The last line is `N passed, N failed, N
skipped`, summed over pytest's runs; a step that fails without a failing test (a crash, no test found, lint) counts as
one failure. Exit status 1 if there is any.
"""

from __future__ import annotations

import csv
import datetime
import functools
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

REPORTS = Path("build/reports")
RECORD = Path("tests/slow_tests.md")
CASES = Path("tests/cases/case_log.csv")
MAIN, TRANSFORMERS4, DOCS = ".venv/bin/python", ".venv-tf4/bin/python", ".venv-docs/bin/python"
AT_ONCE = 2  # steps that run side by side, each on one core
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # the tests' models are too small to share among cores
SEED = os.environ.get("TEST_SEED", "1")  # of the tests and of what they draw: a verdict can be had again
PRINTING = threading.Lock()
RUNS_OF_THEIR_OWN = ("virtual_npu", "npu", "packaging", "compile_check", "emulator", "system")
APART = tuple(f"--ignore=tests/{name}" for name in RUNS_OF_THEIR_OWN)
# verl 0.9.1 stands beside transformers 5 only; its plugin's own tests need no verl
WITHOUT_VERL = ("--ignore-glob=*/test_verl_[!p]*.py", "--ignore=tests/verl/test_examples.py")
PLAIN_CPU = {  # by transformers
    "5": ("tests", *APART),
    "4": ("tests", *APART, "--ignore=tests/liger", *WITHOUT_VERL),
}


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
        if self.report:
            self.report.unlink(missing_ok=True)  # a run that is killed must not have the counts of the last one
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


def case_counts(reports: list[Path]) -> dict[str, Counter[str]]:
    """For each public bug report how many of the tests that claim it passed, failed and were skipped."""
    with CASES.open(encoding="utf-8", newline="") as file:
        counts: dict[str, Counter[str]] = {row["id"]: Counter() for row in csv.DictReader(file)}
    for report in reports:
        for test in ElementTree.parse(report).getroot().iter("testcase"):
            outcomes = {"failure": "failed", "error": "failed", "skipped": "skipped"}
            outcome = next((outcomes[child.tag] for child in test if child.tag in outcomes), "passed")
            for claimed in test.iter("property"):
                if claimed.get("name") == "case":
                    counts.setdefault(claimed.get("value", ""), Counter())[outcome] += 1
    return counts


def lint_steps() -> list[Step]:
    """Style, types, the direction of imports, and the link that stands for `patches/` inside the package."""
    return [
        Step("ruff check", [MAIN, "-m", "ruff", "check"]),
        Step("ruff format", [MAIN, "-m", "ruff", "format", "--check"]),
        Step("mypy", [MAIN, "-m", "mypy"]),
        Step("import-linter", [".venv/bin/lint-imports"]),
        Step("patches link", ["test", "-L", "npu_backend/patches"]),
    ]


def docs_steps() -> list[Step]:
    """The documentation, warnings being errors, where `make docs` or `make test` has made its environment."""
    if not Path(DOCS).exists():
        print("not run: the build of the documentation, whose environment .venv-docs `make docs` makes")
        return []
    return [Step("docs", [DOCS, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", "build/site"])]


def pytest_step(name: str, python: str, *arguments: str, virtual: bool = False, slow: bool = False) -> Step:
    """A pytest run, of the slow tests or of all others."""
    report = REPORTS / f"{name.replace(' ', '-')}.xml"
    launch = [python, "-m", "npu_backend", "run", "--virtual-npu=2", "--"] if virtual else []
    options = ["-m", "slow" if slow else "not slow", f"--randomly-seed={SEED}", f"--junitxml={report}"]
    return Step(name, [*launch, python, "-m", "pytest", *arguments, *options], report)


def test_steps(*, slow: bool) -> list[Step]:
    """The pytest runs. Those on the virtual NPU only where torch_npu has a wheel."""
    pytest = functools.partial(pytest_step, slow=slow)
    steps = [
        pytest("transformers 5", MAIN, *PLAIN_CPU["5"]),
        pytest("transformers 5 virtual NPU", MAIN, "tests/virtual_npu", "tests/npu", virtual=True),
        pytest("compile check", MAIN, "tests/compile_check"),
        pytest("emulator", MAIN, "tests/emulator"),
        pytest("transformers 4", TRANSFORMERS4, *PLAIN_CPU["4"]),
        pytest("transformers 4 virtual NPU", TRANSFORMERS4, "tests/virtual_npu", *WITHOUT_VERL, virtual=True),
        pytest("packaging", MAIN, "tests/packaging"),
    ]
    if slow:  # an hour of its own, beside the rest
        engine = "tests/virtual_npu/test_verl_engine.py"
        steps[1].command.append(f"--ignore={engine}")
        steps.insert(0, pytest("every verl engine", MAIN, engine, virtual=True))
    if platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64"):
        return steps
    print("not run: the tests on the virtual NPU, for which torch_npu has no wheel here")
    return [step for step in steps if "--virtual-npu=2" not in step.command]


def record(steps: list[Step], summary: str) -> None:
    """Keep the result of the slow tests for those who have no time for them either."""
    lines = [
        "# The last run of the slow tests",
        "",
        f"`make test-all`, {datetime.date.today()}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {os.cpu_count()} cores, no NPU. Written by `.ci/checks.py slow`.",
        "",
        "| tests | result |",
        "|---|---|",
        *(f"| {step.name} | {step.result} |" for step in steps),
        "",
        summary,
    ]
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(what: str) -> int:
    """Run the steps and print what came out, with the sum on the last line."""
    steps = {
        "lint": lint_steps,
        "test": lambda: lint_steps() + docs_steps() + test_steps(slow=False),
        "slow": lambda: test_steps(slow=True),
    }[what]()
    for old in REPORTS.glob("*.xml"):
        old.unlink()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(Step.run, steps))
    print("\n" + "\n".join(f"{step.name:28} {step.result}" for step in steps))
    total = {name: sum(step.counts.get(name, 0) for step in steps) for name in ("passed", "failed", "skipped")}
    if what == "test":
        cases = case_counts(sorted(REPORTS.glob("*.xml")))
        for case, counts in cases.items():
            print(f"{case}  " + (", ".join(f"{count} {name}" for name, count in counts.items()) or "no test ran"))
        total["failed"] += sum(not counts["passed"] for counts in cases.values())
    if what != "lint":
        summary = ", ".join(f"{count} {name}" for name, count in total.items())
        print(summary)
        if what == "slow":
            record(steps, summary)
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

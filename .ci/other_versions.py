"""Run the tests on another Python, torch and transformers, and note the result in tests/other_versions.md.

    .venv-other/bin/python .ci/other_versions.py    (`make test-other` makes that environment first)

With a torch these are the tests that `make test` runs on a plain CPU beside the same transformers. Without one they are
the tests of what has to work before a torch is there; those of them that need a torch all the same are skipped.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import sys
from pathlib import Path

from checks import PLAIN_CPU, pytest_step

PAGE = Path("tests/other_versions.md")
TORCH_FREE = (
    *("tests/cli", "tests/docker", "tests/doctor", "tests/packaging", "tests/patches", "tests/docs/test_pages.py"),
    *("tests/test_case_ids.py", "tests/test_config.py", "tests/test_manager.py", "tests/test_post_import.py"),
    *("tests/test_recognise.py", "tests/test_virtual_npu_launch.py"),
)
HEAD = """\
# Tests on other Pythons and torches

Written by `make test-other`, one row for each combination. CI runs `make test` on Python 3.11 and torch 2.13.0.
A row says what ran: on a plain CPU without an NPU, what `make test` runs there; without torch, what has to work without
one. Skipped are what needs a device, another transformers or a newer Triton; pytest says why for each.

| Python | torch | transformers | passed | failed | skipped | date | on | command |
|---|---|---|---|---|---|---|---|---|
"""


def version(name: str) -> str:
    """The installed release, or an empty string."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def row(counts: dict[str, int]) -> str:
    """This run as a row of the page."""
    torch, transformers = version("torch"), version("transformers")
    python = ".".join(platform.python_version_tuple()[:2])
    system = platform.freedesktop_os_release()["PRETTY_NAME"]
    command = f"make test-other PYTHON=python{python} TORCH_SPEC={f'torch=={torch}' if torch else ''}"
    if torch:
        command += f" TRANSFORMERS={transformers[0]}"
    cells = [platform.python_version(), torch or "none", transformers]
    cells += [str(counts[name]) for name in ("passed", "failed", "skipped")]
    cells += [str(datetime.date.today()), f"{system}, {platform.machine()}, CPU", f"`{command}`"]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """The exit status of pytest's run; the page is written whatever it is."""
    arguments = PLAIN_CPU[version("transformers")[0]] if version("torch") else TORCH_FREE
    step = pytest_step("other versions", sys.executable, *arguments)
    step.run()
    print(step.result)
    if "passed" not in step.counts:
        return 1
    new = row(step.counts)
    command = new.rpartition("`make")[2]
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    rows = [line for line in lines if line.startswith("| 3.") and not line.endswith(command)]
    PAGE.write_text(HEAD + "\n".join(sorted([*rows, new])) + "\n", encoding="utf-8")
    return 1 if step.counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

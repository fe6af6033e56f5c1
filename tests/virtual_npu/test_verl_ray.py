"""Two of verl's TrainingWorkers in Ray, on a virtual NPU each (arithmetic by the CPU), load the plugin and agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from verl_runs import Batch, Run, assert_same

pytest.importorskip("verl", reason="verl is in the main environment only")
pytestmark = pytest.mark.timeout(1800)

TESTS = Path(__file__).parents[1]
PLAIN: Run = {"fused": False}


def test_two_ray_workers(tmp_path):
    path = os.pathsep.join(filter(None, [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "verl_ray.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "results.json").read_text())
    assert_same(result, Batch("stock", [PLAIN]).result(PLAIN))
    first, second = result["workers"]
    assert first == second
    assert "verl.models.transformers.monkey_patch.patch_forward_with_backends" in first["hooked"]
    assert first["status"]["patch_set"] == "verl_npu"
    assert "virtual NPU" in first["status"]["device"]
    assert first["calls"]["rms_norm"] > 0
    assert first["fallbacks"] == {}
    assert {name for name in result["metrics"] if name.startswith("npu_backend/fallbacks/")}

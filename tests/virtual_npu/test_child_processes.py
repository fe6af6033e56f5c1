"""Processes that a program starts see the virtual NPUs (arithmetic by the CPU) of its `run`, and leave nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = str(Path(__file__).with_name("child_programs.py"))
pytestmark = pytest.mark.usefixtures("nothing_left")


def run(*command: str) -> list[str]:
    """Lines that a command under `run --virtual-npu=2` prints."""
    whole = [sys.executable, "-m", "npu_backend", "run", "--virtual-npu=2", "--", sys.executable, *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    environment.pop("PYTHONUNBUFFERED", None)  # it parts a line from its end, and two ranks print at the same time
    done = subprocess.run(whole, capture_output=True, text=True, check=False, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_torchrun() -> None:
    lines = run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", PROGRAMS, "ranks")
    assert sorted(lines) == ["rank 0 of 2: 3.0 npu:0", "rank 1 of 2: 3.0 npu:1"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader(method: str) -> None:
    assert run(PROGRAMS, "loader", method) == ["True npu:1 14.0", "True npu:1 30.0", "True npu:1 21.0"]


def test_multiprocessing() -> None:
    assert run(PROGRAMS, "spawn") == ["[(0, 2.0), (1, 3.0)]"]


@pytest.mark.slow
def test_a_ray_task() -> None:
    pytest.importorskip("ray")
    assert run(PROGRAMS, "ray") == ["[2.0, 3.0]"]

"""The adapter on two ranks: one line in the log, and the gradients of one process under DDP and FSDP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each of two ranks printed; `tests/adapter_ranks.py` says what they do."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, TESTS / "adapter_ranks.py", store],
            env={**os.environ, "RANK": str(rank), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    return printed


@pytest.mark.case("A21")
def test_one_rank_says_that_the_fused_head_is_off_and_why(ranks: list[str]) -> None:
    lines = [line for printed in ranks for line in printed.splitlines() if "fused head off" in line]
    assert len(lines) == 1
    assert "fused head off: use_fused_kernels=False" in lines[0]
    assert "fused head off" in ranks[0]


@pytest.mark.case("D12")
@pytest.mark.parametrize("scenario", ["ddp", "fsdp2 untied", "fsdp2 tied", "fsdp2 softcap"])
def test_gradients_are_those_of_one_process_with_all_the_data(ranks: list[str], scenario: str) -> None:
    """float32: relative to the largest entry, a few hundred roundings. A lost reduction would be of order 1."""
    errors = json.loads(ranks[0].splitlines()[-1])
    assert errors[scenario] < 1e-5

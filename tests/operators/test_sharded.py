"""DTensor activations on two gloo ranks; what each rank checks is in sharded_rank.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.case("B15")
def test_dtensor_activations_keep_values_gradients_and_placements(tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here.parent), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(here / "sharded_rank.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs):
        assert rank.returncode == 0, output[-4000:]
        assert "rank done" in output

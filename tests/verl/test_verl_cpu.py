"""verl's FSDPEngine on a plain CPU with gloo: no operator is replaced there, the head is ours, the results verl's."""

from __future__ import annotations

import pytest
from verl_runs import Batch, Run, assert_same

pytest.importorskip("verl", reason="verl is in the main environment only")
pytestmark = pytest.mark.timeout(1800)

CPU = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "npu"}  # verl has no engine of its own for it
PLAIN: Run = {"fused": False}
FUSED: Run = {"strategy": "fsdp2"}


def test_training_on_a_cpu():
    stock = Batch("stock", [PLAIN], environment=CPU).result(PLAIN)
    got = Batch("plugin", [FUSED], world=2, environment=CPU).result(FUSED)
    assert_same(got, stock)
    assert got["head"] == {"torch": got["forwards"]}
    assert got["calls"] == {}
    assert {row["state"] for row in got["status"]["rows"]} <= {"reverted", "applied"}
    assert got["status"]["patch_set"] is None

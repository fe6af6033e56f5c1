"""Other releases of verl, each in an environment of its own that `make test-all` makes: the plugin loads the way that
release has, and trains as verl does without plugin and fused kernels (virtual NPU, arithmetic by the CPU).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from verl_runs import Batch, Run, assert_same

pytest.importorskip("verl", reason="these environments are on top of the main one")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
FUSED: Run = {"remove_padding": True}  # 0.8.0 and 0.7.1 fail on this batch without it, with the plugin off as well
LIGER: Run = FUSED | {"impl_backend": "liger"}  # these releases' own head has no backends
PLAIN: Run = FUSED | {"fused": False}
CALLS = {"rms_norm": 9, "rotary": 4, "gated_mlp": 2}  # of one forward


@pytest.mark.parametrize(
    ("release", "how", "tolerance"),
    [("0.9.0", "entry-point", 1e-5), ("0.8.0", "plugin", 1e-5), ("0.7.1", "plugin", 3e-2)],
)
def test_an_older_release(release, how, tolerance):
    """0.7.1 always computes under bfloat16 autocast, and without the fused head has bfloat16 logits: its reference
    is the main environment's verl in float32.
    """
    python = ROOT / f".venv-verl-{release}/bin/python"
    if not python.exists():
        pytest.skip(f"`make .venv-verl-{release}/.installed` makes its environment")
    stock = Batch("stock", [PLAIN], python=sys.executable if release == "0.7.1" else str(python)).result(PLAIN)
    batch = Batch(how, [FUSED, LIGER], python=str(python))
    for run, backend in ((FUSED, "torch"), (LIGER, "liger")):
        got = batch.result(run)
        assert_same(got, stock, tolerance)
        assert got["head"] == {backend: got["forwards"]}
        assert got["calls"] == {op: n * got["forwards"] for op, n in CALLS.items()}
        assert got["fallbacks"] == {}
        assert set(got["metrics"].values()) == {0}
        assert got["status"]["patch_set"] == "verl_npu"

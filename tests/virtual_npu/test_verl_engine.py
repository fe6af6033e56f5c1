"""verl's own FSDPEngine, unmodified, trains with our plugin exactly as stock verl does without fused kernels.

Every pair of settings occurs in some run on one or two virtual NPUs (arithmetic by the CPU), where verl sees `npu`;
every combination of them in `make test-all`.
"""

from __future__ import annotations

from typing import Any

import covering
import pytest
from verl_runs import Batch, Run, assert_same, flat

pytest.importorskip("verl", reason="verl is in the main environment only")
pytestmark = pytest.mark.timeout(1800)  # the first test of a batch waits for all its runs

LEVELS = {
    "strategy": ("fsdp", "fsdp2"),
    "world": (1, 2),
    "tied": (False, True),
    "remove_padding": (False, True),
    "lora": (0, 4),
    "sp": (1, 2),
    "impl_backend": ("torch", "triton", "liger", "auto"),
    "use_liger": (False, True),
}
LAYERS = 2
NORMS = 4 * LAYERS + 1  # two per layer, two more on queries and keys, one at the end


def allowed(row: Run) -> bool:
    """verl's Ulysses needs ranks to share a sequence, and packed sequences."""
    return row["sp"] == 1 or (row["world"] == 2 and row["remove_padding"])


def cost(row: Run) -> float:
    """Triton's interpreter, in which Triton's kernels run here, takes a minute for what torch does in a second."""
    return 20.0 if row["use_liger"] else 4.0 if row["impl_backend"] == "triton" else 1.0


EVERY = covering.product(LEVELS, allowed)
PAIRWISE = covering.pairwise(EVERY, cost)
STOCK = Batch("stock", [{"tied": t, "lora": r, "fused": False} for t in (False, True) for r in (0, 4)])


def run_of(row: Run) -> Run:
    """The settings of one run of `verl_engine.py`."""
    settings = {name: value for name, value in row.items() if name != "world"}
    return settings | ({"steps": 1, "after": False} if row["use_liger"] else {})


def batches(rows: list[Run], seconds: float = 1500.0) -> dict[int, Batch]:
    """One for each number of ranks."""
    of = {world: [run_of(row) for row in rows if row["world"] == world] for world in LEVELS["world"]}
    return {world: Batch("plugin", runs, world=world, seconds=seconds) for world, runs in of.items()}


def name_of(row: Run) -> str:
    return "-".join(f"{name}={value}" for name, value in row.items())


def check(row: Run, batch: Batch) -> None:
    result = batch.result(run_of(row))
    assert_same(result, STOCK.result({"tied": row["tied"], "lora": row["lora"], "fused": False}))
    assert "virtual NPU" in result["status"]["device"]
    forwards = result["forwards"]
    assert forwards
    head = "torch" if row["impl_backend"] == "auto" else row["impl_backend"]
    assert result["head"] == {head: forwards}
    assert result["fallbacks"] == {}
    assert set(result["metrics"].values()) == {0}
    ours, liger = expected_calls(forwards)
    assert (result["calls"], result["liger"]) == (({}, liger) if row["use_liger"] else (ours, {}))
    patch_set = result["status"]["patch_set"]
    assert patch_set == ("liger" if row["use_liger"] else "verl_npu")
    applied = {r["op"] for r in result["status"]["rows"] if r["owner"] == patch_set and r["state"] == "applied"}
    assert applied - {""} == {"rms_norm", "gated_mlp", "rotary"}  # "": what else Liger's patcher rebinds


def expected_calls(forwards: int) -> tuple[Run, Run]:
    """Calls of our operators, and of Liger's modules (its rotary embedding is a function)."""
    norms, mlps = NORMS * forwards, LAYERS * forwards
    ours = {"rms_norm": norms, "gated_mlp": mlps, "rotary": 2 * mlps}
    return ours, {"LigerRMSNorm.forward": norms, "LigerSwiGLUMLP.forward": mlps}


def test_stock_verl_learns():
    for run in STOCK.runs:
        result = STOCK.result(run)
        assert flat(result["before"]) != flat(result["after"])
        assert result["steps"][0] != result["steps"][1]


def test_the_covering_array():
    assert len(PAIRWISE) <= 36
    assert covering.pairs(PAIRWISE) == covering.pairs(EVERY)


PAIRWISE_BATCHES = batches(PAIRWISE)


@pytest.mark.parametrize("row", PAIRWISE, ids=name_of)
def test_every_pair_of_settings(row: Any):
    check(row, PAIRWISE_BATCHES[row["world"]])


HOURS = 6 * 3600
EVERY_BATCHES = {liger: batches([r for r in EVERY if r["use_liger"] is liger], HOURS) for liger in (False, True)}


@pytest.mark.slow
@pytest.mark.timeout(HOURS)
@pytest.mark.parametrize("row", EVERY, ids=name_of)
def test_every_combination(row: Any):
    check(row, EVERY_BATCHES[row["use_liger"]][row["world"]])

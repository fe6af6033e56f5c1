"""verl's own FSDPEngine, unmodified, on a real CUDA device: our head and Liger's operators against stock verl."""

from __future__ import annotations

import math

import pytest
import torch
from verl_runs import Batch, Run, assert_same, flat

pytest.importorskip("verl", reason="verl is in the main environment only")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),
]

SETTINGS: list[Run] = [
    {"strategy": strategy, "tied": tied, "lora": lora, "impl_backend": backend, "use_liger": use_liger}
    for strategy, tied, lora, backend, use_liger in (
        ("fsdp", False, 0, "torch", False),
        ("fsdp", False, 0, "triton", False),
        ("fsdp2", True, 0, "triton", False),
        ("fsdp2", False, 4, "triton", True),
        ("fsdp", True, 0, "auto", True),
    )
]
HALF: list[Run] = [{"dtype": "bf16", "impl_backend": backend} for backend in ("torch", "triton")]
STOCK_FULL: list[Run] = [{"tied": t, "lora": r, "fused": False} for t in (False, True) for r in (0, 4)]
STOCK_HALF: Run = {"dtype": "bf16", "fused": False}
STOCK_TRITON: Run = {"dtype": "bf16", "impl_backend": "triton", "hidden_size": 128}
STOCK = Batch("stock", [*STOCK_FULL, STOCK_HALF, STOCK_TRITON], seconds=600.0)
OURS = Batch("plugin", SETTINGS + HALF, seconds=600.0)


def stock(run: Run) -> Run:
    return STOCK.result({"tied": run.get("tied", False), "lora": run.get("lora", 0), "fused": False})


@pytest.mark.parametrize("run", SETTINGS, ids=lambda run: "-".join(map(str, run.values())))
def test_training_equals_stock_verl(run: Run) -> None:
    got = OURS.result(run)
    assert_same(got, stock(run))
    backend = "triton" if run["impl_backend"] == "auto" else run["impl_backend"]
    assert got["head"] == {backend: got["forwards"]}
    assert got["status"]["patch_set"] == ("liger" if run["use_liger"] else None)
    assert bool(got["liger"]) == run["use_liger"]


@pytest.mark.parametrize("run", HALF, ids=lambda run: run["impl_backend"])
def test_in_bfloat16_as_near_to_float32_as_stock_verl_is(run: Run) -> None:
    def error(got: Run, key: str) -> float:
        return math.dist(flat(got[key]), flat(stock(run)[key]))

    got, peer = OURS.result(run), STOCK.result(STOCK_HALF)
    for key in ("before", "steps"):
        assert error(got, key) <= 2 * error(peer, key), key


def test_stock_verl_cannot_use_its_triton_head_with_padding_kept() -> None:
    assert STOCK.error(STOCK_TRITON) == "IndexError: tuple index out of range"

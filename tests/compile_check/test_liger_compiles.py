"""Liger's operators as models launch them: known faults of releases that users have, and what to do about them."""

from __future__ import annotations

import random

import pytest

from npu_backend.ascend import models
from npu_backend.ascend.check import check

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("liger_kernel")

pytestmark = pytest.mark.timeout(1800)  # whichever test comes first waits for the compilers
SOC = ["Ascend910B1"]


def named(*names: str) -> list[models.Model]:
    return [model for model in models.published() if model.name in names]


def rows_of(report, operator: str, kernel: str = "") -> list[dict]:
    return [row for row in report.rows if row["operator"] == operator and kernel in row["kernel"]]


def statuses(rows: list[dict]) -> set[str]:
    return {row["verdict"]["status"] for row in rows}


@pytest.fixture(scope="module")
def qwen(compiler):
    """Small ones: 6 operators' kernels each, at an even and an odd number of tokens."""
    return check(named("Qwen2.5-7B", "Qwen3-8B"), SOC, ["bfloat16"], compiler, liger="ascend", lengths=[4096, 4099])


def test_in_bfloat16_nothing_of_a_dense_model_overflows_with_the_newest_compiler(qwen):
    assert qwen.findings == []
    assert {row["operator"] for row in qwen.rows} == {"rms_norm", "gated_mlp", "rotary"}
    assert qwen.skip == {}


def test_the_launches_are_those_of_the_models_sizes(qwen):
    widths = {(model, int(row["constants"]["n_cols"])) for row in rows_of(qwen, "rms_norm") for model in row["models"]}
    assert widths == {("Qwen2.5-7B", 3584), ("Qwen3-8B", 4096), ("Qwen3-8B", 128)}
    assert all(1 <= row["programs"] <= 65535 for row in qwen.rows)


def test_the_first_compiler_has_no_room_for_the_norm_of_any_model(old_compiler):
    dense = named("Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen2.5-72B", "Qwen3-8B")
    report = check(dense, SOC, ["bfloat16"], old_compiler, liger="ascend", lengths=[4096])
    refused = [row for row in rows_of(report, "rms_norm") if row["verdict"]["status"] == "overflow"]
    assert {model for row in refused for model in row["models"]} == {model.name for model in dense}
    assert all("forward" in row["kernel"] for row in refused)
    needs = {row["models"][0]: row["verdict"]["need"] for row in refused if "Qwen3-8B" not in row["models"]}
    assert needs == {"Qwen2.5-0.5B": 1606656, "Qwen2.5-7B": 1704704, "Qwen2.5-72B": 1704448}
    assert statuses(rows_of(report, "gated_mlp") + rows_of(report, "rotary")) == {"ok"}
    assert report.skip == {"Ascend910B1 bfloat16": "qwen2.rms_norm,qwen3.rms_norm"}


def test_with_pypis_triton_ascend_the_cuda_kernels_stay_and_do_not_fit(compiler):
    report = check(named("Qwen2.5-7B"), SOC, ["bfloat16"], compiler, liger="as-installed", lengths=[4096])
    said = [note["text"] for note in report.notes if note["finding"]]
    assert len(said) == 1
    assert "are Liger's CUDA kernels; its Ascend backend cannot be imported" in said[0]
    assert "No module named 'triton.language.extra.cann'" in said[0]
    (forward,) = rows_of(report, "gated_mlp", "forward")
    assert (forward["kernel"], forward["constants"]["BLOCK_SIZE"]) == ("_swiglu_forward_kernel", "32768")
    verdict = forward["verdict"]
    assert (verdict["status"], verdict["need"], verdict["available"]) == ("overflow", 2621440, 1572864)
    assert report.skip["Ascend910B1 bfloat16"] == "qwen2.gated_mlp"


def test_kernels_that_hold_the_number_of_tokens_are_compiled_for_every_one(compiler):
    lengths = random.Random(0).sample(range(1024, 8192), 100)  # 100 packed micro-batches
    report = check(named("Qwen3-8B"), SOC, ["bfloat16"], compiler, liger="ascend", lengths=lengths)
    counts = {row["operator"]: row for row in report.recompiles}
    norm = counts["rms_norm"]
    assert (norm["each"], norm["kernels"]) == (6, 600), "hidden, query and key norms, forward and backward"
    assert norm["token_constants"] == ["n_rows"]
    assert counts["rotary"]["token_constants"] == counts["gated_mlp"]["token_constants"] == []
    assert counts["rotary"]["kernels"] + counts["gated_mlp"]["kernels"] < 20
    (advice,) = (line for line in report.advice if "rms_norm" in line)
    assert "NPU_BACKEND_SKIP=qwen3.rms_norm, or pad batches to few lengths" in advice
    assert {length for row in report.rows for length in row["lengths"]} == {min(lengths), max(lengths)}


@pytest.mark.slow
def test_an_atomic_of_the_experts_backward_is_suspect(compiler):
    """The router weights' gradient is added by every vector core, in a kernel with a matrix product."""
    report = check(named("Qwen3-30B-A3B"), SOC, ["bfloat16"], compiler, liger="ascend", lengths=[4096])
    suspect = [row for row in report.rows if row["verdict"]["status"] == "suspect"]
    assert {row["kernel"] for row in suspect} == {"_moe_bwd_down_proj_kernel"}
    assert "an atomic" in suspect[0]["verdict"]["message"]
    assert report.skip == {"Ascend910B1 bfloat16": "qwen3_moe.sparse_moe"}

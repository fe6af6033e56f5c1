"""What fails in stock verl 0.9.1 and works with the plugin: its own engine on virtual NPUs (arithmetic by the CPU).

Each test first shows the failure with the plugin off, so that a repair upstream is noticed, then the repair.
"""

from __future__ import annotations

import pytest
from verl_runs import Batch, Run, assert_same, flat

pytest.importorskip("verl", reason="verl is in the main environment only")
pytestmark = pytest.mark.timeout(1800)  # the first test of a batch waits for all its runs

PLAIN: Run = {"fused": False}
FSDP2: Run = {"strategy": "fsdp2"}
QWEN35: Run = {"family": "qwen3_5", "strategy": "fsdp2"}
OLD_LIGER: Run = {"scenario": "an_old_liger"}
HEAD: Run = {"scenario": "head_inputs"}
TWO_ENGINES: Run = {"scenario": "two_engines", "use_liger": True}
OTHER_OUTPUTS: Run = {"scenario": "other_outputs"}
NO_MLP: Run = {"scenario": "liger_on_the_instance", "use_liger": True, "skip": "mlp"}
NO_ROPE: Run = {"scenario": "liger_on_the_instance", "use_liger": True, "skip": "rope,qwen3.rms_norm"}
FALLBACK: Run = {"scenario": "a_fallback"}
AFTERWARDS: Run = {"fused": False, "strategy": "fsdp"}
MISTYPED: Run = {"impl_backend": "tritn"}

# in each list TWO_ENGINES, whose use_liger brings the interpreter without which Liger cannot be imported here
STOCK = Batch("stock", [PLAIN, OLD_LIGER, FSDP2, HEAD, TWO_ENGINES, OTHER_OUTPUTS, AFTERWARDS])
STOCK_2 = Batch("stock", [QWEN35 | PLAIN, QWEN35, TWO_ENGINES], world=2)
PLUGIN = Batch(
    "plugin", [OLD_LIGER, FSDP2, HEAD, TWO_ENGINES, OTHER_OUTPUTS, NO_MLP, NO_ROPE, FALLBACK, MISTYPED, AFTERWARDS]
)
PLUGIN_2 = Batch("plugin", [QWEN35], world=2)
WITHOUT_TRITON_ASCEND: Run = {"strategy": "fsdp"}
STOCK_NO_LIGER = Batch("stock", [WITHOUT_TRITON_ASCEND])
PLUGIN_NO_LIGER = Batch("plugin", [WITHOUT_TRITON_ASCEND])


def test_an_output_head_that_fsdp2_shards_by_itself():
    assert "mixed torch.Tensor and DTensor" in STOCK.error(FSDP2)
    assert_same(PLUGIN.result(FSDP2), STOCK.result(PLAIN))


def test_the_gradient_of_a_sharded_head_on_two_ranks():
    """verl gathers the head of Qwen3.5 without a gradient placement: what the ranks give is not averaged."""
    reference, wrong = STOCK_2.result(QWEN35 | PLAIN), STOCK_2.result(QWEN35)
    assert flat(wrong["before"]) == pytest.approx(flat(reference["before"]), abs=1e-5)
    assert abs(wrong["steps"][0][1] / reference["steps"][0][1] - 1) > 0.02
    assert_same(PLUGIN_2.result(QWEN35), reference)


@pytest.mark.parametrize(
    ("given", "stock"),
    [("label -100", "RuntimeError"), ("mixed dtypes", "RuntimeError"), ("a temperature per token", "wrong")],
)
def test_inputs_of_the_head(given, stock):
    assert STOCK.result(HEAD)[given] == stock
    assert PLUGIN.result(HEAD)[given] == "right"


def test_a_second_engine_with_the_other_use_liger():
    """Stock verl builds it from what Liger left in the modules; the plugin refuses and names both."""
    assert STOCK.result(TWO_ENGINES) == {"norm": "LigerRMSNorm"}
    error = PLUGIN.error(TWO_ENGINES)
    assert error.startswith("PatchConflictError")
    assert "use_liger=False" in error
    assert "use_liger=True" in error


def test_an_engine_without_the_fused_head_after_one_with_it():
    """verl puts its forward on the model's class, where it stays; ours is on the one model."""
    assert "has to return_dict" in STOCK.error(AFTERWARDS)
    assert_same(PLUGIN.result(AFTERWARDS), STOCK.result(PLAIN))


def test_a_liger_too_old_for_verl_does_not_break_the_torch_head():
    assert "LigerFusedLinearScaledCrossEntropyFunction" in STOCK.error(OLD_LIGER)
    assert_same(PLUGIN.result(OLD_LIGER), STOCK.result(PLAIN))


def test_a_liger_without_triton_ascend_does_not_break_the_torch_head():
    assert STOCK_NO_LIGER.error(WITHOUT_TRITON_ASCEND).startswith("ImportError")
    assert_same(PLUGIN_NO_LIGER.result(WITHOUT_TRITON_ASCEND), STOCK.result(PLAIN))


def test_outputs_that_need_logits_are_refused_by_name():
    """verl itself refuses the first; without the plugin the second one is missing from the output without a word."""
    assert STOCK.result(OTHER_OUTPUTS)["distillation_use_topk"] == ""
    refused = PLUGIN.result(OTHER_OUTPUTS)
    assert (
        "calculate_sum_pi_squared=True is not supported with use_fused_kernels=True"
        in refused["calculate_sum_pi_squared"]
    )
    assert "distillation_use_topk) is not supported with use_fused_kernels=True" in refused["distillation_use_topk"]


@pytest.mark.parametrize(
    ("run", "forwards", "rotary"),
    [(NO_MLP, {"LigerRMSNorm.forward": 9}, "liger_kernel"), (NO_ROPE, {"LigerSwiGLUMLP.forward": 2}, "transformers")],
    ids=["mlp", "rope and rms_norm"],
)
def test_what_is_skipped_stays_off_when_verl_applies_liger_itself(run, forwards, rotary):
    """verl calls Liger on the built model with options of its own (swiglu=True)."""
    assert PLUGIN.result(run) == {"forwards": forwards, "rotary": rotary}


def test_fallbacks_are_in_the_metrics_of_an_update():
    metrics = PLUGIN.result(FALLBACK)["metrics"]
    assert metrics.pop("npu_backend/fallbacks/gated_mlp") == 1  # one layer, one micro-batch
    assert set(metrics.values()) == {0}


def test_a_mistyped_backend_stops_the_run_when_the_engine_is_built():
    assert "impl_backend='tritn' is not one of torch, triton, liger, auto" in PLUGIN.error(MISTYPED)

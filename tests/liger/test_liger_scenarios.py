"""The patch set `liger` on real models. Liger's Ascend sources run in Triton's interpreter, on CPU tensors: a stand-in
for correctness of code paths, no NPU. `scenarios.py` does the work in one process; here is what must be true.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interpreted
import pytest

pytestmark = [
    pytest.mark.timeout(600),  # the scenarios take 55 s of one core, and run in the first test's setup
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed"),
    interpreted.supported,
]

MODELING = "transformers.models.{0}.modeling_{0}:"
INSTANCE_CALL = "liger_kernel.transformers.monkey_patch:_apply_liger_kernel_to_instance"

# Where `forward` differs between Liger 0.8.5's generic and Ascend implementation, and why it does not reach us.
KNOWN_DIFFERENCES = {
    "LigerRopeFunction": "no rotary_dim: the predicate keeps partial rotary embeddings away from it",
    "LigerFusedLinearCrossEntropyFunction": "no chunk_mem_const: never installed by this set",
    "GrpoLossFunction": "takes *args: not used by this set",
}


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a scenario saw, by its name; a scenario that raised fails the test with its traceback."""
    root, here = Path(__file__).parents[2], Path(__file__).parent
    results = tmp_path_factory.mktemp("liger") / "results.json"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NPU_BACKEND_")}
    done = subprocess.run(
        [sys.executable, str(here / "scenarios.py"), str(results)],
        env={**clean, "PYTHONPATH": os.pathsep.join([str(root), str(here.parent)])},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    values = json.loads(results.read_text(encoding="utf-8"))

    def value(name: str) -> Any:
        if "error" in values[name]:
            pytest.fail(values[name]["error"])
        return values[name]["value"]

    return value


def states(rows: list[dict[str, str]]) -> dict[str, str]:
    return {row["target"]: row["state"] for row in rows if row["op"] not in ("swiglu", "fused_linear_cross_entropy")}


def reason_of(rows: list[dict[str, str]], op: str) -> str:
    return "; ".join(row["reason"] for row in rows if row["op"] == op)


CLASSES = {
    "llama": ["LigerRMSNorm", "LigerSwiGLUMLP"],
    "qwen3": ["LigerRMSNorm", "LigerSwiGLUMLP"],
    "qwen3_moe": ["LigerExperts", "LigerRMSNorm"],
    "gemma2": ["LigerGEGLUMLP", "LigerRMSNormForGemma2"],
    "qwen3_5": ["LigerQwen3MoeSwiGLUMLP", "LigerRMSNormForQwen3Next"],
    "llama_bfloat16": ["LigerRMSNorm", "LigerSwiGLUMLP"],
    "phi3_partial_rotary": ["LigerPhi3SwiGLUMLP", "LigerRMSNorm"],
}


@pytest.mark.parametrize("name", CLASSES)
def test_logits_and_all_gradients_are_as_close_to_float64_as_the_unpatched_model(
    seen: Callable[[str], Any], name: str
) -> None:
    value = seen(f"parity_{name}")
    parameter, share = value["worst"]
    assert not value["missing"], "a gradient is missing"
    assert share <= 1, f"{parameter}: {share:.2f} times the allowed error"
    assert value["classes"] == CLASSES[name]
    assert value["device"] == "cpu (Liger's Ascend sources in Triton's interpreter)"


@pytest.mark.parametrize(
    "repair", ["scalars and loops", "any length, functions imported by name", "slices", "bfloat16"]
)
def test_repairs_of_the_interpreter(seen: Callable[[str], Any], repair: str) -> None:
    assert seen("repairs")[repair] < 1e-6


def test_partial_rotary_is_left_to_transformers(seen: Callable[[str], Any]) -> None:
    rows = seen("parity_phi3_partial_rotary")["rows"]
    assert "rotates 0.5 of each head" in reason_of(rows, "rotary")
    assert seen("partial_rotary_without_the_predicate")["error"] > 0.1, (
        "the Ascend kernel can do it now: drop the predicate"
    )


@pytest.mark.parametrize(
    ("name", "reason"), [("activation", "'gelu'"), ("bias", "biases"), ("gemma", "gelu_pytorch_tanh only")]
)
def test_models_that_ligers_classes_cannot_hold_keep_their_mlp(
    seen: Callable[[str], Any], name: str, reason: str
) -> None:
    value = seen("unfit_models")[name]
    assert reason in reason_of(value["rows"], "gated_mlp")
    assert value["same_parameters"]


def test_apply_again_changes_nothing_and_revert_restores_every_object(seen: Callable[[str], Any]) -> None:
    value = seen("identity")
    assert {row["reason"] for row in value["again"]} == {"already applied"}
    expected = {
        INSTANCE_CALL,
        *(MODELING.format("llama") + name for name in ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb")),
        *(MODELING.format("gemma2") + name for name in ("Gemma2RMSNorm", "Gemma2MLP", "apply_rotary_pos_emb")),
    }
    assert set(value["in_force"]) == expected
    assert value["left"] == []


def test_every_option_that_liger_drops_has_a_row(seen: Callable[[str], Any]) -> None:
    rows = [row for row in seen("identity")["other"] if row["op"] == "swiglu"]
    assert [(row["state"], row["model_type"]) for row in rows] == [("skipped", "gemma2")]
    assert rows[0]["reason"] == "apply_liger_kernel_to_gemma2 has no option swiglu"


def test_verls_own_call_on_the_built_model_changes_nothing_more(seen: Callable[[str], Any]) -> None:
    value = seen("composition")
    ours = {MODELING.format("qwen3") + name for name in ("Qwen3RMSNorm", "Qwen3MLP", "apply_rotary_pos_emb")}
    applied = {target for target, state in states(value["status"]).items() if state == "applied"}
    assert applied == ours | {INSTANCE_CALL} == set(value["in_force"])
    assert value["mlp_bound"]
    assert value["finite"]
    assert value["left"] == []


def test_verls_own_call_does_not_bring_back_what_was_skipped(seen: Callable[[str], Any]) -> None:
    value = seen("composition_with_skip")
    assert set(value["in_force"]) == {INSTANCE_CALL, MODELING.format("qwen3") + "Qwen3RMSNorm"}
    assert not value["mlp_bound"]
    assert value["left"] == []


def test_an_operator_skipped_at_first_can_be_added(seen: Callable[[str], Any]) -> None:
    value = seen("skip_taken_back")
    names = ("Qwen3RMSNorm", "Qwen3MLP", "apply_rotary_pos_emb")
    assert set(value["in_force"]) == {INSTANCE_CALL, *(MODELING.format("qwen3") + name for name in names)}
    assert value["norm_bound"], "what was already applied counts as turned off"
    assert value["left"] == []


@pytest.mark.case("A17")
def test_swiglu_and_flce_are_off_on_chips_that_are_no_ascend910(seen: Callable[[str], Any]) -> None:
    llama, gemma2 = seen("wrong_soc")["llama"], seen("wrong_soc")["gemma2"]
    assert MODELING.format("llama") + "LlamaMLP" not in llama["in_force"]
    assert not llama["mlp_bound"], "verl's own call turned swiglu on again"
    assert "SoC Ascend310P3" in reason_of(llama["rows"], "gated_mlp")
    for value in (llama, gemma2):  # gemma2's function has no swiglu: a blind keyword would be a TypeError
        assert "SoC Ascend310P3" in reason_of(value["rows"], "fused_linear_cross_entropy")
        assert value["finite"]
        assert value["left"] == []
    assert reason_of(gemma2["rows"], "swiglu") == "apply_liger_kernel_to_gemma2 has no option swiglu"


@pytest.mark.case("A11")
def test_an_engine_with_the_other_set_is_refused_and_told_both_configurations(seen: Callable[[str], Any]) -> None:
    value = seen("two_engines")
    assert value["message"].startswith("PatchConflictError")
    assert "use_liger=True, model_type=qwen3" in value["message"]
    assert "use_liger=False, model_type=qwen3" in value["message"]
    assert value["still"] == value["in_force"] != []
    assert value["left"] == []


@pytest.mark.case("A13")
def test_liger_with_fused_kernels_keeps_log_probs_and_says_so_once(seen: Callable[[str], Any]) -> None:
    value = seen("both_switches")
    assert value["error"] < 1e-4
    assert value["forward_of"].startswith("transformers.")
    assert len(value["lines"]) == 1
    assert "fused linear cross entropy is not installed" in value["lines"][0]
    assert value["classes"] == ["LigerRMSNorm", "LigerSwiGLUMLP"]


@pytest.mark.case("A39")
def test_every_family_with_every_operator(seen: Callable[[str], Any]) -> None:
    from npu_backend.patches.liger import LEFT, PATCH_SET

    value = seen("every_option")
    found = states(value["rows"])
    for patch in PATCH_SET.patches:
        assert found[patch.target] == "applied", patch.target
    for family, names in LEFT.items():
        for name in names:
            assert found[MODELING.format(family) + name] == "skipped"
    assert all(row["reason"] for row in value["rows"] if row["state"] not in ("applied", "planned", "reverted"))
    assert value["cross_entropy"] == "torch.nn.functional"
    assert value["foreign_forwards"] == []
    assert value["left"] == []


@pytest.mark.case("A33")
def test_ascend_functions_take_what_the_generic_ones_take(seen: Callable[[str], Any]) -> None:
    pairs = seen("signatures")
    assert len(pairs) > 20
    different = {name for name, pair in pairs.items() if pair["generic"] != pair["ascend"]}
    assert different == set(KNOWN_DIFFERENCES), {name: pairs[name] for name in different ^ set(KNOWN_DIFFERENCES)}


def test_one_chip_per_process(seen: Callable[[str], Any]) -> None:
    errors = seen("activation_errors")
    assert "Start another process" in errors["Ascend910B3"]
    assert errors["Ascend911"].startswith("ConfigError")

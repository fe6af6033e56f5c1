"""Every family, patched on the virtual NPU (arithmetic by the CPU) against unpatched on the CPU: logits, gradients, and
exactly how often each operator ran.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import transformers
from references import assert_close_to, exactly
from torch import nn

import npu_backend
from npu_backend.operators import counters

NPU = "npu:0"
Tensors = dict[str, torch.Tensor]
BASE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
HYBRID = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SHARED = {"shared_expert_intermediate_size": 24}
VISION = {"hidden_size": 64, "num_heads": 4, "depth": 2, "intermediate_size": 96, "out_hidden_size": 64}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}

# family -> model class, config class, fields of the (text) config, calls of one forward over two layers
DENSE = {"rms_norm": 5, "gated_mlp": 2, "rotary": 4}
QK_NORM = DENSE | {"rms_norm": 9}
SPARSE = {"rms_norm": 9, "rotary": 4, "sparse_moe": 2}
# one layer of linear attention with its gated norm, one of full attention with norms of q and k
MIXED = {"rms_norm": 8, "gated_mlp": 2, "rotary": 2}
CAUSAL: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "llama": ("Llama", {}, DENSE),
    "mistral": ("Mistral", {}, DENSE),
    "gemma2": ("Gemma2", {"head_dim": 16}, DENSE | {"rms_norm": 9}),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5}, DENSE),
    "qwen2": ("Qwen2", {}, DENSE),
    "qwen3": ("Qwen3", {"head_dim": 16}, QK_NORM),
    "qwen3_moe": ("Qwen3Moe", MOE | {"head_dim": 16, "norm_topk_prob": True}, SPARSE),
    "qwen3_moe, weights as they are": ("Qwen3Moe", MOE | {"head_dim": 16, "norm_topk_prob": False}, SPARSE),
    "qwen3_moe, one dense layer": (
        "Qwen3Moe",
        MOE | {"head_dim": 16, "mlp_only_layers": [0]},
        QK_NORM | {"gated_mlp": 1, "sparse_moe": 1},
    ),
    "qwen3_next": ("Qwen3Next", MOE | SHARED | HYBRID, MIXED | {"sparse_moe": 2}),
    "qwen3_5": ("Qwen3_5", HYBRID, MIXED),
    "qwen3_5_moe": ("Qwen3_5Moe", MOE | SHARED | HYBRID, MIXED | {"sparse_moe": 2}),
}
VLM: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", {"rope_scaling": MROPE}, DENSE),
    "qwen3_vl": ("Qwen3VL", {"head_dim": 16, "rope_scaling": MROPE}, QK_NORM),
    "qwen3_vl_moe": ("Qwen3VLMoe", MOE | {"head_dim": 16, "rope_scaling": MROPE}, SPARSE),
}


def family_of(case: str) -> str:
    return case.partition(",")[0]


def here(case: str) -> Any:
    missing = importlib.util.find_spec(f"transformers.models.{family_of(case)}") is None
    return pytest.param(case, marks=pytest.mark.skipif(missing, reason="this transformers does not have the family"))


def randomized(model: nn.Module) -> nn.Module:
    """Weights that make every part matter, norm weights off their initial value included; no dropout."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data + 0.05 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5
    return model.eval()


def causal(case: str) -> nn.Module:
    prefix, fields, _ = CAUSAL[case]
    text = "Text" if prefix in ("Qwen3_5", "Qwen3_5Moe") else ""
    config = getattr(transformers, f"{prefix}{text}Config")(**(BASE | fields))
    config._attn_implementation = "eager"
    return randomized(getattr(transformers, f"{prefix}ForCausalLM")(config))


def vlm(case: str) -> nn.Module:
    prefix, fields, _ = VLM[case]
    vision = VISION | ({"fullatt_block_indexes": [1], "window_size": 28} if prefix == "Qwen2_5_VL" else {})
    config_class = getattr(transformers, f"{prefix}Config")
    config = config_class(text_config=BASE | fields, vision_config=vision)
    config._attn_implementation = "eager"
    return randomized(getattr(transformers, f"{prefix}ForConditionalGeneration")(config))


def forward_backward(model: nn.Module, device: str) -> Tensors:
    """Logits and every gradient, on the CPU."""
    model.to(device).zero_grad()
    ids = torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(1)).to(device)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {name: p.grad.to("cpu", copy=True) for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach().cpu(), **grads}


def assert_close(got: Tensors, eager: Tensors, exact: Tensors) -> None:
    """Every tensor as near to float64 as the unpatched float32 model is."""
    assert got.keys() == eager.keys() == exact.keys()
    for name, value in got.items():
        assert_close_to(value, exact[name], eager[name], what=name)


def check(model: nn.Module, family: str, calls: dict[str, int]) -> None:
    exact, eager = forward_backward(exactly(model), "cpu"), forward_backward(model, "cpu")
    report = npu_backend.apply_npu_fsdp_patches({"hf_config": model.config})
    assert report.applied, report
    assert {row.model_type for row in report.rows} == {family}
    counters.reset()
    assert_close(forward_backward(model, NPU), eager, exact)
    assert counters.calls() == calls
    assert counters.fallbacks() == {}
    npu_backend.revert_patches()
    counters.reset()
    assert_close(forward_backward(model, NPU), eager, exact)
    assert counters.calls() == {}


@pytest.mark.case("A02", "A03", "B12")
@pytest.mark.parametrize("case", [here(case) for case in CAUSAL])
def test_language_model(case: str) -> None:
    check(causal(case), family_of(case), CAUSAL[case][2])


@pytest.mark.case("A02", "A04")
@pytest.mark.parametrize("case", [here(case) for case in VLM])
def test_text_of_a_vision_language_model(case: str) -> None:
    check(vlm(case), case, VLM[case][2])


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        ("qwen2_5_vl", {"rms_norm": 5, "gated_mlp": 2, "rotary": 4}),  # two norms a block and the merger's
        ("qwen3_vl", {"rotary": 4}),  # LayerNorm and a GELU MLP: only the rotary embedding is ours
    ],
)
def test_vision_tower(case: str, calls: dict[str, int]) -> None:
    model = vlm(case)
    tower = model.model.visual
    config = model.config.vision_config
    patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
    pixels, grid = torch.randn(16, patch), torch.tensor([[1, 4, 4]])

    def run(tower: nn.Module, device: str) -> Tensors:
        tower.to(device).zero_grad()
        out = tower(pixels.to(device, next(tower.parameters()).dtype), grid.to(device))
        out = out[0] if isinstance(out, tuple) else getattr(out, "pooler_output", out)
        out.square().mean().backward()
        grads = {name: p.grad.to("cpu", copy=True) for name, p in tower.named_parameters() if p.grad is not None}
        return {"features": out.detach().cpu(), **grads}

    exact, eager = run(exactly(tower), "cpu"), run(tower, "cpu")
    npu_backend.apply_npu_fsdp_patches({"hf_config": model.config})
    counters.reset()
    assert_close(run(tower, NPU), eager, exact)
    assert counters.calls() == calls
    assert counters.fallbacks() == {}


@pytest.mark.case("A29")
@pytest.mark.parametrize("case", ["llama", "qwen3_moe"])
def test_bfloat16_training_goes_on_after_the_patch(case: str) -> None:
    """Ten steps on one batch reach the loss that the unpatched model reaches, within what the dtype gives."""
    losses = {}
    for patched in (False, True):
        model = causal(case).to(torch.bfloat16).to(NPU)
        if patched:
            npu_backend.apply_npu_fsdp_patches({"hf_config": model.config})
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        ids = torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(1)).to(NPU)
        found = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses[patched] = found
    assert losses[True][-1] < 0.8 * losses[True][0]
    assert abs(losses[True][-1] - losses[False][-1]) < 0.1 * losses[False][0]

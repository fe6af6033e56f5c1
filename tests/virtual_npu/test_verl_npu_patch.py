"""verl 0.9.1's own npu_patch, unmodified, against the models that it patches, on the virtual NPU (arithmetic by the
CPU): forward and every gradient of a tiny model of each of its nine families.

The differences that are known are listed here and written down in docs/upstream/verl_npu_patch.md. Each test asserts
exactly its entry of the list, so that a repair upstream, or a new fault, shows.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from references import error_bound, exactly, max_error, nudged
from torch import nn

from npu_backend import model_configs
from npu_backend.patches import observe
from npu_backend.verification import models

pytest.importorskip("verl", reason="verl is in the main environment only")

NPU = "npu:0"
FAMILIES = (
    "qwen2",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
)
MODULES = [f"transformers.models.{family}.modeling_{family}" for family in FAMILIES]
SPARSE = tuple(family for family in FAMILIES if family.endswith("moe") or family == "qwen3_next")
GELU = {"hidden_act": "gelu_pytorch_tanh"}
Tensors = dict[str, torch.Tensor]

# (what is asked, family) -> how the patched model differs; what is not here must be equal
KNOWN = {
    ("checkpoint", "qwen3_vl_moe"): "shape of mlp.experts.down_proj, mlp.experts.gate_up_proj",
    ("router logits", "qwen3_vl_moe"): "IndexError",
    **{("activation", family): "values" for family in FAMILIES if family != "qwen3_5"},
}


@contextmanager
def patched_by_verl() -> Iterator[None]:
    """verl's patches for all families, as its engine applies them; every original is put back."""
    from verl.models.transformers import npu_patch

    assert set(npu_patch.NPU_PATCHES) == set(FAMILIES)
    before = observe.snapshot(MODULES)
    try:
        npu_patch.apply_npu_patches()
        yield
    finally:
        for slot, original, _ in observe.differences(before):
            slot.put(original)


def tiny(family: str, **settings: Any) -> nn.Module:
    """A small model; `settings` go to every part of its configuration that has them."""
    config = models.shrunk(model_configs.default_config(family))
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "model_type"))):
        for name, value in settings.items():
            if hasattr(part, name):
                setattr(part, name, value)
    return models.tiny_model(config)


def copied(state: Tensors, model: nn.Module) -> nn.Module:
    """`model` with these weights; experts that verl stores the other way round are turned."""
    own = model.state_dict()
    assert own.keys() == state.keys()
    model.load_state_dict({k: v if v.shape == own[k].shape else v.transpose(1, 2) for k, v in state.items()})
    return model


def forward_backward(model: nn.Module, device: str = NPU, autocast: bool = False, **options: Any) -> Tensors:
    """Logits and every gradient, on the CPU."""
    model.to(device).zero_grad()
    given = models.inputs(model)
    if "pixel_values" in given:
        given["pixel_values"] = given["pixel_values"].to(next(model.parameters()).dtype)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
        out = model(**given, labels=given["input_ids"], use_cache=False, **options)
    out.loss.backward()
    grads = {name: p.grad.to("cpu", copy=True) for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach().float().cpu(), **grads}


def difference(family: str, *, train: bool = True, settings: Any = None, **options: Any) -> str:
    """How the patched model differs from the unpatched one on the same virtual NPU: an exception's name, `values`, or
    nothing. A tensor may be off by a small multiple of what the unpatched one is off from float64, or of how far one
    rounding of each weight moves it: a gradient of four numbers (A_log) is no good estimate of rounding by itself.
    """
    original = tiny(family, **(settings or {})).train(train)
    dtype = torch.bfloat16 if options.get("autocast") else torch.float32
    in_float64 = {k: v for k, v in options.items() if k != "autocast"}
    exact = forward_backward(exactly(original), "cpu", **in_float64)
    moved = forward_backward(nudged(exactly(original), dtype), "cpu", **in_float64)
    eager = forward_backward(original, **options)
    with patched_by_verl():
        patched = copied(original.state_dict(), tiny(family, **(settings or {}))).train(train)
        try:
            got = forward_backward(patched, **options)
        except Exception as error:
            return type(error).__name__
    assert got.keys() == eager.keys()
    for name, value in got.items():
        value = value if value.shape == eager[name].shape else value.transpose(1, 2)
        if max_error(value, exact[name]) > max(error_bound(peer[name], exact[name], dtype) for peer in (eager, moved)):
            return "values"
    return ""


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_gradients(family):
    assert difference(family) == KNOWN.get(("values", family), "")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_fits(family):
    original = tiny(family).state_dict()
    with patched_by_verl():
        patched = tiny(family).state_dict()
    assert patched.keys() == original.keys()
    moved = [name for name in original if original[name].shape != patched[name].shape]
    wrong = sorted({re.sub(r".*layers\.\d+\.", "", name) for name in moved})
    assert ("shape of " + ", ".join(wrong) if wrong else "") == KNOWN.get(("checkpoint", family), "")


@pytest.mark.parametrize("family", SPARSE)
def test_router_logits(family):
    assert difference(family, output_router_logits=True) == KNOWN.get(("router logits", family), "")


@pytest.mark.parametrize("family", FAMILIES)
def test_another_activation(family):
    """The replacements compute SiLU whatever the configuration says."""
    assert difference(family, settings=GELU) == KNOWN.get(("activation", family), "")


def test_the_vl_moe_experts_follow_the_activation_in_evaluation_only():
    assert difference("qwen3_vl_moe", settings=GELU, train=False) == ""


def test_a_norm_in_a_narrower_dtype_than_its_input():
    """The original's result has the wider of both dtypes."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    norm, x = Qwen3RMSNorm(64).to(NPU, torch.bfloat16), torch.randn(3, 64, device=NPU)
    assert norm(x).dtype == torch.float32
    with patched_by_verl():
        assert norm(x).dtype == torch.bfloat16


def test_the_position_of_unsqueeze_dim():
    """The fifth argument of apply_rotary_pos_emb since transformers 5; verl has another one in that place."""
    modeling = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    q, cos = torch.randn(1, 5, 4, 64, device=NPU), torch.randn(1, 5, 64, device=NPU)
    expected = modeling.apply_rotary_pos_emb(q, q, cos, cos, 2)[0]
    with patched_by_verl():
        torch.testing.assert_close(modeling.apply_rotary_pos_emb(q, q, cos, cos, unsqueeze_dim=2)[0], expected)
        with pytest.raises(RuntimeError):
            modeling.apply_rotary_pos_emb(q, q, cos, cos, 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{"train": False}, {"autocast": True}], ids=["evaluation", "autocast"])
def test_forward_and_gradients_otherwise(family, options):
    assert difference(family, **options) == ""

"""Adapters on the output head: `modules_to_save` is what the model itself would compute, LoRA on it an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

import npu_backend
from npu_backend.errors import HeadInputError

peft = pytest.importorskip("peft")
TEMPERATURE = 0.7
IDS = tiny_models.tokens(2, 6)


def with_lora(model: Any, **options: Any) -> Any:
    """Adapters that do something: lora_B is zero and a trained copy equal to the original at first."""
    options.setdefault("target_modules", ["q_proj"])
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return adapted.eval()


def patched(model: Any) -> Any:
    npu_backend.patch_forward_with_backends(model, use_fused_kernels=True)
    return model


def full_logits(model: Any) -> tuple[Tensor, Tensor]:
    log_p = (model(input_ids=IDS).logits / TEMPERATURE).log_softmax(-1)
    of_label = log_p.gather(-1, IDS.roll(-1, -1)[..., None])[..., 0]
    return of_label, -(log_p.exp() * log_p).sum(-1)


def fused(model: Any) -> tuple[Tensor, Tensor]:
    output = model(input_ids=IDS, temperature=TEMPERATURE, use_cache=False)
    return output.log_probs, output.entropy


def assert_same(model: Any, reference: Any) -> None:
    """Outputs, and which parameters get which gradients: float32, a few hundred roundings of the largest entry."""
    for one, run in ((model, fused), (reference, full_logits)):
        one.zero_grad(set_to_none=True)
        log_probs, entropy = one.outputs = run(one)
        (log_probs - 0.1 * entropy).sum().backward()
    for got, wanted in zip(model.outputs, reference.outputs):
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = expected[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None:
            assert (parameter.grad - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name


@pytest.mark.case("A30", "D20")
@pytest.mark.parametrize("family", ["qwen2", "qwen2_tied", "phi"])
@pytest.mark.parametrize("adapter_first", [True, False])
def test_the_trained_copy_of_the_head_is_used_and_trained(family: str, adapter_first: bool) -> None:
    model = tiny_models.build(family)
    reference = with_lora(copy.deepcopy(model), modules_to_save=["lm_head"])
    if not adapter_first:
        patched(model)
    model = with_lora(model, modules_to_save=["lm_head"])
    model.load_state_dict(reference.state_dict())
    if adapter_first:
        patched(model)
    assert_same(model, reference)
    wrapper = model.get_base_model().lm_head
    assert wrapper.modules_to_save["default"].weight.grad.abs().max() > 0
    assert wrapper.original_module.weight.grad is None or family == "qwen2_tied"


@pytest.mark.case("A30", "D20")
def test_the_head_that_peft_would_run_now_is_the_one_that_runs() -> None:
    model = with_lora(tiny_models.build("qwen2"), modules_to_save=["lm_head"])
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.add_adapter("without", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    for name, parameter in model.named_parameters():
        if "second" in name or "without" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    reference, model, seen = copy.deepcopy(model), patched(model), []
    for adapter in ("default", "second", "without"):
        for one in (model, reference):
            one.set_adapter(adapter)
        with torch.no_grad():
            seen.append(fused(model)[0])
            torch.testing.assert_close(seen[-1], full_logits(reference)[0], rtol=1e-5, atol=1e-5)
    with torch.no_grad(), model.disable_adapter(), reference.disable_adapter():
        seen.append(fused(model)[0])
        torch.testing.assert_close(seen[-1], full_logits(reference)[0], rtol=1e-5, atol=1e-5)
    assert all((a - b).abs().max() > 1e-3 for i, a in enumerate(seen) for b in seen[:i])


@pytest.mark.case("A30")
def test_a_batch_of_mixed_adapters_is_refused() -> None:
    model = patched(with_lora(tiny_models.build("qwen2"), modules_to_save=["lm_head"]))
    for names in (["default", "default"], ["default", "__base__"]):
        with pytest.raises(HeadInputError, match=r"labels must be|adapter per batch"):
            model(input_ids=IDS, temperature=TEMPERATURE, use_cache=False, adapter_names=names)


@pytest.mark.case("D19")
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("adapter_first", [True, False])
def test_lora_on_the_head_is_refused_by_name(adapter_first: bool, use_dora: bool) -> None:
    model = tiny_models.build("qwen2")
    if not adapter_first:
        patched(model)
    adapted = with_lora(model, target_modules=["lm_head"], use_dora=use_dora)
    with pytest.raises(HeadInputError, match=r"peft\..* with adapter default.*use_fused_kernels=False"):
        patched(adapted) if adapter_first else fused(adapted)
    if adapter_first:
        assert "forward" not in vars(model)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_tied"])
def test_a_frozen_head_costs_no_product_for_its_gradient(family: str, operators: Any) -> None:
    """LoRA elsewhere: per chunk one product in forward, two in backward, and no [V, H] gradient."""
    model = patched(with_lora(tiny_models.build(family)))
    head = model.get_base_model().lm_head
    assert not head.weight.requires_grad
    hidden = torch.randn(2, 6, 32, requires_grad=True)
    with operators() as seen:
        log_probs = npu_backend.linear_log_prob(hidden, head.weight, IDS, bias=head.bias).log_probs
        assert seen["aten.mm.default"] == 1
        log_probs.sum().backward()
    assert seen["aten.mm.default"] == 3
    head.weight.requires_grad_()
    with operators() as seen:
        npu_backend.linear_log_prob(hidden, head.weight, IDS).log_probs.sum().backward()
    assert seen["aten.mm.default"] == 4

"""RMSNorm: dtype rules in all pairs, float64 parity, and the inputs that go to the original forward."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import operator_references as exact
import pytest
import torch
from fake_torch_npu import FakeTorchNpu
from operator_references import PAIRS, normal
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from npu_backend.operators import counters, rms_norm

KINDS = {
    "plain": (LlamaRMSNorm, rms_norm.plain, exact.rms_norm),
    "offset": (Gemma2RMSNorm, rms_norm.offset, exact.offset_rms_norm),
    "gated": (Qwen3NextRMSNormGated, rms_norm.gated, exact.gated_rms_norm),
}


def calling(kind: type[nn.Module], forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward` of a module whose weight is an argument, so that its gradient is one of those compared."""

    def call(x: Tensor, weight: Tensor, **others: Tensor) -> Tensor:
        module = kind(weight.shape[0], eps=1e-6)
        del module.weight
        module.weight = weight
        return forward(module, x, **others)

    return call


def inputs(kind: str, *shape: int, x: torch.dtype, weight: torch.dtype) -> dict[str, Tensor]:
    found = {"x": normal(*shape, dtype=x), "weight": (1 + 0.3 * normal(shape[-1], seed=1)).to(weight)}
    return found | ({"gate": normal(*shape, seed=2, dtype=x)} if kind == "gated" else {})


@pytest.mark.case("A05", "B04", "B05")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("x", "weight"), PAIRS)
def test_every_dtype_pair_keeps_the_original_dtype_and_precision(
    kind: str, x: torch.dtype, weight: torch.dtype, npu: FakeTorchNpu, context: Any
) -> None:
    module, factory, reference = KINDS[kind]
    patched = calling(module, factory(module.forward, context))
    exact.assert_parity(patched, calling(module, module.forward), reference, inputs(kind, 2, 5, 64, x=x, weight=weight))
    assert npu.count("npu_rms_norm") == 1
    assert len({operand.dtype for operand in npu.operands("npu_rms_norm")}) == 1
    assert counters.calls() == {"rms_norm": 1}
    assert counters.fallbacks() == {}


@pytest.mark.case("B05")
def test_float32_hidden_with_bfloat16_weight_stays_float32(npu: FakeTorchNpu, context: Any) -> None:
    module = LlamaRMSNorm(64).to(torch.bfloat16)
    x = normal(3, 64)
    got, expected = rms_norm.plain(LlamaRMSNorm.forward, context)(module, x), module(x)
    assert got.dtype == expected.dtype == torch.float32
    assert (got - expected).abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_strided_input_gives_the_same_and_the_operator_sees_it_contiguous(
    kind: str, npu: FakeTorchNpu, context: Any
) -> None:
    module, factory, reference = KINDS[kind]
    given = inputs(kind, 4, 6, 32, x=torch.float32, weight=torch.float32)
    given["x"] = given["x"].transpose(0, 1)
    if kind == "gated":
        given["gate"] = given["gate"].transpose(0, 1)
    exact.assert_parity(
        calling(module, factory(module.forward, context)), calling(module, module.forward), reference, given
    )
    assert all(operand.is_contiguous() for operand in npu.operands("npu_rms_norm"))


@pytest.mark.case("A24")
def test_a_norm_without_weight_runs_its_own_forward(npu: FakeTorchNpu, context: Any) -> None:
    class Norm(nn.Module):
        weight = None
        variance_epsilon = 1e-6

        def forward(self, hidden_states: Tensor) -> Tensor:
            normalised = hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + 1e-6)
            return normalised if self.weight is None else normalised * self.weight

    x = normal(3, 8)
    assert torch.equal(rms_norm.plain(Norm.forward, context)(Norm(), x), Norm()(x))
    assert counters.fallbacks() == {"rms_norm": {"no weight": 1}}


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.zeros(3, 8, dtype=torch.float64), "dtype float64"),
        (torch.zeros(0, 8), "empty input"),
        (torch.zeros(8), "1 dimensions"),
        (torch.zeros(3, 8, device="meta"), "a tensor is on meta"),
    ],
)
def test_what_the_operator_must_not_take_goes_to_the_original(
    x: Tensor, reason: str, npu: FakeTorchNpu, context: Any
) -> None:
    module = LlamaRMSNorm(8).to(x.device)
    got, expected = rms_norm.plain(LlamaRMSNorm.forward, context)(module, x), module(x)
    assert (got.shape, got.dtype, got.device) == (expected.shape, expected.dtype, expected.device)
    assert counters.fallbacks() == {"rms_norm": {reason: 1}}
    assert npu.seen == []


def test_a_gated_norm_without_gate_fails_as_the_original_does(npu: FakeTorchNpu, context: Any) -> None:
    with pytest.raises(AttributeError):
        rms_norm.gated(Qwen3NextRMSNormGated.forward, context)(Qwen3NextRMSNormGated(8), normal(3, 8))


def test_frozen_weight_and_frozen_input(npu: FakeTorchNpu, context: Any) -> None:
    forward = rms_norm.plain(LlamaRMSNorm.forward, context)
    module = LlamaRMSNorm(8)
    module.weight.requires_grad_(False)
    x = normal(3, 8).requires_grad_()
    forward(module, x).sum().backward()
    assert x.grad is not None
    assert module.weight.grad is None


def test_the_offset_is_not_rounded_to_the_input_dtype(npu: FakeTorchNpu, context: Any) -> None:
    """1 + 0.001 is 1 in bfloat16: an update of that size would never reach the forward."""
    module = Gemma2RMSNorm(64)
    nn.init.constant_(module.weight, 0.001)
    rms_norm.offset(Gemma2RMSNorm.forward, context)(module.to(torch.bfloat16), normal(3, 64, dtype=torch.bfloat16))
    gamma = npu.operands("npu_rms_norm")[1]
    assert torch.all(gamma > 1)


def test_requires_names_the_operator_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import fake_torch_npu

    fake_torch_npu.install(monkeypatch, {})
    assert rms_norm.requires(None, SimpleNamespace(hf_config=None)) == "this torch_npu has no npu_rms_norm"

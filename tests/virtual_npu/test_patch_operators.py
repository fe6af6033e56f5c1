"""Our operators through torch_npu's own dispatch and autograd, on the virtual NPU (arithmetic by the CPU)."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import operator_references as exact
import pytest
import torch
from operator_references import DTYPES, PAIRS, normal
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from npu_backend.operators import counters, gated_mlp, rms_norm, rotary, sparse_moe

NPU = "npu:0"
CONTEXT = SimpleNamespace(hf_config=None)
NORMS = {
    "plain": (LlamaRMSNorm, rms_norm.plain, exact.rms_norm),
    "offset": (Gemma2RMSNorm, rms_norm.offset, exact.offset_rms_norm),
    "gated": (Qwen3NextRMSNormGated, rms_norm.gated, exact.gated_rms_norm),
}


@pytest.fixture(autouse=True)
def fresh_counters() -> None:
    counters.reset()


@pytest.mark.case("A05", "B04", "B05")
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(("x", "weight"), PAIRS)
def test_rms_norm(kind: str, x: torch.dtype, weight: torch.dtype) -> None:
    module, factory, reference = NORMS[kind]

    def calling(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, weight: Tensor, **others: Tensor) -> Tensor:
            norm = module(weight.shape[0], eps=1e-6)
            del norm.weight
            norm.weight = weight
            return forward(norm, x, **others)

        return call

    given = {"x": normal(7, 3, 64, dtype=x).transpose(0, 1), "weight": normal(64, seed=1, dtype=weight)}
    if kind == "gated":
        given["gate"] = normal(3, 7, 64, seed=2, dtype=x)
    patched = calling(factory(module.forward, CONTEXT))
    exact.assert_parity(patched, calling(module.forward), reference, given, device=NPU)
    assert counters.calls() == {"rms_norm": 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_mlp(dtype: torch.dtype) -> None:
    config = SimpleNamespace(hidden_size=16, intermediate_size=24, hidden_act="silu")

    def calling(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            mlp = Phi3MLP(config)
            for layer, weight in ((mlp.gate_up_proj, gate_up), (mlp.down_proj, down)):
                del layer.weight
                layer.weight = weight
            return forward(mlp, x)

        return call

    def reference(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (x @ gate_up.t()).chunk(2, -1)
        return (nn.functional.silu(gate) * up) @ down.t()

    given = {"x": normal(7, 16), "gate_up": normal(48, 16, seed=1) / 4, "down": normal(16, 24, seed=2) / 5}
    given = {name: t.to(dtype) for name, t in given.items()}
    patched = calling(gated_mlp.fused(Phi3MLP.forward, CONTEXT))
    exact.assert_parity(patched, calling(Phi3MLP.forward), reference, given, device=NPU)
    assert counters.calls() == {"gated_mlp": 1}


@pytest.mark.case("B06")
def test_swiglu_of_nothing_and_of_an_odd_axis() -> None:
    assert gated_mlp.swiglu(torch.zeros(0, 8, device=NPU)).shape == (0, 4)
    with pytest.raises(ValueError, match="size is 7"):
        gated_mlp.swiglu(torch.zeros(3, 7, device=NPU))


@pytest.mark.case("B12")
@pytest.mark.parametrize("rotary_dim", [64, 16])
@pytest.mark.parametrize("bsnd_memory", [True, False])
@pytest.mark.parametrize(("q", "cos"), PAIRS)
def test_rotary(rotary_dim: int, bsnd_memory: bool, q: torch.dtype, cos: torch.dtype) -> None:
    family = "llama" if rotary_dim == 64 else "qwen3_next"
    original = importlib.import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb
    factory = rotary.standard if family == "llama" else rotary.partial

    def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return exact.rotary(q, cos[:, None], sin[:, None]), exact.rotary(k, cos[:, None], sin[:, None])

    half = normal(2, 5, rotary_dim // 2, seed=3)
    angle = torch.cat((half, half), -1)
    given = {name: normal(2, 5, heads, 64, dtype=q).transpose(1, 2) for name, heads in (("q", 4), ("k", 2))}
    if not bsnd_memory:
        given = {name: t.contiguous() for name, t in given.items()}
    given |= {"cos": angle.cos().to(cos), "sin": angle.sin().to(cos)}
    exact.assert_parity(factory(original, CONTEXT), original, reference, given, device=NPU)
    assert counters.calls() == {"rotary": 2}


@pytest.mark.case("B02")
def test_rotary_of_multi_query_decode() -> None:
    """One head and one token: in both orders, so without the limits of BNSD."""
    original = importlib.import_module("transformers.models.llama.modeling_llama").apply_rotary_pos_emb

    def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return exact.rotary(q, cos[:, None], sin[:, None]), exact.rotary(k, cos[:, None], sin[:, None])

    half = normal(9, 1, 36, seed=3)
    angle = torch.cat((half, half), -1).bfloat16()
    given = {
        name: normal(9, 1, heads, 72, dtype=torch.bfloat16).transpose(1, 2) for name, heads in (("q", 2), ("k", 1))
    }
    given |= {"cos": angle.cos(), "sin": angle.sin()}
    exact.assert_parity(rotary.standard(original, CONTEXT), original, reference, given, device=NPU)
    assert counters.calls() == {"rotary": 2}
    assert counters.fallbacks() == {}


@pytest.mark.case("B01", "B16")
@pytest.mark.parametrize("out_in", [True, False])
@pytest.mark.parametrize("probs", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_routed_experts(dtype: torch.dtype, probs: torch.dtype, out_in: bool) -> None:
    index = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [1, 3]])  # nobody chooses expert 2

    def reference(x: Tensor, probs: Tensor, up: Tensor, down: Tensor) -> Tensor:
        up, down = (up, down) if out_in else (up.transpose(1, 2), down.transpose(1, 2))
        return exact.experts(x, index, probs, up, down)

    def calling(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, probs: Tensor, up: Tensor, down: Tensor) -> Tensor:
            return f(x, index.to(x.device), probs, [up], [down], 4, out_in=out_in)

        return call

    given: dict[str, Any] = {"x": normal(5, 16, dtype=dtype), "probs": normal(5, 2, seed=1).sigmoid().to(probs)}
    up, down = normal(4, 24, 16, seed=2, dtype=dtype) / 4, normal(4, 16, 12, seed=3, dtype=dtype) / 4
    given |= {"up": up, "down": down} if out_in else {"up": up.transpose(1, 2), "down": down.transpose(1, 2)}
    original = calling(sparse_moe.routed_experts_reference)
    got = exact.assert_parity(calling(sparse_moe.routed_experts), original, reference, given, device=NPU)
    assert torch.equal(got["grad up"][2], torch.zeros_like(got["grad up"][2]))
    assert torch.equal(got["grad down"][2], torch.zeros_like(got["grad down"][2]))
    assert counters.calls() == {"sparse_moe": 1}


@pytest.mark.case("C11")
def test_a_thousand_batches_of_different_sizes_leave_no_memory_behind() -> None:
    """What a device shows after hours, here by torch_npu's own allocator; arithmetic by the CPU."""
    up, down = (normal(4, *shape, seed=2).to(NPU).requires_grad_() for shape in ((24, 16), (16, 12)))
    gc.collect()  # what another test left in a cycle must not be freed between two readings
    held = set()
    for step in range(1000):
        tokens = 1 + step * 37 % 61
        index = (torch.arange(2 * tokens) % 4).view(tokens, 2)
        probs = torch.full((tokens, 2), 0.5, device=NPU)
        x = normal(tokens, 16, seed=step).to(NPU)
        sparse_moe.routed_experts(x, index.to(NPU), probs, [up], [down], 4, out_in=True).sum().backward()
        up.grad = down.grad = x = probs = None
        held.add(torch.npu.memory_allocated())
    assert len(held) == 1

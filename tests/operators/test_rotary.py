"""Rotary embedding: signatures of both releases, dtype pairs, layouts, partial rotation, and the documented limits."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fake_torch_npu
import operator_references as exact
import pytest
import torch
from fake_torch_npu import FakeTorchNpu
from operator_references import PAIRS, normal
from torch import Tensor

from npu_backend.errors import PatchTargetError
from npu_backend.operators import counters, rms_norm, rotary

B, S, N, KV, D = 2, 5, 4, 2, 16


def function(family: str, name: str = "apply_rotary_pos_emb") -> Callable[..., Any]:
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)  # type: ignore[no-any-return]


def angles(rotary_dim: int, dtype: torch.dtype, batch: int = B) -> dict[str, Tensor]:
    half = normal(batch, S, rotary_dim // 2, seed=7)
    angle = torch.cat((half, half), -1)
    return {"cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}


def heads(dtype: torch.dtype, head_dim: int = D, *, bsnd_memory: bool = True) -> dict[str, Tensor]:
    """q and k as attention has them: [B, N, S, D] views of [B, S, N, D] memory."""
    found = {"q": normal(B, S, N, head_dim, seed=1), "k": normal(B, S, KV, head_dim, seed=2)}
    views = {name: t.to(dtype).transpose(1, 2) for name, t in found.items()}
    return views if bsnd_memory else {name: t.contiguous() for name, t in views.items()}


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return exact.rotary(q, cos, sin), exact.rotary(k, cos, sin)


@pytest.mark.parametrize("bsnd_memory", [True, False])
@pytest.mark.parametrize(("q", "cos"), PAIRS)
def test_every_dtype_pair(q: torch.dtype, cos: torch.dtype, bsnd_memory: bool, npu: FakeTorchNpu, context: Any) -> None:
    original = function("llama")
    given = heads(q, bsnd_memory=bsnd_memory) | angles(D, cos)
    exact.assert_parity(rotary.standard(original, context), original, reference, given)
    assert npu.count("npu_rotary_mul") == counters.calls()["rotary"] == 2
    assert all(operand.is_contiguous() for operand in npu.operands("npu_rotary_mul"))


@pytest.mark.case("B12")
@pytest.mark.parametrize(
    ("family", "head_dim", "rotary_dim"),
    [("qwen3_next", 256, 64), ("phi3", 96, 72), ("phi3", 128, 64), ("qwen3_next", 32, 32)],
)
def test_partial_rotation_leaves_the_other_channels_alone(
    family: str, head_dim: int, rotary_dim: int, npu: FakeTorchNpu, context: Any
) -> None:
    original = function(family)
    given = heads(torch.float32, head_dim) | angles(rotary_dim, torch.float32)
    got = exact.assert_parity(rotary.partial(original, context), original, reference, given)
    eager = exact.run(original, given)
    assert (got["output 0"] - eager["output 0"]).abs().max() < 1e-6
    assert torch.equal(got["output 0"][..., rotary_dim:], given["q"][..., rotary_dim:])
    assert {operand.shape[-1] for operand in npu.operands("npu_rotary_mul")} == {rotary_dim}


def test_partial_rotation_is_refused_where_the_original_rotates_whole_heads(npu: FakeTorchNpu, context: Any) -> None:
    given = heads(torch.float32) | angles(D // 2, torch.float32)
    with pytest.raises(RuntimeError, match="size of tensor"):  # the original's own error
        rotary.standard(function("llama"), context)(**given)
    assert npu.seen == []


@pytest.mark.case("A06", "A07")
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "qwen3_next", "qwen2_5_vl"])
def test_positional_calls_mean_what_they_mean_to_the_original(family: str, npu: FakeTorchNpu, context: Any) -> None:
    """transformers 5.2 took position_ids out of the middle: the fifth argument is unsqueeze_dim there."""
    if family == "qwen2_5_vl":
        original, factory = function(family, "apply_multimodal_rotary_pos_emb"), rotary.multimodal
    else:
        original, factory = function(family), rotary.partial if family in ("phi3", "qwen3_next") else rotary.standard
    patched = factory(original, context)
    assert [p.replace(annotation=p.empty) for p in inspect.signature(patched).parameters.values()] == [
        p.replace(annotation=p.empty) for p in inspect.signature(original).parameters.values()
    ]
    q, k = normal(2, 5, 4, 16), normal(2, 5, 2, 16, seed=1)
    cos, sin = angles(16, torch.float32).values()
    if family == "qwen2_5_vl":
        arguments: tuple[Any, ...] = (torch.stack([cos] * 3), torch.stack([sin] * 3), [2, 3, 3], 2)
    else:
        arguments = (cos, sin, None, 2) if "position_ids" in inspect.signature(original).parameters else (cos, sin, 2)
    for got, expected in zip(patched(q, k, *arguments), original(q, k, *arguments)):
        torch.testing.assert_close(got, expected)
    assert counters.calls() == {"rotary": 2}


@pytest.mark.case("A06")
def test_an_unknown_signature_is_an_error_that_lists_the_known_ones(context: Any) -> None:
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, freqs: Tensor) -> Tensor: ...

    with pytest.raises(PatchTargetError, match=r"\(q, k, freqs\).*position_ids"):
        rotary.standard(apply_rotary_pos_emb, context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multimodal_sections(dtype: torch.dtype, npu: FakeTorchNpu, context: Any) -> None:
    original = function("qwen2_5_vl", "apply_multimodal_rotary_pos_emb")
    sections = [2, 3, 3]
    given = heads(dtype) | {name: torch.stack([t, 0.5 * t, -t]) for name, t in angles(D, dtype).items()}

    def multimodal(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        axis = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2] * 2)  # channel -> time, height or width
        cos, sin = (t[axis, :, :, torch.arange(D)].permute(1, 2, 0) for t in (cos, sin))
        return reference(q, k, cos, sin)

    def calling(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, cos, sin: f(q, k, cos, sin, sections)

    exact.assert_parity(calling(rotary.multimodal(original, context)), calling(original), multimodal, given)
    assert counters.calls() == {"rotary": 2}
    assert sections == [2, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vision_computes_in_float32_and_returns_the_input_dtype(
    dtype: torch.dtype, npu: FakeTorchNpu, context: Any
) -> None:
    original = function("qwen2_5_vl", "apply_rotary_pos_emb_vision")
    given = {"q": normal(9, 4, D, seed=1, dtype=dtype), "k": normal(9, 4, D, seed=2, dtype=dtype)}
    half = normal(9, D // 2, seed=3)
    given |= {"cos": torch.cat((half, half), -1).cos(), "sin": torch.cat((half, half), -1).sin()}

    def vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return exact.rotary(q, cos[:, None], sin[:, None]), exact.rotary(k, cos[:, None], sin[:, None])

    exact.assert_parity(rotary.vision(original, context), original, vision, given)
    assert {operand.dtype for operand in npu.operands("npu_rotary_mul")} == {torch.float32}


@pytest.mark.case("B03")
def test_limits_follow_the_documentation_of_each_release() -> None:
    def ok(release: str, head_dim: int, **sizes: Any) -> bool:
        sizes = {"batch": 2, "heads": 4, "seq": 64, "layout": "BSND"} | sizes
        return rotary.RELEASES[release].why_not(head_dim=head_dim, **sizes) is None

    assert not ok("6.0.0", 64)
    assert ok("6.0.0", 128)
    assert not ok("6.0.0", 128, repeats=1025)
    assert ok("7.0.0", 64)
    assert not ok("7.0.0", 900)
    assert not ok("7.0.0", 896)
    assert not ok("7.0.0", 63)
    assert ok("6.0.0", 128, batch=1000)
    assert not ok("7.0.0", 128, batch=1000)
    assert not ok("7.0.0", 128, heads=1000)
    assert ok("7.0.0", 128, batch=64, heads=64)
    assert not ok("7.0.0", 128, batch=64, heads=64, trained=True)


@pytest.mark.case("B03")
def test_the_schema_tells_the_release(monkeypatch: pytest.MonkeyPatch, context: Any) -> None:
    def npu_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return exact.rotary(x, r1, r2)

    fake_torch_npu.install(monkeypatch, {"npu_rotary_mul": npu_rotary_mul})
    assert rotary.limits() is rotary.RELEASES["6.0.0"]
    original, given = function("llama"), heads(torch.float32) | angles(D, torch.float32)
    assert torch.equal(rotary.standard(original, context)(**given)[0], original(**given)[0])
    assert counters.fallbacks() == {"rotary": {f"rotary dimension {D}": 1}}
    fake_torch_npu.install(monkeypatch)
    assert rotary.limits() is rotary.RELEASES["7.0.0"]


@pytest.mark.case("B02")
@pytest.mark.parametrize(("batch", "heads_", "seq", "head_dim"), [(64, 64, 16, 72), (64, 64, 16, 128), (1, 4, 64, 72)])
def test_bnsd_beyond_its_limits_runs_eager(
    batch: int, heads_: int, seq: int, head_dim: int, npu: FakeTorchNpu, context: Any
) -> None:
    sizes = {"batch": batch, "heads": heads_, "seq": seq, "head_dim": head_dim}
    assert all(limit.why_not(layout="BNSD", **sizes) for limit in rotary.RELEASES.values())
    assert rotary.RELEASES["7.0.0"].why_not(layout="BSND", **sizes) is None
    original = function("qwen3")
    q = normal(2, 9, 2, 72, dtype=torch.bfloat16)  # the same two limits, at a size that is quick
    cos, sin = (t[:, :2] for t in angles(72, torch.bfloat16).values())
    for got, expected in zip(rotary.standard(original, context)(q, q, cos, sin), original(q, q, cos, sin)):
        assert torch.equal(got, expected)
    assert npu.seen == []


@pytest.mark.case("B02")
@pytest.mark.parametrize("head_dim", [16, 72])  # 72 x 2 bytes are no multiple of 32
@pytest.mark.parametrize(("kv_heads", "seq", "bsnd_memory"), [(1, 1, True), (1, 5, True), (1, 5, False), (4, 1, False)])
def test_one_head_or_one_token_has_none_of_the_limits_of_bnsd(
    kv_heads: int, seq: int, bsnd_memory: bool, head_dim: int, npu: FakeTorchNpu, context: Any
) -> None:
    """Multi-query decode: the strides of an axis of size 1 say nothing about the order of the memory."""
    original, batch = function("llama"), 9 * seq
    sizes = {"q": 2 * kv_heads, "k": kv_heads}
    given = {name: normal(batch, seq, n, head_dim, seed=n, dtype=torch.bfloat16) for name, n in sizes.items()}
    given = {name: t.transpose(1, 2) for name, t in given.items()}
    if not bsnd_memory:
        given["k"] = given["k"].clone(memory_format=torch.contiguous_format)
    given |= {name: t[:, :seq] for name, t in angles(head_dim, torch.bfloat16, 1).items()}
    exact.assert_parity(rotary.standard(original, context), original, reference, given)
    assert counters.calls() == {"rotary": 2}
    assert counters.fallbacks() == {}
    assert npu.operands("npu_rotary_mul")[3].shape == (batch, seq, kv_heads, head_dim)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_layout_and_shared_angles(unsqueeze_dim: int, shared: bool, npu: FakeTorchNpu, context: Any) -> None:
    original = function("qwen3")
    given = heads(torch.float32)
    if unsqueeze_dim == 2:
        given = {name: t.transpose(1, 2) for name, t in given.items()}
    given |= angles(D, torch.float32, 1 if shared else B)
    for got, expected in zip(
        rotary.standard(original, context)(**given, unsqueeze_dim=unsqueeze_dim),
        original(**given, unsqueeze_dim=unsqueeze_dim),
    ):
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride()
    assert counters.calls() == {"rotary": 2}


@pytest.mark.parametrize(
    "change",
    [
        {"q": torch.zeros(B, N, S, D, dtype=torch.float64)},
        {
            "q": torch.zeros(0, N, S, D),
            "k": torch.zeros(0, KV, S, D),
            "cos": torch.zeros(0, S, D),
            "sin": torch.zeros(0, S, D),
        },
        {"cos": torch.zeros(B, 1, D), "sin": torch.zeros(B, 1, D)},
        {"cos": torch.zeros(S, D), "sin": torch.zeros(S, D)},
        {"unsqueeze_dim": -3},
    ],
)
def test_what_the_operator_must_not_take_goes_to_the_original(
    change: dict[str, Any], npu: FakeTorchNpu, context: Any
) -> None:
    original = function("qwen3")
    given = heads(torch.float32) | angles(D, torch.float32) | change
    if isinstance(change.get("cos"), Tensor) and change["cos"].dim() == 2:
        given["unsqueeze_dim"] = 0
    for got, expected in zip(rotary.standard(original, context)(**given), original(**given)):
        assert torch.equal(got, expected)
    assert npu.seen == []
    assert sum(counters.fallbacks()["rotary"].values()) == 1


@pytest.mark.case("B13")
def test_a_torch_npu_without_the_operator_skips_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = {name: f for name, f in fake_torch_npu.OPERATORS.items() if name != "npu_rotary_mul"}
    fake_torch_npu.install(monkeypatch, operators)
    context = SimpleNamespace(hf_config=None)
    assert rotary.requires(function("llama"), context) == "this torch_npu has no npu_rotary_mul"
    assert rms_norm.requires(function("llama", "LlamaRMSNorm").forward, context) is None

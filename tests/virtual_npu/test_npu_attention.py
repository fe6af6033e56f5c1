"""Attention operators on the virtual NPU (arithmetic by the CPU): sparse modes, sinks, versions, inference, limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from npu_operator_checks import DTYPES, compare, normal, zeros
from torch import Tensor

npu = torch.ops.npu
SCALE = 0.25
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
PREFIX_MASK = torch.cat((TRIANGLE, (torch.arange(2048) >= 1024).expand(1024, 2048)))
QKV = {"q": normal(2, 4, 5, 8), "k": normal(2, 2, 7, 8, seed=1), "v": normal(2, 2, 7, 8, seed=2)}
PACKED = {"q": normal(9, 4, 8), "k": normal(12, 2, 8, seed=1), "v": normal(12, 2, 8, seed=2)}
Q_ENDS, K_ENDS = [4, 4, 9], [5, 5, 12]  # the second sequence is empty


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * SCALE


def attend(q: Tensor, k: Tensor, v: Tensor, masked: Tensor | None = None, sink: Tensor | None = None) -> Tensor:
    """Attention of [batch, heads, sequence, width], written out; a sink is one more score, without a value."""
    scores = scores_of(q, k) if masked is None else scores_of(q, k).masked_fill(masked, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[2]]
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def distance(rows: int, columns: int, lower_right: bool = True) -> Tensor:
    found = torch.arange(columns) - torch.arange(rows).unsqueeze(1)
    return found - (columns - rows) if lower_right else found


def per_sequence(q: Tensor, k: Tensor, v: Tensor, masks: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """The two sequences of Q_ENDS and K_ENDS that have rows, each with its mask."""
    parts = []
    for rows, columns, masked in ((slice(0, 4), slice(0, 5), masks[0]), (slice(4, 9), slice(5, 12), masks[1])):
        a, b, c = (t[s].transpose(0, 1).unsqueeze(0) for t, s in ((q, rows), (k, columns), (v, columns)))
        parts.append(attend(a, b, c, masked)[0].transpose(0, 1))
    return torch.cat(parts)


def fused(q: Tensor, k: Tensor, v: Tensor, layout: str = "BNSD", version: str = "", **options: object) -> Tensor:
    options = {name: value.to(q.device) if isinstance(value, Tensor) else value for name, value in options.items()}
    return getattr(npu, f"npu_fusion_attention{version}")(q, k, v, 4, layout, scale=SCALE, **options)[0]


def packed(q: Tensor, k: Tensor, v: Tensor, version: str = "", **options: object) -> Tensor:
    ends = {"actual_seq_qlen": Q_ENDS, "actual_seq_kvlen": K_ENDS}
    if version == "_v3":
        ends = {name: torch.tensor(value) for name, value in ends.items()}
    return fused(q, k, v, "TND", version, **ends, **options)


BAND_OF_5_IN_7 = (distance(5, 7) > -1) | (distance(5, 7) < -3)
BAND_OF_4_IN_5 = (distance(4, 5) > 1) | (distance(4, 5) < -2)
PREFIXED = torch.stack([(distance(5, 7) > 0) & (torch.arange(7) >= n) for n in (4, 7)]).unsqueeze(1)
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], dict[str, Tensor]]] = {
    "a prefix per batch entry, mask whole": (
        lambda q, k, v: fused(q, k, v, atten_mask=PREFIXED, sparse_mode=5, prefix=[4, 7]),
        lambda q, k, v: attend(q, k, v, PREFIXED),
        QKV,
    ),
    "a prefix per batch entry, mask compressed": (
        lambda q, k, v: fused(q, k, v, atten_mask=PREFIX_MASK, sparse_mode=6, prefix=[4, 7]),
        lambda q, k, v: attend(q, k, v, PREFIXED),
        QKV,
    ),
    "a prefix per packed sequence": (
        lambda q, k, v: packed(q, k, v, atten_mask=PREFIX_MASK, sparse_mode=6, prefix=[3, 0, 6]),
        lambda q, k, v: per_sequence(
            q, k, v,
            ((distance(4, 5) > 0) & (torch.arange(5) >= 3), (distance(5, 7) > 0) & (torch.arange(7) >= 6)),
        ),
        PACKED,
    ),
    "the last packed sequence is cut": (
        lambda q, k, v: packed(q, k, v, atten_mask=TRIANGLE, sparse_mode=7, pre_tockens=3, next_tockens=-1),
        lambda q, k, v: per_sequence(q, k, v, (distance(4, 5) > 0, BAND_OF_5_IN_7)),
        PACKED,
    ),
    "the first packed sequence is cut": (
        lambda q, k, v: packed(q, k, v, atten_mask=TRIANGLE, sparse_mode=8, pre_tockens=2, next_tockens=1),
        lambda q, k, v: per_sequence(q, k, v, (BAND_OF_4_IN_5, distance(5, 7, lower_right=False) > 0)),
        PACKED,
    ),
    "second version, packed": (
        lambda q, k, v: packed(q, k, v, "_v2", atten_mask=TRIANGLE, sparse_mode=3),
        lambda q, k, v: per_sequence(q, k, v, (distance(4, 5) > 0, distance(5, 7) > 0)),
        PACKED,
    ),
    "third version, packed": (
        lambda q, k, v: packed(q, k, v, "_v3", atten_mask=TRIANGLE, sparse_mode=3),
        lambda q, k, v: per_sequence(q, k, v, (distance(4, 5) > 0, distance(5, 7) > 0)),
        PACKED,
    ),
    "second version, bias after scaling": (
        lambda q, k, v, bias: fused(q, k, v, version="_v2", pse=bias, pse_type=0),
        lambda q, k, v, bias: torch.softmax(scores_of(q, k) + bias, -1) @ v.repeat_interleave(2, 1),
        {**QKV, "bias": normal(1, 4, 5, 7, seed=3)},
    ),
    "second version, window": (
        lambda q, k, v: fused(
            q, k, v, version="_v2", atten_mask=TRIANGLE, sparse_mode=4, pre_tokens=3, next_tokens=-1
        ),
        lambda q, k, v: attend(q, k, v, BAND_OF_5_IN_7),
        QKV,
    ),
    "value narrower than key": (
        fused,
        attend,
        {"q": normal(2, 4, 5, 8), "k": normal(2, 4, 7, 8, seed=1), "v": normal(2, 4, 7, 6, seed=2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_training_attention(name: str, dtype: torch.dtype) -> None:
    call, formula, tensors = CASES[name]
    compare(call, formula, tensors, dtype)


@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_a_sink_takes_a_share_and_has_a_gradient(version: str) -> None:
    compare(
        lambda q, k, v, sink: fused(q, k, v, version=version, sink=sink),
        lambda q, k, v, sink: attend(q, k, v, None, sink),
        {**QKV, "sink": normal(4, seed=4)},
        torch.float32,
    )


def test_rotary_parts_of_query_and_key() -> None:
    parts = {"qr": normal(9, 4, 8, seed=6), "kr": normal(12, 2, 8, seed=7)}
    masks = distance(4, 5) > 0, distance(5, 7) > 0
    compare(
        lambda q, k, v, qr, kr: packed(q, k, v, "_v2", query_rope=qr, key_rope=kr, atten_mask=TRIANGLE, sparse_mode=3),
        lambda q, k, v, qr, kr: per_sequence(torch.cat((q, qr), -1), torch.cat((k, kr), -1), v, masks),
        {**PACKED, **parts},
        torch.bfloat16,
    )


@pytest.mark.parametrize("version", ["_v2", "_v3"])
def test_dropout_of_other_versions_is_replayed_in_backward(version: str) -> None:
    """The output is linear in v, so its gradient times v is the output once more, if the mask is the same."""
    q, k, v = (t.npu() for t in QKV.values())
    v.requires_grad_()
    torch.npu.manual_seed(7)
    out = fused(q, k, v, version=version, keep_prob=0.5)
    (grad,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((grad * v).sum(), out.sum(), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(out, fused(q, k, v, version=version))


# ---- ring attention: two parts of the keys, put together ----


@pytest.mark.parametrize("softmax_layout", ["", "TND"])
def test_ring_attention_of_packed_sequences(softmax_layout: str) -> None:
    q, k, v = (t.npu() for t in PACKED.values())
    first, second = (slice(0, 2), slice(5, 8)), (slice(2, 5), slice(8, 12))
    parts = [
        npu.npu_fusion_attention(
            q, torch.cat([k[s] for s in part]), torch.cat([v[s] for s in part]), 4, "TND", scale=SCALE,
            actual_seq_qlen=Q_ENDS, actual_seq_kvlen=ends, softmax_layout=softmax_layout,
        )[:3]
        for part, ends in ((first, [2, 2, 5]), (second, [3, 3, 7]))
    ]  # fmt: skip
    sums = torch.tensor([0, *Q_ENDS]).npu()
    out, _, _ = npu.npu_ring_attention_update(
        *parts[0], *parts[1], actual_seq_qlen=sums, input_layout="TND", input_softmax_layout=softmax_layout
    )
    torch.testing.assert_close(out.cpu(), per_sequence(*PACKED.values(), (None, None)))


def test_ring_attention_of_equal_lengths() -> None:
    q, k, v = (t.permute(2, 0, 1, 3).flatten(2).npu() for t in QKV.values())
    parts = [npu.npu_fusion_attention(q, k[s], v[s], 4, "SBH", scale=SCALE)[:3] for s in (slice(0, 3), slice(3, 7))]
    out, largest, total = npu.npu_ring_attention_update(*parts[0], *parts[1])
    whole = npu.npu_fusion_attention(q, k, v, 4, "SBH", scale=SCALE)
    torch.testing.assert_close(out.cpu(), attend(*QKV.values()).permute(2, 0, 1, 3).flatten(2))
    torch.testing.assert_close(largest, whole[1])
    torch.testing.assert_close(total, whole[2])


# ---- inference ----

HALF = {name: t.half() for name, t in QKV.items()}
KNOWN = {"input_layout": "BNSD", "num_key_value_heads": 2}


def exact(masked: Tensor | None = None, sink: Tensor | None = None) -> Tensor:
    return attend(*(t.double() for t in HALF.values()), masked, sink)


def near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=2e-3, atol=2e-3)


def test_prompts_of_other_lengths() -> None:
    q, k, v = (t.npu() for t in HALF.values())
    call = npu.npu_prompt_flash_attention
    near(call(q, k, v, num_heads=4, scale_value=SCALE, **KNOWN), exact())
    found = call(
        q, k, v, num_heads=4, scale_value=SCALE, actual_seq_lengths=[5, 3], actual_seq_lengths_kv=[7, 4],
        atten_mask=TRIANGLE.npu(), sparse_mode=3, **KNOWN,
    )  # fmt: skip
    near(found[:1], exact(distance(5, 7) > 0)[:1])
    short = attend(HALF["q"][1:, :, :3].double(), *(HALF[n][1:, :, :4].double() for n in "kv"), distance(3, 4) > 0)
    near(found[1:, :, :3], short)
    assert not found[1, :, 3:].any()
    outside = call(q, k, v, num_heads=4, scale_value=SCALE, input_layout="BNSD_BSND", num_key_value_heads=2)
    near(outside, exact().transpose(1, 2))


def test_one_token_and_its_cache() -> None:
    q, k, v = HALF["q"][:, :, :1], HALF["k"], HALF["v"]
    found = npu.npu_incre_flash_attention(
        q.npu(), k.npu(), v.npu(), num_heads=4, scale_value=SCALE, actual_seq_lengths=[7, 2], **KNOWN
    )
    near(
        found,
        attend(
            *(t.double() for t in (q, k, v)), torch.stack((torch.arange(7) > 6, torch.arange(7) > 1)).view(2, 1, 1, 7)
        ),
    )


def test_fused_inference_and_its_logarithms() -> None:
    q, k, v = (t.npu() for t in HALF.values())
    out, lse = npu.npu_fused_infer_attention_score(q, k, v, num_heads=4, scale=SCALE, softmax_lse_flag=True, **KNOWN)
    near(out, exact())
    near(lse, scores_of(HALF["q"].double(), HALF["k"].double()).logsumexp(-1, keepdim=True))
    sink = normal(4, seed=4)
    out, lse = npu.npu_fused_infer_attention_score_v2(
        q, k, v, num_query_heads=4, softmax_scale=SCALE, learnable_sink=sink.npu(), **KNOWN
    )
    near(out, exact(None, sink.double()))
    assert lse.tolist() == [0.0]
    rows, columns, values = (t.half().npu() for t in PACKED.values())
    out, _ = npu.npu_fused_infer_attention_score(
        rows, columns, values, num_heads=4, scale=SCALE, actual_seq_lengths=Q_ENDS, actual_seq_lengths_kv=K_ENDS,
        input_layout="TND", num_key_value_heads=2,
    )  # fmt: skip
    near(out, per_sequence(*(t.half().double() for t in PACKED.values()), (None, None)))


# ---- limits ----

ONE = [zeros(1, 4, 2, 8)] * 3 if hasattr(torch, "npu") else []
RULED_OUT = {
    "a cut sequence that is not packed": (lambda: fused(*ONE, sparse_mode=8), "sparse_mode=8 is not one of"),
    "a prefix without widths": (
        lambda: fused(*ONE, atten_mask=PREFIX_MASK, sparse_mode=6),
        "needs prefix",
    ),
    "a prefix beyond the keys": (
        lambda: fused(*ONE, atten_mask=PREFIX_MASK, sparse_mode=6, prefix=[3]),
        "must be from 0 to 2",
    ),
    "a prefix with the plain triangle": (
        lambda: fused(*ONE, atten_mask=TRIANGLE, sparse_mode=6, prefix=[1]),
        "1024 rows below it",
    ),
    "a prefix that the mask contradicts": (
        lambda: fused(*ONE, atten_mask=torch.zeros(1, 1, 2, 2).bool(), sparse_mode=5, prefix=[1]),
        "columns of prefix open",
    ),
    "a sink of other heads": (lambda: fused(*ONE, sink=zeros(3)), "sink .3,. must be .4,."),
    "rotary parts of batches": (
        lambda: fused(*ONE, version="_v2", query_rope=ONE[0], key_rope=ONE[0]),
        "needs TND and atten_mask",
    ),
    "alibi made inside": (lambda: fused(*ONE, version="_v2", pse_type=2), "pse_type=2 has no reference"),
    "inference in float32": (lambda: npu.npu_prompt_flash_attention(*ONE, num_heads=4, input_layout="BNSD"), "float32"),
    "inference's groups": (
        lambda: npu.npu_fused_infer_attention_score(
            *(t.npu() for t in HALF.values()), num_heads=4, input_layout="BNSD"
        ),
        "num_key_value_heads=0 means 4",
    ),
    "two tokens at once": (
        lambda: npu.npu_incre_flash_attention(*[t.half() for t in ONE], num_heads=4, input_layout="BNSD"),
        "2 tokens per sequence",
    ),
    "a paged cache": (
        lambda: npu.npu_fused_infer_attention_score(
            *[t.half() for t in ONE], num_heads=4, input_layout="BNSD", block_table=zeros(1, 1).int(), block_size=128
        ),
        "block_size, block_table: quantised, paged",
    ),
}


@pytest.mark.parametrize(("call", "message"), RULED_OUT.values(), ids=RULED_OUT)
def test_what_the_documentation_of_attention_rules_out_is_an_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()

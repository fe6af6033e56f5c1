"""Attention for inference: prompt, incremental and fused; and the update by which ring attention adds up its parts.

No gradient, as on the device. Quantised operands, paged caches and shared prefixes have no reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from npu_backend.virtual_npu.references.attention_math import (
    FAR,
    Settings,
    attend,
    attend_packed,
    check_shapes,
    from_heads,
    mask_of,
    to_heads,
)
from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

_PROMPT, _INCRE, _FUSED = "npu_prompt_flash_attention", "npu_incre_flash_attention", "npu_fused_infer_attention_score"
_RING = "npu_ring_attention_update"
_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND")
_HALVES = (torch.float16, torch.bfloat16)
_WIDEST = 512
_MOST_GROUPS = 64


def _refuse(name: str, others: dict[str, Any]) -> None:
    """Raise if an argument without a reference was given; how precise the device is (inner_precise) plays no part."""
    given = sorted(
        key
        for key, value in others.items()
        if key != "inner_precise" and (isinstance(value, torch.Tensor) or value not in (None, 0, False))
    )
    need(not given, name, f"{', '.join(given)}: quantised, paged and shared use has no reference")


def _check(s: Settings, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_heads: int, layout: str) -> int:
    need(layout in _LAYOUTS, s.operator, f"input_layout={layout!r} is not one of {', '.join(_LAYOUTS)}")
    need(s.mode in range(5), s.operator, f"sparse_mode={s.mode} is not supported; 0 to 4 are")
    need(s.mode < 2 or s.mask is not None, s.operator, f"sparse_mode={s.mode} needs atten_mask")
    found = check_shapes(query, key, value, s, _HALVES, _WIDEST)
    need(kv_heads in (0, found), s.operator, f"num_key_value_heads={kv_heads}, key has {found}; 0 stands for num_heads")
    need(kv_heads > 0 or found == s.heads, s.operator, f"num_key_value_heads=0 means {s.heads}, key has {found}")
    need(s.heads // found <= _MOST_GROUPS, s.operator, f"{s.heads} heads on {found}: at most {_MOST_GROUPS} to one")
    return found


def _lengths(name: str, given: Sequence[int] | None, batch: int, longest: int) -> list[int]:
    """The valid length of each batch entry; one for all, or one each."""
    if given is None:
        return [longest] * batch
    lengths = [int(n) for n in given]
    lengths = lengths * batch if len(lengths) == 1 else lengths[:batch]
    fits = len(lengths) == batch and all(0 <= n <= longest for n in lengths)
    need(fits, name, f"lengths {[int(n) for n in given]}: 1 or {batch} numbers from 0 to {longest} are needed")
    return lengths


def _infer(
    s: Settings, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_heads: int, layout: str,
    q_lengths: Sequence[int] | None, k_lengths: Sequence[int] | None, pse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output in query's dtype, and the logarithm of each row's sum. Rows behind a length are zeros."""
    s.layout = layout.partition("_")[0]
    if s.layout == "TND":
        s.q_ends, s.k_ends = q_lengths, k_lengths
    kv_heads = _check(s, query, key, value, kv_heads, layout)
    if s.layout == "TND":
        need(pse is None, s.operator, "pse_shift is not supported in TND")
        packed, statistics = attend_packed(query.float(), key.float(), value.float(), s)
        return packed.to(query.dtype), torch.cat([largest + total.log() for largest, total in statistics])
    q, k, v = (to_heads(t.float(), s.layout, n) for t, n in ((query, s.heads), (key, kv_heads), (value, kv_heads)))
    out, lse = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full((*q.shape[:3], 1), torch.inf)
    rows = _lengths(s.operator, q_lengths, q.shape[0], q.shape[2])
    columns = _lengths(s.operator, k_lengths, q.shape[0], k.shape[2])
    mask = s.mask
    for i, (n, m) in enumerate(zip(rows, columns)):
        if n == 0 or m == 0:
            continue
        one = slice(i, i + 1)
        s.mask = mask[one] if mask is not None and mask.dim() > 2 and mask.shape[0] > 1 else mask
        bias = None if pse is None else pse[one if pse.shape[0] > 1 else slice(None), :, :n]
        found, largest, total = attend(q[one, :, :n], k[one, :, :m], v[one, :, :m], bias, s, mask_of(s))
        out[one, :, :n], lse[one, :, :n] = found, largest + total.log()
    outside = "BSND" if layout == "BNSD_BSND" else s.layout
    return from_heads(out, outside).to(query.dtype), lse


@register_reference(f"npu::{_PROMPT}")
def npu_prompt_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = FAR,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    sparse_mode: int = 0,
    **others: Any,
) -> torch.Tensor:
    """`softmax(scale * q k^T, masked) v` for whole prompts."""
    _refuse(_PROMPT, others)
    s = Settings(_PROMPT, num_heads, input_layout, scale_value, mask=atten_mask, mode=sparse_mode, pse_type=0)
    s.before, s.after = pre_tokens, next_tokens
    lengths = actual_seq_lengths, actual_seq_lengths_kv
    return _infer(s, query, key, value, num_key_value_heads, input_layout, *lengths, pse_shift)[0]


@register_reference(f"npu::{_INCRE}")
def npu_incre_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    **others: Any,
) -> torch.Tensor:
    """The same for one new token per sequence; the lengths are those of key and value."""
    _refuse(_INCRE, others)
    need(input_layout in ("BSH", "BSND", "BNSD"), _INCRE, f"input_layout={input_layout!r} is not BSH, BSND or BNSD")
    tokens = query.shape[2 if input_layout == "BNSD" else 1]
    need(tokens == 1, _INCRE, f"query holds {tokens} tokens per sequence; 1 is needed")
    mask = None if atten_mask is None else atten_mask.reshape(query.shape[0], 1, 1, -1)
    s = Settings(_INCRE, num_heads, input_layout, scale_value, mask=mask, mode=1, pse_type=0)
    return _infer(s, query, key, value, num_key_value_heads, input_layout, None, actual_seq_lengths, pse_shift)[0]


@register_reference(f"npu::{_FUSED}")
def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = FAR,
    next_tokens: int = FAR,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    softmax_lse_flag: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and incremental attention in one, and the logarithm of each row's sum if it is asked for."""
    return _fused(
        _FUSED, query, key, value, query_rope, key_rope, others, pse_shift, softmax_lse_flag,
        num_key_value_heads, (actual_seq_lengths, actual_seq_lengths_kv),
        Settings(_FUSED, num_heads, input_layout, scale, mask=atten_mask, mode=sparse_mode, before=pre_tokens,
                 after=next_tokens, pse_type=0),
    )  # fmt: skip


@register_reference(f"npu::{_FUSED}_v2")
def npu_fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    learnable_sink: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = FAR,
    next_tokens: int = FAR,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    return_softmax_lse: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same under other names, and with a sink per head."""
    name = f"{_FUSED}_v2"
    return _fused(
        name, query, key, value, query_rope, key_rope, others, pse_shift, return_softmax_lse,
        num_key_value_heads, (actual_seq_qlen, actual_seq_kvlen),
        Settings(name, num_query_heads, input_layout, softmax_scale, mask=atten_mask, mode=sparse_mode,
                 before=pre_tokens, after=next_tokens, pse_type=0, sink=learnable_sink),
    )  # fmt: skip


def _fused(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_rope: torch.Tensor | None,
    key_rope: torch.Tensor | None, others: dict[str, Any], pse: torch.Tensor | None, wants_lse: bool, kv_heads: int,
    lengths: tuple[Sequence[int] | None, Sequence[int] | None], s: Settings,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _refuse(name, others)
    need((query_rope is None) == (key_rope is None), name, "query_rope and key_rope come together")
    if query_rope is not None and key_rope is not None:
        need(s.layout in ("BSND", "BNSD", "TND"), name, f"query_rope has no reference in {s.layout}")
        query, key = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1)
    out, lse = _infer(s, query, key, value, kv_heads, s.layout, *lengths, pse)
    return out, lse if wants_lse else lse.new_zeros(1)


# ---- ring attention ----


@register_reference(f"npu::{_RING}")
def npu_ring_attention_update(
    prev_out: torch.Tensor,
    prev_max: torch.Tensor,
    prev_sum: torch.Tensor,
    cur_out: torch.Tensor,
    cur_max: torch.Tensor,
    cur_sum: torch.Tensor,
    *,
    actual_seq_qlen: torch.Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two partial attentions as one: `npu_fusion_attention`'s outputs, maxima and sums over two parts of the keys."""
    need(input_layout in ("SBH", "TND"), _RING, f"input_layout={input_layout!r} is neither SBH nor TND")
    for name, a, b, dtypes in (
        ("attn_out", prev_out, cur_out, FLOATS),
        ("softmax_max", prev_max, cur_max, (torch.float32,)),
        ("softmax_sum", prev_sum, cur_sum, (torch.float32,)),
    ):
        need_dtype(_RING, f"prev_{name}", a, dtypes)
        alike = a.shape == b.shape and a.dtype == b.dtype
        need(alike, _RING, f"prev_{name} {tuple(a.shape)} {a.dtype} and cur_{name} {tuple(b.shape)} {b.dtype} differ")
    largest = torch.maximum(prev_max, cur_max)
    before, now = prev_sum * (prev_max - largest).exp(), cur_sum * (cur_max - largest).exp()
    total = before + now
    shares = [(part / total)[..., :1] for part in (before, now)]  # eight copies each
    if input_layout == "SBH":  # [batch, heads, rows, 1] beside [rows, batch, heads * width]
        heads = prev_max.shape[1]
        parts = [x.float().unflatten(-1, (heads, -1)) for x in (prev_out, cur_out)]
        shares = [share.permute(2, 0, 1, 3) for share in shares]
        out = (parts[0] * shares[0] + parts[1] * shares[1]).flatten(-2)
    else:
        need(actual_seq_qlen is not None, _RING, "TND needs actual_seq_qlen, running sums that begin with 0")
        assert actual_seq_qlen is not None  # for the type checker; checked above
        if input_softmax_layout != "TND":  # head by head within each sequence
            shares = [_token_by_token(share, actual_seq_qlen.tolist()) for share in shares]
        out = prev_out.float() * shares[0] + cur_out.float() * shares[1]
    return out.to(prev_out.dtype), largest, total


def _token_by_token(x: torch.Tensor, ends: list[int]) -> torch.Tensor:
    heads = x.shape[1]
    parts = [x[a:b].reshape(heads, b - a, x.shape[2]).transpose(0, 1) for a, b in itertools.pairwise(ends)]
    return torch.cat([*parts, x[ends[-1] :]])

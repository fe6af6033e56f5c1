"""`npu_fusion_attention`: attention in the layouts BSH, SBH, BSND, BNSD and TND, with its backward operator.

Backward runs the forward again in float32 and differentiates it; dropout is replayed from the seed that forward gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from npu_backend.virtual_npu.references.autograd import gradients
from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

_NAME = "npu_fusion_attention"
_LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
_COMPRESSED = 2048  # rows and columns of the mask that stands for any triangle
_COPIES = 8  # softmax's maxima and sums are stored eight times
Settings = dict[str, Any]

# ---- layouts: everything is [batch, heads, sequence, width] inside ----


def _to_heads(x: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    if layout in ("BSH", "SBH"):
        x = x.reshape(*x.shape[:2], heads, -1)
    return x.permute({"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}[layout])


def _from_heads(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BSH":
        return x.transpose(1, 2).flatten(2)
    if layout == "SBH":
        return x.permute(2, 0, 1, 3).flatten(2)
    return x.transpose(1, 2) if layout == "BSND" else x


# ---- checks ----


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, layout: str, s: Settings) -> int:
    """Check, and return how many heads key and value have."""
    need(layout in _LAYOUTS, _NAME, f"input_layout={layout!r} is not one of {', '.join(_LAYOUTS)}")
    dimensions = 3 if layout in ("BSH", "SBH", "TND") else 4
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        need_dtype(_NAME, name, tensor, FLOATS)
        need(tensor.dim() == dimensions, _NAME, f"{name} has {tensor.dim()} dimensions, {layout} has {dimensions}")
        need(tensor.dtype == query.dtype, _NAME, f"{name} is {tensor.dtype}, query is {query.dtype}")
    need(1 <= heads <= 256, _NAME, f"head_num={heads} must be from 1 to 256")
    flat = layout in ("BSH", "SBH")
    need(not flat or query.shape[-1] % heads == 0, _NAME, f"{heads} heads do not divide the size {query.shape[-1]}")
    axis = {"BSND": 2, "BNSD": 1, "TND": 1}.get(layout, 0)
    need(
        flat or query.shape[axis] == heads,
        _NAME,
        f"head_num={heads}, query {tuple(query.shape)} has {query.shape[axis]}",
    )
    width = query.shape[-1] // heads if flat else query.shape[-1]
    need(1 <= width <= 768, _NAME, f"head size {width} must be from 1 to 768")
    need(not flat or key.shape[-1] % width == 0, _NAME, f"the size {key.shape[-1]} of key is no multiple of {width}")
    kv_heads = key.shape[-1] // width if flat else key.shape[axis]
    need(flat or key.shape[-1] == width, _NAME, f"head size of key is {key.shape[-1]}, of query {width}")
    need(
        key.shape[:-1] == value.shape[:-1],
        _NAME,
        f"key {tuple(key.shape)} and value {tuple(value.shape)} must be alike",
    )
    need(kv_heads > 0 and heads % kv_heads == 0, _NAME, f"{heads} query heads are no multiple of {kv_heads} key heads")
    need(s["padding_mask"] is None, _NAME, "padding_mask is not supported")
    need(0 < s["keep_prob"] <= 1, _NAME, f"keep_prob={s['keep_prob']} must be in (0, 1]")
    need(s["sparse_mode"] in range(5), _NAME, f"sparse_mode={s['sparse_mode']} has no reference; 0 to 4 have one")
    need(s["sink"] is None and s["prefix"] is None, _NAME, "sink and prefix have no reference")
    lengths = (s["actual_seq_qlen"], s["actual_seq_kvlen"])
    need(layout != "TND" or all(lengths), _NAME, "TND needs actual_seq_qlen and actual_seq_kvlen")
    need(
        layout == "TND" or not any(lengths), _NAME, f"actual_seq_qlen and actual_seq_kvlen belong to TND, not {layout}"
    )
    return int(kv_heads)


def _masked(s: Settings, rows: int, columns: int) -> torch.Tensor | None:
    """True where a score does not count, [.., rows, columns]; None for nowhere."""
    mask: torch.Tensor | None = s["atten_mask"]
    mode, before, after = int(s["sparse_mode"]), int(s["pre_tockens"]), int(s["next_tockens"])
    if mask is None:
        return None
    need_dtype(_NAME, "atten_mask", mask, (torch.bool, torch.uint8))
    mask = mask.bool()
    distance = torch.arange(columns).unsqueeze(0) - torch.arange(rows).unsqueeze(1)
    if mode in (0, 1):
        need(
            mask.shape[-2] >= rows and mask.shape[-1] >= columns and mask.dim() in (2, 4),
            _NAME,
            f"atten_mask {tuple(mask.shape)} does not cover the scores [{rows}, {columns}]",
        )
        mask = mask[..., :rows, :columns]
        outside = (distance > after) | (distance < -before)
        need(
            mode == 1 or not bool((outside & ~mask).any()),
            _NAME,
            "atten_mask keeps scores outside of pre_tockens and next_tockens, which the device skips",
        )
        return mask
    need(
        tuple(mask.shape[-2:]) == (_COMPRESSED, _COMPRESSED) and bool((mask == mask.triu(1)).all()),
        _NAME,
        f"sparse_mode={mode} takes the {_COMPRESSED} x {_COMPRESSED} mask that is True above the diagonal",
    )
    if mode == 2:
        return distance > 0
    distance = distance - (columns - rows)  # seen from the lower right corner
    return distance > 0 if mode == 3 else (distance > after) | (distance < -before)


# ---- arithmetic, in float32 ----


def _dropout(shape: Sequence[int], s: Settings) -> torch.Tensor:
    if s["keep_prob"] == 1:
        return torch.ones(())
    draws = torch.rand(*shape, generator=torch.Generator().manual_seed(s["seed"]))
    return (draws < float(s["keep_prob"])).float() / float(s["keep_prob"])


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pse: torch.Tensor | None, s: Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, row maxima and row sums of [batch, heads, sequence, width] operands."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2)
    if pse is not None:
        scores = scores + pse.float()
    scores = scores * s["scale"]
    masked = _masked(s, q.shape[2], k.shape[2])
    if masked is not None:
        scores = scores.masked_fill(masked, -torch.inf)
    largest = scores.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.clamp(min=torch.finfo(torch.float32).tiny)  # a row that sees nothing gives zeros
    return (weights * _dropout(weights.shape, s)) @ v, largest, total


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pse: torch.Tensor | None, heads: int, kv_heads: int,
    layout: str, s: Settings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    if layout != "TND":
        operands = _to_heads(query, layout, heads), _to_heads(key, layout, kv_heads), _to_heads(value, layout, kv_heads)
        out, largest, total = _attend(*operands, pse, s)
        return _from_heads(out, layout), largest.expand(-1, -1, -1, _COPIES), total.expand(-1, -1, -1, _COPIES)
    need(pse is None, _NAME, "pse has no reference in TND")
    parts, q_start, k_start = [], 0, 0
    for q_end, k_end in zip(s["actual_seq_qlen"], s["actual_seq_kvlen"]):
        if q_end > q_start:
            rows = [
                t.transpose(0, 1).unsqueeze(0) for t in (query[q_start:q_end], key[k_start:k_end], value[k_start:k_end])
            ]
            parts.append([t.squeeze(0).transpose(0, 1) for t in _attend(rows[0], rows[1], rows[2], None, s)])
        q_start, k_start = max(q_start, q_end), max(k_start, k_end)
    need(q_start <= query.shape[0], _NAME, f"actual_seq_qlen ends at {q_start}, query has {query.shape[0]} rows")
    empty = query.new_zeros(query.shape[0] - q_start, heads, value.shape[-1])  # rows behind the last sequence
    out = torch.cat([*(part[0] for part in parts), empty])
    largest, total = (torch.cat([*(part[i] for part in parts), empty[..., :1]]) for i in (1, 2))
    return out, largest.expand(-1, -1, _COPIES), total.expand(-1, -1, _COPIES)


def _settings(scale: float, rest: dict[str, Any]) -> Settings:
    defaults = {
        "padding_mask": None, "atten_mask": None, "keep_prob": 1.0, "pre_tockens": 2**31 - 1, "next_tockens": 2**31 - 1,
        "prefix": None, "actual_seq_qlen": None, "actual_seq_kvlen": None, "sparse_mode": 0, "sink": None, "seed": 0,
    }  # fmt: skip
    return {"scale": scale, **{name: rest.get(name, value) for name, value in defaults.items()}}


_POSITIONAL = (
    "padding_mask", "atten_mask", "scale", "keep_prob", "pre_tockens", "next_tockens", "inner_precise", "prefix",
    "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "gen_mask_parallel", "sync", "softmax_layout", "sink",
)  # fmt: skip


@register_reference(f"npu::{_NAME}")
def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    *positional: Any,
    **rest: Any,
) -> tuple[Any, ...]:
    """`dropout(softmax(scale * (q k^T + pse), masked)) v`, with maxima and sums of the softmax, and dropout's seed."""
    given = {**dict(zip(_POSITIONAL, positional)), **rest}
    s = _settings(given.get("scale", 1.0), given)
    if s["keep_prob"] < 1:
        s["seed"] = int(torch.randint(2**31, ()))
    kv_heads = _check(query, key, value, head_num, input_layout, s)
    operands = query.float(), key.float(), value.float()
    out, largest, total = _forward(*operands, pse, head_num, kv_heads, input_layout, s)
    dropped = out.numel() if s["keep_prob"] < 1 else 0
    return out.to(query.dtype), largest.contiguous(), total.contiguous(), query.new_empty(0), s["seed"], 0, dropped


@register_reference(f"npu::{_NAME}_grad")
def npu_fusion_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: torch.Tensor | None = None,
    scale_value: float = 1.0,
    **rest: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key, value, pse and sink (empty: it has no reference)."""
    s = _settings(scale_value, rest)
    kv_heads = _check(query, key, value, head_num, input_layout, s)
    operands = [query.float(), key.float(), value.float(), *([] if pse is None else [pse.float()])]

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _forward(q, k, v, bias, head_num, kv_heads, input_layout, s)[0]

    found = [grad.to(query.dtype) for grad in gradients(forward, operands, dy.float())]
    empty = query.new_empty(0)
    return (*found, *([] if len(found) == 4 else [empty]), empty.clone())

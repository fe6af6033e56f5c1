"""`npu_fusion_attention`, its second and third version: attention for training, with their backward operators.

Backward runs the forward again in float32 and differentiates it; dropout is replayed from the seed that forward gave.
"""

from __future__ import annotations

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
from npu_backend.virtual_npu.references.autograd import gradients
from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

_NAME = "npu_fusion_attention"
_LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
_WIDEST = 768
_COPIES = 8  # softmax's maxima and sums are stored eight times
Operands = dict[str, torch.Tensor]


def _settings(name: str, heads: int, layout: str, scale: float, given: dict[str, Any]) -> Settings:
    """Read and check everything but the operands' shapes."""
    need(layout in _LAYOUTS, name, f"input_layout={layout!r} is not one of {', '.join(_LAYOUTS)}")
    for unsupported in ("padding_mask", "dropout_mask", "q_start_idx", "kv_start_idx"):
        need(given.get(unsupported) is None, name, f"{unsupported} has no reference")
    keep, mode, pse_type = given.get("keep_prob", 1.0), given.get("sparse_mode", 0), given.get("pse_type", 1)
    need(0 < keep <= 1, name, f"keep_prob={keep} must be in (0, 1]")
    packed = layout == "TND"
    modes = (0, 1, 2, 3, 4, 6, 7, 8) if packed else tuple(range(7))
    need(mode in modes, name, f"sparse_mode={mode} is not one of {', '.join(map(str, modes))}, those of {layout}")
    need(pse_type in (0, 1), name, f"pse_type={pse_type} has no reference; 0 and 1 have one")
    need(given.get("pse") is None or not packed, name, "pse has no reference in TND")
    style = given.get("softmax_layout", "")
    need(
        style == "" or (style == "TND" and packed), name, f"softmax_layout={style!r} is neither '' nor, with TND, 'TND'"
    )
    lengths = [_integers(given.get(f"actual_seq_{which}len")) for which in ("q", "kv")]
    need(packed or not any(lengths), name, f"actual_seq_qlen and actual_seq_kvlen belong to TND, not {layout}")
    sink = given.get("sink")
    if sink is not None:
        need_dtype(name, "sink", sink, (torch.float32,))
        need(tuple(sink.shape) == (heads,), name, f"sink {tuple(sink.shape)} must be ({heads},)")
    windows = [given.get(f"{side}_tockens", given.get(f"{side}_tokens", FAR)) for side in ("pre", "next")]
    return Settings(
        name, heads, layout, scale, float(keep), int(given.get("seed") or 0), given.get("atten_mask"), mode,
        windows[0], windows[1], given.get("prefix"), pse_type, sink, lengths[0], lengths[1],
    )  # fmt: skip


def _integers(ends: Any) -> list[int] | None:
    """Lengths, which the third version takes as a tensor."""
    return None if ends is None else [int(end) for end in ends]


def _forward(
    s: Settings, kv_heads: int, softmax_layout: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    pse: torch.Tensor | None = None, query_rope: torch.Tensor | None = None, key_rope: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output, maxima and sums, of operands in float32."""
    s.sink = sink
    if query_rope is not None and key_rope is not None:
        query, key = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1)
    if s.layout != "TND":
        operands = (
            to_heads(query, s.layout, s.heads),
            to_heads(key, s.layout, kv_heads),
            to_heads(value, s.layout, kv_heads),
        )
        out, largest, total = attend(*operands, pse, s, mask_of(s))
        return from_heads(out, s.layout), largest.expand(-1, -1, -1, _COPIES), total.expand(-1, -1, -1, _COPIES)
    out, statistics = attend_packed(query, key, value, s)
    largest, total = (_pack([pair[i] for pair in statistics], out, softmax_layout) for i in (0, 1))
    return out, largest, total


def _pack(parts: list[torch.Tensor], out: torch.Tensor, softmax_layout: str) -> torch.Tensor:
    """[tokens, heads, 8]. By default each sequence's numbers lie head by head, whatever the shape says."""
    ordered = [part if softmax_layout else part.transpose(0, 1).reshape(part.shape) for part in parts]
    rest = out.new_zeros(out.shape[0] - sum(part.shape[0] for part in parts), out.shape[1], 1)
    return torch.cat([*ordered, rest]).expand(-1, -1, _COPIES)


def _check_rope(s: Settings, query: torch.Tensor, given: dict[str, Any]) -> None:
    q_rope, k_rope = given.get("query_rope"), given.get("key_rope")
    if q_rope is None and k_rope is None:
        return
    need(q_rope is not None and k_rope is not None, s.operator, "query_rope and key_rope come together")
    assert q_rope is not None  # for the type checker, as the next line; checked above
    assert k_rope is not None
    need(s.layout == "TND" and s.mask is not None, s.operator, "query_rope needs TND and atten_mask")
    need_dtype(s.operator, "query with query_rope", query, (torch.bfloat16,))
    need(s.keep_prob == 1 and s.pse_type == 1, s.operator, "query_rope needs keep_prob=1 and pse_type=1")
    width, other, most = q_rope.shape[-1], k_rope.shape[-1], query.shape[-1]
    need(
        width == other and width % 8 == 0 and width <= most,
        s.operator,
        f"query_rope and key_rope have {width} and {other}; one multiple of 8 up to {most} is needed",
    )


def _run(
    s: Settings, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Output, maxima, sums, and how many values dropout looked at."""
    kv_heads = check_shapes(query, key, value, s, FLOATS, _WIDEST)
    _check_rope(s, query, given)
    if s.keep_prob < 1 and not s.seed:
        s.seed = int(torch.randint(1, 2**31, ()))
    operands = {n: t.float() for n, t in _operands(query, key, value, given).items()}
    out, largest, total = _forward(s, kv_heads, given.get("softmax_layout", ""), **operands)
    return out.to(query.dtype), largest.contiguous(), total.contiguous(), out.numel() if s.keep_prob < 1 else 0


def _operands(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]) -> Operands:
    """Everything that has a gradient, by name."""
    optional = {name: given.get(name) for name in ("pse", "query_rope", "key_rope", "sink")}
    return {"query": query, "key": key, "value": value, **{n: t for n, t in optional.items() if t is not None}}


def _gradients(
    s: Settings, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, given: dict[str, Any]
) -> Operands:
    """The gradient of each operand that was given, in its dtype."""
    kv_heads = check_shapes(query, key, value, s, FLOATS, _WIDEST)
    operands = _operands(query, key, value, given)

    def forward(*tensors: torch.Tensor) -> torch.Tensor:
        return _forward(s, kv_heads, "", **dict(zip(operands, tensors)))[0]

    found = gradients(forward, [tensor.float() for tensor in operands.values()], dy.float())
    return {name: grad.to(operands[name].dtype) for name, grad in zip(operands, found)}


def _ordered(found: Operands, names: tuple[str, ...], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In the operator's order; empty where there is no such operand."""
    return tuple(found[name] if name in found else like.new_empty(0) for name in names)


_POSITIONAL = (
    "pse", "padding_mask", "atten_mask", "scale", "keep_prob", "pre_tockens", "next_tockens", "inner_precise", "prefix",
    "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "gen_mask_parallel", "sync", "softmax_layout", "sink",
    "dropout_mask", "seed", "offset",
)  # fmt: skip


@register_reference(f"npu::{_NAME}")
def npu_fusion_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, *rest: Any,
    **named: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """`dropout(softmax(scale * (q k^T + pse), masked)) v`, with maxima and sums of the softmax, and dropout's seed."""
    given = {**dict(zip(_POSITIONAL, rest)), **named}
    s = _settings(_NAME, head_num, input_layout, given.get("scale", 1.0), given)
    out, largest, total, dropped = _run(s, query, key, value, given)
    return out, largest, total, query.new_empty(0), s.seed, 0, dropped


@register_reference(f"npu::{_NAME}_v2")
def npu_fusion_attention_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, **given: Any
) -> tuple[Any, ...]:
    """The same with pse before or after scaling, and separate rotary parts of query and key."""
    s = _settings(f"{_NAME}_v2", head_num, input_layout, given.get("scale", 1.0), given)
    out, largest, total, dropped = _run(s, query, key, value, given)
    return out, largest, total, query.new_empty(0), s.seed, 0, dropped


@register_reference(f"npu::{_NAME}_v3")
def npu_fusion_attention_v3(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, *rest: Any,
    **named: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The first version with lengths, seed and offset as tensors."""
    given = {**dict(zip(_POSITIONAL, rest)), **named}
    s = _settings(f"{_NAME}_v3", head_num, input_layout, given.get("scale", 1.0), given)
    out, largest, total, _ = _run(s, query, key, value, given)
    return out, largest, total, query.new_empty(0), torch.tensor(s.seed), torch.tensor(0)


@register_reference(f"npu::{_NAME}_grad")
def npu_fusion_attention_grad(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, head_num: int, input_layout: str,
    *, scale_value: float = 1.0, **given: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gradients of query, key, value, pse and sink."""
    s = _settings(f"{_NAME}_grad", head_num, input_layout, scale_value, given)
    return _ordered(_gradients(s, query, key, value, dy, given), ("query", "key", "value", "pse", "sink"), query)


@register_reference(f"npu::{_NAME}_grad_v2")
def npu_fusion_attention_grad_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, head_num: int, input_layout: str,
    *, scale_value: float = 1.0, **given: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gradients of query, key, value, pse, query_rope, key_rope and sink."""
    s = _settings(f"{_NAME}_grad_v2", head_num, input_layout, scale_value, given)
    names = ("query", "key", "value", "pse", "query_rope", "key_rope", "sink")
    return _ordered(_gradients(s, query, key, value, dy, given), names, query)


@register_reference(f"npu::{_NAME}_grad_v3")
def npu_fusion_attention_grad_v3(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, head_num: int, input_layout: str,
    *, scale_value: float = 1.0, **given: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gradients of query, key, value, pse and sink."""
    s = _settings(f"{_NAME}_grad_v3", head_num, input_layout, scale_value, given)
    return _ordered(_gradients(s, query, key, value, dy, given), ("query", "key", "value", "pse", "sink"), query)

"""Rotary position embedding through `torch_npu.npu_rotary_mul`: `x * cos + rotate_half(x) * sin`.

Replaces the functions that `npu_backend.recognise` knows, each in the signature of its release (transformers 5.2
dropped `position_ids`):

    text        q and k; a `Rule` says which channels rotate, how they pair, and in which dtype it is computed
    one         the same for one tensor (Gemma 3n and 4)
    multimodal  cos and sin for time, height and width, interleaved by `mrope_section` (Qwen2.5-VL text)
    vision      [tokens, heads, head_dim] in float32 (the Qwen vision towers)

The layout is always given, never guessed from sizes: BNSD (batch, heads, sequence, head_dim) or BSND. transformers
passes BNSD views of BSND memory; the operator gets those as the BSND tensors that they are, which saves a copy and
BNSD's limits.

Goes to the original: what the operator's documentation rules out for this release (`RELEASES`), DTensors, cos and sin
of an unexpected shape, and what `checks.why_not` names.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npu_backend.operators import checks, counters

OP = "rotary"
LAYOUTS = {1: "BNSD", 2: "BSND"}  # by the axis at which transformers unsqueezes cos and sin

Pair = tuple[Tensor, Tensor]

_TABLES, _AXIS, _IDS = ("cos", "sin"), ("unsqueeze_dim",), ("position_ids",)
_TEXT = (("q", "k", *_TABLES, *_IDS, *_AXIS), ("q", "k", *_TABLES, *_AXIS))  # transformers 4, transformers 5.2
_ONE = (("x", *_TABLES, *_IDS, *_AXIS), ("x", *_TABLES, *_AXIS))
_PARAMETERS = (*_TEXT, *_ONE, ("q", "k", *_TABLES, "mrope_section", *_AXIS), ("q", "k", *_TABLES))


@dataclass(frozen=True)
class Limits:
    """What npu_rotary_mul accepts, from its documentation in one release of Ascend Extension for PyTorch."""

    head_dims: range
    largest_axis: int  # of batch and of heads
    largest_broadcast: int | None  # product of the axes along which cos and sin are repeated
    largest_trained: int | None  # batch times heads when cos and sin need gradients
    interleaves: bool = True  # whether it has the mode that pairs neighbours

    def why_not(
        self,
        *,
        batch: int,
        heads: int,
        seq: int,
        head_dim: int,
        layout: str,
        itemsize: int = 2,
        repeats: int | None = None,
        trained: bool = False,
        mode: str = "half",
    ) -> str | None:
        """Why the operator must not be called with these sizes.

        Args:
            batch, heads, seq, head_dim: sizes of the input; `head_dim` is what rotates.
            layout: "BNSD" or "BSND".
            itemsize: bytes of one element.
            repeats: how many times each row of cos is used; `heads` if not given.
            trained: whether cos or sin needs a gradient.
            mode: "half" pairs a channel with the one half a head further, "interleave" with its neighbour.
        """
        if mode == "interleave" and not self.interleaves:
            return "no interleave mode in this release"
        if mode == "interleave" and batch * heads > self.largest_axis:
            return f"interleave mode with more than {self.largest_axis} batch x heads"
        if head_dim not in self.head_dims:
            return f"rotary dimension {head_dim}"
        if max(batch, heads) > self.largest_axis:
            return f"more than {self.largest_axis} in batch or heads"
        if self.largest_broadcast is not None and (repeats or heads) > self.largest_broadcast:
            return f"cos and sin repeated more than {self.largest_broadcast} times"
        if trained and self.largest_trained is not None and batch * heads > self.largest_trained:
            return f"gradients of cos and sin with more than {self.largest_trained} batch x heads"
        # ms-swift#9329: BNSD fails with error 561002 outside these two, whatever the release.
        if layout == "BNSD" and head_dim * itemsize % 32:
            return "BNSD layout with a head that is not a multiple of 32 bytes"
        if layout == "BNSD" and batch * heads > 8 * seq:
            return "BNSD layout with batch x heads > 8 x sequence"
        return None


RELEASES = {
    "6.0.0": Limits(
        range(128, 129), largest_axis=1000, largest_broadcast=1024, largest_trained=None, interleaves=False
    ),
    "7.0.0": Limits(range(2, 896, 2), largest_axis=999, largest_broadcast=None, largest_trained=1024),
}


@functools.cache
def limits() -> Limits:
    """The limits of this torch_npu. Its schema tells the release: `rotary_mode` came with 7.0.0."""
    return RELEASES["7.0.0" if "rotary_mode" in (checks.parameters("npu_rotary_mul") or ()) else "6.0.0"]


def requires(original: Any, context: Any) -> str | None:
    """Why this rotary embedding cannot be replaced on this host."""
    return checks.lacks("npu_rotary_mul") or checks.unlike(original, *_PARAMETERS)


# -- factories --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """What one form of rotary embedding does differently from the plain one."""

    whole: bool = True  # cos and sin cover the head; otherwise its first channels
    wide: bool = False  # computed in float32
    keeps_dtype: bool = False  # the result has the input's dtype, not what input and cos promote to
    mode: str = "half"
    tables: Callable[[Tensor], Tensor] = lambda table: table  # what cos and sin go through first
    rows: Callable[[Tensor], Tensor] = lambda x: x  # what q and k go through first


def _doubled(table: Tensor) -> Tensor:
    """cos or sin of half the channels for all of them."""
    return torch.cat((table, table), -1)


def _neighbours(table: Tensor) -> Tensor:
    """cos or sin for halves as one for pairs of neighbours: the first half, each twice."""
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)


def _evens_first(x: Tensor) -> Tensor:
    """The channels in pairs of neighbours as two halves."""
    halves: Tensor = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves


def standard(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """Factory for functions that rotate the whole head."""
    return _text(original, Rule())


def standard_cast(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """Factory for functions that rotate the whole head and return the input's dtype (OLMo)."""
    return _text(original, Rule(keeps_dtype=True))


def standard_float(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """Factory for functions that rotate the whole head in float32 and return the input's dtype (ModernBERT)."""
    return _text(original, Rule(wide=True, keeps_dtype=True))


def partial(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """Factory for functions that rotate the first `cos.shape[-1]` channels (Phi-3, Qwen3-Next, Qwen3.5)."""
    return _text(original, Rule(whole=False))


def halves(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """Factory for functions whose cos and sin cover half of what rotates (GPT-OSS)."""
    return _text(original, Rule(tables=_doubled))


def deinterleaved(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """Factory for functions that turn pairs of neighbours into halves and leave them so (DeepSeek-V3)."""
    return _text(original, Rule(rows=_evens_first))


def interleaved_partial(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """Factory for functions that rotate pairs of neighbours in the first channels, by the first half of cos (GLM)."""
    return _text(original, Rule(whole=False, mode="interleave", tables=_neighbours))


def interleaved_float(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """Factory for functions that rotate pairs of neighbours in float32 (Cohere)."""
    return _text(original, Rule(wide=True, keeps_dtype=True, mode="interleave"))


def interleaved_repeated_float(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """The same by the first half of cos (ERNIE 4.5)."""
    return _text(original, Rule(wide=True, keeps_dtype=True, mode="interleave", tables=_neighbours))


def _text(original: Callable[..., Pair], rule: Rule) -> Callable[..., Pair]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        rotated = _rotated((q, k), cos, sin, unsqueeze_dim, rule)
        if rotated is None:
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return rotated[0], rotated[1]

    def apply_with_position_ids(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
    ) -> Pair:
        return apply(q, k, cos, sin, unsqueeze_dim)  # the original does not use them either

    return checks.pick(original, dict(zip(_TEXT, (apply_with_position_ids, apply), strict=True)))


def one(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for functions that rotate the whole head of one tensor."""

    def apply(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        rotated = _rotated((x,), cos, sin, unsqueeze_dim, Rule())
        return original(x, cos, sin, unsqueeze_dim=unsqueeze_dim) if rotated is None else rotated[0]

    def apply_with_position_ids(
        x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
    ) -> Tensor:
        return apply(x, cos, sin, unsqueeze_dim)

    return checks.pick(original, dict(zip(_ONE, (apply_with_position_ids, apply), strict=True)))


def _rotated(
    tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, unsqueeze_dim: int, rule: Rule
) -> list[Tensor] | None:
    """The tensors after the operator, or None where they must go to the original (which has been counted)."""
    mixed = rule.keeps_dtype and len({tensor.dtype for tensor in tensors}) > 1
    reason = "q and k of two dtypes" if mixed else checks.why_not(*tensors, cos, sin)
    if reason is None:
        cos, sin = rule.tables(cos), rule.tables(sin)
        reason = _why_not(tensors, cos, sin, unsqueeze_dim, whole=rule.whole, mode=rule.mode)
    if reason:
        counters.fell_back(OP, reason)
        return None
    layout, result = LAYOUTS[unsqueeze_dim], []
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    for tensor in tensors:
        x = rule.rows(tensor.float() if rule.wide else tensor)
        rotated = rotary(x, cos.float() if rule.wide else cos, sin.float() if rule.wide else sin, layout, rule.mode)
        result.append(rotated.to(tensor.dtype) if rule.keeps_dtype else rotated)
    return result


def multimodal(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """Factory for functions that take cos and sin as [3, batch, sequence, head_dim] and interleave them by section."""

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1) -> Pair:
        one_cos, one_sin = _interleave(cos, mrope_section), _interleave(sin, mrope_section)
        reason = _why_not((q, k), one_cos, one_sin, unsqueeze_dim, whole=True)
        if reason:
            counters.fell_back(OP, reason)
            return original(q, k, cos, sin, mrope_section, unsqueeze_dim)
        return _pair(q, k, one_cos.unsqueeze(unsqueeze_dim), one_sin.unsqueeze(unsqueeze_dim), LAYOUTS[unsqueeze_dim])

    return apply


def _interleave(table: Tensor, sections: list[int]) -> Tensor:
    """[3, B, S, D] -> [B, S, D]: the channel sections, twice over, taken from time, height, width in turn."""
    return torch.cat([part[i % 3] for i, part in enumerate(table.split(sections * 2, dim=-1))], -1)


def vision(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """Factory for functions of [tokens, heads, head_dim] that compute in float32 and return the input's dtype."""

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        if q.dim() != 3 or cos.dim() != 2:
            reason: str | None = f"{q.dim()} dimensions"
        else:
            wide = (q[None].float(), k[None].float(), cos[None].float(), sin[None].float())
            reason = checks.why_not(q, k) or _why_not(wide[:2], *wide[2:], 2, whole=True)
        if reason:
            counters.fell_back(OP, reason)
            return original(q, k, cos, sin)
        wide_q, wide_k = _pair(wide[0], wide[1], wide[2].unsqueeze(2), wide[3].unsqueeze(2), "BSND")
        return wide_q[0].to(q.dtype), wide_k[0].to(k.dtype)

    return apply


# -- one input --------------------------------------------------------------------------------------------------------


def _why_not(
    tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, unsqueeze_dim: int, *, whole: bool, mode: str = "half"
) -> str | None:
    """Why these go to the original. Tensors [B, N, S, D] or [B, S, N, D]; cos, sin [B or 1, S, rotary_dim]."""
    if any(checks.is_dtensor(tensor) for tensor in (*tensors, cos, sin)):
        return "a DTensor"
    layout = LAYOUTS.get(unsqueeze_dim)
    if layout is None or any(x.dim() != 4 for x in tensors) or cos.dim() != 3 or cos.shape != sin.shape:
        return "an unknown layout"
    for x in tensors:
        batch, seq, heads = (x.shape[0], x.shape[layout.index("S")], x.shape[layout.index("N")])
        rotary_dim = cos.shape[-1]
        if cos.shape[0] not in (1, batch) or cos.shape[1] != seq or rotary_dim > x.shape[-1]:
            return "cos and sin of another shape"
        if whole and rotary_dim != x.shape[-1]:
            return "cos and sin of another head size"
        reason = checks.why_not(x, cos, sin) or limits().why_not(
            batch=batch,
            heads=heads,
            seq=seq,
            head_dim=rotary_dim,
            layout="BSND" if _is_bsnd(x, layout) else "BNSD",
            itemsize=torch.promote_types(x.dtype, cos.dtype).itemsize,
            repeats=heads * (batch if cos.shape[0] == 1 else 1),
            trained=cos.requires_grad or sin.requires_grad,
            mode=mode,
        )
        if reason:
            return reason
    return None


def _is_bsnd(x: Tensor, layout: str) -> bool:
    """Whether the memory is in BSND order, which a BNSD view may well have: heads lie closer together than tokens.

    With one head or one token the memory is in both orders, whatever the strides say.
    """
    return layout == "BSND" or 1 in x.shape[1:3] or x.stride(1) < x.stride(2)


# -- the operator -----------------------------------------------------------------------------------------------------


def _pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Pair:
    return rotary(q, cos, sin, layout), rotary(k, cos, sin, layout)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: str, mode: str = "half") -> Tensor:
    """Rotate the first `cos.shape[-1]` channels of every head.

    Args:
        x: [B, N, S, D] or [B, S, N, D], as `layout` says.
        cos, sin: four axes that broadcast to `x` but for the last, which may be shorter.
        layout: "BNSD" or "BSND".
        mode: "half" or "interleave", as for `Limits.why_not`.

    Returns:
        The shape of `x`, in the dtype that `x` and `cos` promote to.
    """
    counters.ran(OP)
    dtype = torch.promote_types(x.dtype, cos.dtype)
    rotary_dim = cos.shape[-1]
    rotating = x[..., :rotary_dim].to(dtype)
    cos, sin = cos.to(dtype), sin.to(dtype)
    npu_rotary_mul = importlib.import_module("torch_npu").npu_rotary_mul
    if mode != "half":  # torch_npu before 7.0.0 has no such argument
        npu_rotary_mul = functools.partial(npu_rotary_mul, rotary_mode=mode)
    if layout == "BNSD" and _is_bsnd(x, layout):
        bsnd = (tensor.transpose(1, 2).contiguous() for tensor in (rotating, cos, sin))
        rotated: Tensor = npu_rotary_mul(*bsnd).transpose(1, 2)
    else:
        rotated = npu_rotary_mul(rotating.contiguous(), cos.contiguous(), sin.contiguous())
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary_dim:].to(dtype)), -1)


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, mode: str = "half") -> Tensor:
    """The same in plain torch, in the dtypes of the arguments."""
    rotating, passing = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if mode == "half":
        first, second = rotating.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-rotating[..., 1::2], rotating[..., ::2]), -1).flatten(-2)
    rotated = rotating * cos + turned * sin
    return torch.cat((rotated, passing.to(rotated.dtype)), -1)

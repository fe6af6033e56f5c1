"""Rotary position embedding through `torch_npu.npu_rotary_mul`: `x * cos + rotate_half(x) * sin`.

Replaces four kinds of function, each in the signature of its release (transformers 5.2 dropped `position_ids`):

    standard    apply_rotary_pos_emb
    partial     the same, but only the first `cos.shape[-1]` channels rotate (Phi-3, Qwen3-Next, Qwen3.5)
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


@dataclass(frozen=True)
class Limits:
    """What npu_rotary_mul accepts, from its documentation in one release of Ascend Extension for PyTorch."""

    head_dims: range
    largest_axis: int  # of batch and of heads
    largest_broadcast: int | None  # product of the axes along which cos and sin are repeated
    largest_trained: int | None  # batch times heads when cos and sin need gradients

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
    ) -> str | None:
        """Why the operator must not be called with these sizes.

        Args:
            batch, heads, seq, head_dim: sizes of the input; `head_dim` is what rotates.
            layout: "BNSD" or "BSND".
            itemsize: bytes of one element.
            repeats: how many times each row of cos is used; `heads` if not given.
            trained: whether cos or sin needs a gradient.
        """
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
    "6.0.0": Limits(range(128, 129), largest_axis=1000, largest_broadcast=1024, largest_trained=None),
    "7.0.0": Limits(range(2, 896, 2), largest_axis=999, largest_broadcast=None, largest_trained=1024),
}


@functools.cache
def limits() -> Limits:
    """The limits of this torch_npu. Its schema tells the release: `rotary_mode` came with 7.0.0."""
    return RELEASES["7.0.0" if "rotary_mode" in (checks.parameters("npu_rotary_mul") or ()) else "6.0.0"]


def requires(original: Any, context: Any) -> str | None:
    """Why no rotary embedding can be replaced on this host."""
    return checks.lacks("npu_rotary_mul")


# -- factories --------------------------------------------------------------------------------------------------------


def standard(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """Factory for functions that rotate the whole head."""
    return _text(original, whole=True)


def partial(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """Factory for functions that rotate the first `cos.shape[-1]` channels."""
    return _text(original, whole=False)


def _text(original: Callable[..., Pair], *, whole: bool) -> Callable[..., Pair]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Pair:
        reason = _why_not(q, k, cos, sin, unsqueeze_dim, whole=whole)
        if reason:
            counters.fell_back(OP, reason)
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return _pair(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), LAYOUTS[unsqueeze_dim])

    def apply_with_position_ids(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
    ) -> Pair:
        return apply(q, k, cos, sin, unsqueeze_dim)  # the original does not use them either

    names = ("q", "k", "cos", "sin")
    old, new = (*names, "position_ids", "unsqueeze_dim"), (*names, "unsqueeze_dim")
    return checks.pick(original, {old: apply_with_position_ids, new: apply})


def multimodal(original: Callable[..., Pair], context: Any) -> Callable[..., Pair]:
    """Factory for functions that take cos and sin as [3, batch, sequence, head_dim] and interleave them by section."""

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1) -> Pair:
        one_cos, one_sin = _interleave(cos, mrope_section), _interleave(sin, mrope_section)
        reason = _why_not(q, k, one_cos, one_sin, unsqueeze_dim, whole=True)
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
            reason = checks.why_not(q, k) or _why_not(*wide, 2, whole=True)
        if reason:
            counters.fell_back(OP, reason)
            return original(q, k, cos, sin)
        wide_q, wide_k = _pair(wide[0], wide[1], wide[2].unsqueeze(2), wide[3].unsqueeze(2), "BSND")
        return wide_q[0].to(q.dtype), wide_k[0].to(k.dtype)

    return apply


# -- one input --------------------------------------------------------------------------------------------------------


def _why_not(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, *, whole: bool) -> str | None:
    """Why these tensors go to the original. q, k [B, N, S, D] or [B, S, N, D]; cos, sin [B or 1, S, rotary_dim]."""
    if any(checks.is_dtensor(tensor) for tensor in (q, k, cos, sin)):
        return "a DTensor"
    layout = LAYOUTS.get(unsqueeze_dim)
    if layout is None or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return "an unknown layout"
    for x in (q, k):
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


def rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate the first `cos.shape[-1]` channels of every head.

    Args:
        x: [B, N, S, D] or [B, S, N, D], as `layout` says.
        cos, sin: four axes that broadcast to `x` but for the last, which may be shorter.
        layout: "BNSD" or "BSND".

    Returns:
        The shape of `x`, in the dtype that `x` and `cos` promote to.
    """
    counters.ran(OP)
    dtype = torch.promote_types(x.dtype, cos.dtype)
    rotary_dim = cos.shape[-1]
    rotating = x[..., :rotary_dim].to(dtype)
    cos, sin = cos.to(dtype), sin.to(dtype)
    npu_rotary_mul = importlib.import_module("torch_npu").npu_rotary_mul
    if layout == "BNSD" and _is_bsnd(x, layout):
        bsnd = (tensor.transpose(1, 2).contiguous() for tensor in (rotating, cos, sin))
        rotated: Tensor = npu_rotary_mul(*bsnd).transpose(1, 2)
    else:
        rotated = npu_rotary_mul(rotating.contiguous(), cos.contiguous(), sin.contiguous())
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary_dim:].to(dtype)), -1)


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in plain torch, in the dtypes of the arguments."""
    rotating, passing = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotating.chunk(2, -1)
    rotated = rotating * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((rotated, passing.to(rotated.dtype)), -1)

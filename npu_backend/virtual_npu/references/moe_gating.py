"""Choosing experts: softmax and top-k of the router's logits."""

from __future__ import annotations

import torch

from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

_NAME = "npu_moe_gating_top_k_softmax"
_MAX_K = 1024


def _check(x: torch.Tensor, finished: torch.Tensor | None, k: int) -> None:
    need_dtype(_NAME, "x", x, FLOATS)
    need(x.dim() in (2, 3), _NAME, f"x has {x.dim()} dimensions, 2 or 3 are needed")
    need(0 < k <= min(x.shape[-1], _MAX_K), _NAME, f"k={k} must be from 1 to {min(x.shape[-1], _MAX_K)}")
    if finished is not None:
        need_dtype(_NAME, "finished", finished, (torch.bool,))
        need(finished.shape == x.shape[:-1], _NAME, f"finished {tuple(finished.shape)} must be {tuple(x.shape[:-1])}")


@register_reference(f"npu::{_NAME}")
def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest softmax values of each row, their experts (int32), and where each came from (int32).

    Rows that are finished get the expert that does not exist, the number of experts.
    """
    _check(x, finished, k)
    experts = x.shape[-1]
    values, chosen = torch.softmax(x.float(), -1).topk(k, -1)
    if finished is not None:
        chosen = chosen.masked_fill(finished.unsqueeze(-1), experts)
    rows = x.numel() // experts
    sources = torch.arange(rows * k, dtype=torch.int32).view(k, rows).t().reshape(values.shape)
    return values.to(x.dtype), chosen.to(torch.int32), sources

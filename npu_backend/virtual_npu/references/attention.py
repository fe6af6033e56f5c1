"""Attention: torch's scaled_dot_product_attention, which torch_npu turns into its flash attention kernel."""

from __future__ import annotations

import torch

from npu_backend.virtual_npu.registry import register_reference


@register_reference("aten::scaled_dot_product_attention", differentiable=True)
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The CPU's own attention."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )

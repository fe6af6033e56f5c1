"""Moving tokens to their experts and back, with gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

_MAX_INDICES = 16777215
_MAX_TOP_K = 512


def _check_permute(operator: str, tokens: torch.Tensor, indices: torch.Tensor, padded_mode: bool) -> int:
    """Check, and return how many experts each token goes to."""
    need(not padded_mode, operator, "padded_mode=True is not supported")
    need_dtype(operator, "tokens", tokens, FLOATS)
    need_dtype(operator, "indices", indices, (torch.int32, torch.int64))
    need(tokens.dim() == 2, operator, f"tokens has {tokens.dim()} dimensions, 2 are needed")
    need(indices.dim() in (1, 2), operator, f"indices has {indices.dim()} dimensions, 1 or 2 are needed")
    need(
        indices.shape[0] == tokens.shape[0], operator, f"indices has {indices.shape[0]} rows, tokens {tokens.shape[0]}"
    )
    need(
        indices.numel() < _MAX_INDICES,
        operator,
        f"indices has {indices.numel()} elements, fewer than {_MAX_INDICES} are allowed",
    )
    if indices.numel():
        low, high = int(indices.min()), int(indices.max())
        need(
            low >= 0 and high < _MAX_INDICES,
            operator,
            f"indices reach from {low} to {high}; 0 to {_MAX_INDICES - 1} are allowed",
        )
    top_k = indices.shape[1] if indices.dim() == 2 else 1
    need(1 <= top_k <= _MAX_TOP_K, operator, f"{top_k} experts per token; 1 to {_MAX_TOP_K} are allowed")
    return top_k


@register_reference("npu::npu_moe_token_permute")
def npu_moe_token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [N, H] repeated and sorted by expert, and where row i of the repetition went (int32 [N * top_k])."""
    top_k = _check_permute("npu_moe_token_permute", tokens, indices, padded_mode)
    order = torch.argsort(indices.reshape(-1), stable=True)
    kept = order[:num_out_tokens] if num_out_tokens else order
    return tokens[kept // top_k], torch.argsort(order).to(torch.int32)


@register_reference("npu::npu_moe_token_permute_grad")
def npu_moe_token_permute_grad(
    tokens: torch.Tensor,
    grad: torch.Tensor,
    indices: torch.Tensor,
    sorted_indices: torch.Tensor,
    padded_mode: bool = False,
) -> torch.Tensor:
    """Gradient of the tokens: the sum over the places that each one went to; dropped places count nothing."""
    top_k = _check_permute("npu_moe_token_permute_grad", tokens, indices, padded_mode)
    return _sum_over_experts(grad, sorted_indices, top_k).to(tokens.dtype)


@register_reference("npu::npu_moe_token_permute_grad_v2", counted_as="npu::npu_moe_token_permute_grad")
def npu_moe_token_permute_grad_v2(
    grad: torch.Tensor,
    sorted_indices: torch.Tensor,
    rows: int,
    dtype: torch.dtype,
    top_k: int,
    padded_mode: bool = False,
) -> torch.Tensor:
    """The same without the tokens themselves: only their number and dtype are needed."""
    need(not padded_mode, "npu_moe_token_permute_grad_v2", "padded_mode=True is not supported")
    return _sum_over_experts(grad, sorted_indices, top_k).to(dtype)


def _sum_over_experts(grad: torch.Tensor, sorted_indices: torch.Tensor, top_k: int) -> torch.Tensor:
    return _in_token_order(grad.float(), sorted_indices).view(-1, top_k, grad.shape[-1]).sum(1)


def _check_unpermute(
    operator: str,
    permuted: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None,
    padded_mode: bool,
    restore_shape: Sequence[int] | None,
) -> int:
    need(not padded_mode, operator, "padded_mode=True is not supported")
    need(restore_shape is None, operator, "restore_shape only belongs to padded_mode, which is not supported")
    need_dtype(operator, "permuted_tokens", permuted, FLOATS)
    need_dtype(operator, "sorted_indices", sorted_indices, (torch.int32,))
    need(permuted.dim() == 2, operator, f"permuted_tokens has {permuted.dim()} dimensions, 2 are needed")
    need(sorted_indices.dim() == 1, operator, f"sorted_indices has {sorted_indices.dim()} dimensions, 1 is needed")
    rows = sorted_indices.numel()
    if probs is None:
        return 1
    need_dtype(operator, "probs", probs, FLOATS)
    need(probs.dim() == 2, operator, f"probs has {probs.dim()} dimensions, 2 are needed")
    need(
        probs.numel() == rows,
        operator,
        f"probs {tuple(probs.shape)} must weigh the {rows} permuted rows: [tokens, top_k]",
    )
    need(
        probs.shape[1] <= _MAX_TOP_K, operator, f"{probs.shape[1]} experts per token; at most {_MAX_TOP_K} are allowed"
    )
    return probs.shape[1]


@register_reference("npu::npu_moe_token_unpermute")
def npu_moe_token_unpermute(
    permuted: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Rows back in token order, weighed by `probs` and summed over each token's experts; dropped rows count nothing."""
    top_k = _check_unpermute("npu_moe_token_unpermute", permuted, sorted_indices, probs, padded_mode, restore_shape)
    rows = _in_token_order(permuted.float(), sorted_indices).view(-1, top_k, permuted.shape[-1])
    weighed = rows if probs is None else rows * probs.float().unsqueeze(-1)
    return weighed.sum(1).to(permuted.dtype)


@register_reference("npu::_npu_moe_token_unpermute", counted_as="npu::npu_moe_token_unpermute")
def _npu_moe_token_unpermute(
    permuted: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch_npu's autograd calls: the result, and the permuted tokens that backward needs."""
    return npu_moe_token_unpermute(permuted, sorted_indices, probs, padded_mode, restore_shape), permuted


def _in_token_order(permuted: torch.Tensor, sorted_indices: torch.Tensor) -> torch.Tensor:
    """Row i is the permuted row that place i went to, or zeros if it was dropped."""
    places = sorted_indices.long()
    if places.numel() == permuted.shape[0]:
        return permuted[places]
    dropped = permuted.new_zeros(places.numel() - permuted.shape[0], permuted.shape[-1])
    return torch.cat((permuted, dropped))[places]


@register_reference("npu::npu_moe_token_unpermute_grad")
def npu_moe_token_unpermute_grad(
    permuted: torch.Tensor,
    grad: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the permuted tokens and of the probabilities (empty without them)."""
    name = "npu_moe_token_unpermute_grad"
    top_k = _check_unpermute(name, permuted, sorted_indices, probs, padded_mode, restore_shape)
    grad_permuted, grad_probs = _unpermute_gradients(grad, sorted_indices, permuted.shape[0], probs, top_k, permuted)
    return grad_permuted.to(permuted.dtype), grad_probs


@register_reference("npu::npu_moe_token_unpermute_grad_v2", counted_as="npu::npu_moe_token_unpermute_grad")
def npu_moe_token_unpermute_grad_v2(
    grad: torch.Tensor,
    sorted_indices: torch.Tensor,
    permuted_rows: int,
    permuted_dtype: torch.dtype,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
    permuted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same; without probabilities the permuted tokens are not needed and not given."""
    name = "npu_moe_token_unpermute_grad_v2"
    need(not padded_mode and restore_shape is None, name, "padded_mode=True is not supported")
    need(probs is None or permuted is not None, name, "probs need permuted_tokens")
    top_k = 1 if probs is None else probs.shape[1]
    grad_permuted, grad_probs = _unpermute_gradients(grad, sorted_indices, permuted_rows, probs, top_k, permuted)
    return grad_permuted.to(permuted_dtype), grad_probs


def _unpermute_gradients(
    grad: torch.Tensor,
    sorted_indices: torch.Tensor,
    rows: int,
    probs: torch.Tensor | None,
    top_k: int,
    permuted: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    spread = grad.float().repeat_interleave(top_k, 0)
    weighed = spread if probs is None else spread * probs.float().reshape(-1, 1)
    places = sorted_indices.long()
    kept = places < rows
    grad_permuted = torch.zeros(rows, grad.shape[-1])
    grad_permuted[places[kept]] = weighed[kept]
    if probs is None or permuted is None:
        return grad_permuted, grad.new_empty(0)
    grad_probs = (spread * _in_token_order(permuted.float(), sorted_indices)).sum(-1)
    return grad_permuted, grad_probs.view_as(probs).to(probs.dtype)

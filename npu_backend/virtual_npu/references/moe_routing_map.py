"""Moving tokens to their experts and back by a map [tokens, experts], with gradients: Megatron's way.

Places: without padding, entry `t * top_k + j` is the row that token t's j-th expert gets; with padding each expert has
the same number of rows, and entry `e * capacity + c` is the token in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

_PERMUTE, _UNPERMUTE = "npu_moe_token_permute_with_routing_map", "npu_moe_token_unpermute_with_routing_map"
_MAX_INDICES = 16777215
_MAX_TOP_K = 512


def _check_map(
    name: str, tokens: int, routing_map: torch.Tensor, probs: torch.Tensor | None, dtype: torch.dtype
) -> None:
    need_dtype(name, "routing_map", routing_map, (torch.int8, torch.bool))
    need(
        routing_map.dim() == 2 and routing_map.shape[0] == tokens,
        name,
        f"routing_map {tuple(routing_map.shape)} must be [{tokens}, experts]",
    )
    if probs is not None:
        allowed = (dtype, torch.float32) if dtype == torch.bfloat16 else (dtype,)
        need_dtype(name, "probs", probs, allowed)
        need(probs.shape == routing_map.shape, name, f"probs {tuple(probs.shape)} must be {tuple(routing_map.shape)}")


def _tokens_of_experts(routing_map: torch.Tensor, capacity: int) -> torch.Tensor:
    """[experts, capacity]: each expert's tokens, then others that pad it."""
    return routing_map.t().bool().int().argsort(dim=-1, descending=True, stable=True)[:, :capacity]


@register_reference(f"npu::{_PERMUTE}")
def npu_moe_token_permute_with_routing_map(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens sorted by expert, their probabilities (empty without them), and the places."""
    need_dtype(_PERMUTE, "tokens", tokens, FLOATS)
    need(tokens.dim() == 2, _PERMUTE, f"tokens has {tokens.dim()} dimensions, 2 are needed")
    count = tokens.shape[0]
    _check_map(_PERMUTE, count, routing_map, probs, tokens.dtype)
    experts = routing_map.shape[1]
    need(max(count, experts) < _MAX_INDICES, _PERMUTE, f"{count} tokens or {experts} experts are too many")
    wanted = count if num_out_tokens is None else num_out_tokens
    need(0 <= wanted <= count * experts, _PERMUTE, f"num_out_tokens={wanted} must be from 0 to {count * experts}")
    chosen = routing_map.bool()
    if drop_and_pad:
        sources = _tokens_of_experts(routing_map, wanted // max(experts, 1))
        weights = tokens.new_empty(0) if probs is None else probs.t().gather(1, sources).flatten()
        return tokens[sources.flatten()], weights, sources.flatten().to(torch.int32)
    top_k = wanted // max(count, 1)
    need(top_k < _MAX_TOP_K, _PERMUTE, f"{top_k} experts per token; fewer than {_MAX_TOP_K} are allowed")
    need(
        bool((chosen.sum(1) == top_k).all()),
        _PERMUTE,
        f"every row of routing_map must choose num_out_tokens // tokens = {top_k} experts",
    )
    rows, columns = chosen.t().nonzero(as_tuple=True)  # by expert, then token
    places = torch.empty(count, experts, dtype=torch.int32)
    places[columns, rows] = torch.arange(len(rows), dtype=torch.int32)
    weights = tokens.new_empty(0) if probs is None else probs.t()[rows, columns]
    return tokens[columns], weights, places[chosen]


@register_reference(f"npu::{_PERMUTE}_grad")
def npu_moe_token_permute_with_routing_map_grad(
    grad: torch.Tensor,
    probs_grad: torch.Tensor | None,
    places: torch.Tensor,
    routing_map: torch.Tensor,
    experts: int,
    tokens: int,
    drop_and_pad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of tokens and of probabilities (empty without them)."""
    index, wide = places.long(), grad.float()
    scattered = grad.new_zeros(tokens, experts) if probs_grad is None else probs_grad.new_zeros(tokens, experts)
    if drop_and_pad:
        dx = torch.zeros(tokens, grad.shape[1]).index_add_(0, index, wide)
        columns = torch.arange(experts).repeat_interleave(index.numel() // max(experts, 1))
        if probs_grad is not None:
            scattered[index, columns] = probs_grad
    else:
        dx = wide[index].view(tokens, -1, grad.shape[1]).sum(1)
        if probs_grad is not None:
            scattered[routing_map.bool()] = probs_grad[index]
    return dx.to(grad.dtype), grad.new_empty(0) if probs_grad is None else scattered


# ---- back ----


def _check_unpermute(
    permuted: torch.Tensor, places: torch.Tensor, shape: Sequence[int], probs: torch.Tensor | None,
    routing_map: torch.Tensor | None, drop_and_pad: bool,
) -> None:  # fmt: skip
    need_dtype(_UNPERMUTE, "permuted_tokens", permuted, FLOATS)
    need_dtype(_UNPERMUTE, "sorted_indices", places, (torch.int32,))
    need(permuted.dim() == 2, _UNPERMUTE, f"permuted_tokens has {permuted.dim()} dimensions, 2 are needed")
    need(places.dim() == 1, _UNPERMUTE, f"sorted_indices has {places.dim()} dimensions, 1 is needed")
    need(
        len(shape) == 2 and shape[1] == permuted.shape[1],
        _UNPERMUTE,
        f"restore_shape={list(shape)} must be [tokens, {permuted.shape[1]}]",
    )
    need(probs is None or routing_map is not None, _UNPERMUTE, "probs need routing_map")
    if routing_map is not None:
        _check_map(_UNPERMUTE, shape[0], routing_map, probs, permuted.dtype)
    need(
        drop_and_pad or (places.numel() % max(shape[0], 1) == 0 and places.numel() // max(shape[0], 1) <= _MAX_TOP_K),
        _UNPERMUTE,
        f"{places.numel()} sorted_indices do not give each of {shape[0]} tokens the same number, {_MAX_TOP_K} at most",
    )


def _layout(
    places: torch.Tensor, tokens: int, probs: torch.Tensor | None, routing_map: torch.Tensor | None, drop_and_pad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of the permuted tokens in use, the token that each belongs to, and its expert (0 without a map)."""
    index = places.long()
    if drop_and_pad:
        experts = 1 if routing_map is None else routing_map.shape[1]
        return torch.arange(index.numel()), index, torch.arange(experts).repeat_interleave(index.numel() // experts)
    top_k = index.numel() // max(tokens, 1)
    owners = torch.arange(tokens).repeat_interleave(top_k)
    experts_of = torch.zeros_like(owners)
    if probs is not None and routing_map is not None:
        chosen = routing_map.bool()
        counts = chosen.sum(1)
        filled = torch.arange(top_k) < counts.unsqueeze(1)  # a token with fewer experts leaves its last slots invalid
        experts_of.view(tokens, top_k)[filled] = chosen.nonzero()[:, 1]
        index = index.masked_fill(~filled.flatten(), -1)
    used = index >= 0
    return index[used], owners[used], experts_of[used]


@register_reference(f"npu::_{_UNPERMUTE}", counted_as=f"npu::{_UNPERMUTE}")
def _npu_moe_token_unpermute_with_routing_map(
    permuted: torch.Tensor,
    places: torch.Tensor,
    restore_shape: Sequence[int],
    *,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens' sums over their experts, and what torch_npu hands to backward: places, owners, weights."""
    _check_unpermute(permuted, places, restore_shape, probs, routing_map, drop_and_pad)
    rows, owners, experts = _layout(places, restore_shape[0], probs, routing_map, drop_and_pad)
    taken = permuted.float()[rows]
    weights = permuted.new_empty(0) if probs is None else probs[owners, experts]
    if probs is not None:
        taken = taken * weights.float().unsqueeze(-1)
    total = torch.zeros(tuple(restore_shape)).index_add_(0, owners, taken)
    return total.to(permuted.dtype), places.clone(), owners.to(torch.int32), weights


@register_reference(f"npu::{_UNPERMUTE}")
def npu_moe_token_unpermute_with_routing_map(
    permuted: torch.Tensor,
    places: torch.Tensor,
    restore_shape: Sequence[int],
    *,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    drop_and_pad: bool = False,
) -> torch.Tensor:
    """The same without what backward needs."""
    return _npu_moe_token_unpermute_with_routing_map(
        permuted, places, restore_shape, probs=probs, routing_map=routing_map, drop_and_pad=drop_and_pad
    )[0]


@register_reference(f"npu::{_UNPERMUTE}_grad")
def npu_moe_token_unpermute_with_routing_map_grad(
    grad: torch.Tensor,
    places: torch.Tensor,
    owners: torch.Tensor,
    routing_map: torch.Tensor | None,
    permuted: torch.Tensor | None,
    probs: torch.Tensor | None,
    drop_and_pad: bool,
    restore_shape: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the permuted tokens and of the probabilities (empty without them)."""
    rows, owner, experts = _layout(places, restore_shape[0], probs, routing_map, drop_and_pad)
    spread = grad.float()[owner]
    count = places.numel() if permuted is None else permuted.shape[0]
    dx = torch.zeros(count, grad.shape[1])
    if probs is None or permuted is None:
        dx[rows] = spread
        return dx.to(grad.dtype), grad.new_empty(0)
    dx[rows] = spread * probs.float()[owner, experts].unsqueeze(-1)
    dprobs = torch.zeros(probs.shape)
    dprobs[owner, experts] = (spread * permuted.float()[rows]).sum(-1)
    return dx.to(grad.dtype), dprobs.to(probs.dtype)

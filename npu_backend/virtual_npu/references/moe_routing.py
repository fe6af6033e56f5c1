"""Moving tokens to their experts and back by sorted indices: inference operators, no gradient on the device either."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

_INIT, _INIT_V2, _FINALIZE, _COUNT = (
    "npu_moe_init_routing",
    "npu_moe_init_routing_v2",
    "npu_moe_finalize_routing",
    "npu_moe_compute_expert_tokens",
)


def _check_tokens(name: str, x: torch.Tensor, expert_idx: torch.Tensor) -> None:
    need_dtype(name, "x", x, FLOATS)
    need(x.dim() == 2, name, f"x has {x.dim()} dimensions, 2 are needed")
    need_dtype(name, "expert_idx", expert_idx, (torch.int32,))
    need(
        expert_idx.dim() == 2 and expert_idx.shape[0] == x.shape[0],
        name,
        f"expert_idx {tuple(expert_idx.shape)} must be [{x.shape[0]}, k], the experts of each row of x",
    )


@register_reference(f"npu::{_INIT}")
def npu_moe_init_routing(
    x: torch.Tensor, row_idx: torch.Tensor, expert_idx: torch.Tensor, active_num: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows sorted by expert, the place of each (row, expert), and the sorted experts."""
    _check_tokens(_INIT, x, expert_idx)
    need_dtype(_INIT, "row_idx", row_idx, (torch.int32,))
    need(row_idx.shape == expert_idx.shape, _INIT, f"row_idx {tuple(row_idx.shape)} must be {tuple(expert_idx.shape)}")
    need(x.numel() < 2**24, _INIT, f"x has {x.numel()} elements; fewer than 2^24 are allowed")
    experts, order = expert_idx.flatten().sort(stable=True)
    sources = row_idx.flatten()[order].long()
    places = torch.empty_like(sources).scatter_(0, sources, torch.arange(sources.numel()))
    kept = min(x.shape[0], active_num) * expert_idx.shape[1]
    return x[sources % max(x.shape[0], 1)][:kept], places.to(torch.int32), experts


def _check_init_v2(
    x: torch.Tensor, expert_idx: torch.Tensor, active_num: int, experts: int, drop_pad: int, count_type: int,
    count_flag: bool, quant_mode: int, active: Sequence[int], index_type: int, offset: torch.Tensor | None,
) -> None:  # fmt: skip
    _check_tokens(_INIT_V2, x, expert_idx)
    need(quant_mode == -1 and offset is None, _INIT_V2, f"quant_mode={quant_mode} has no reference; -1 has one")
    need(drop_pad == 0, _INIT_V2, f"drop_pad_mode={drop_pad}; only 0 is supported")
    need(
        count_type in (1, 2),
        _INIT_V2,
        f"expert_tokens_num_type={count_type}; only 1 (counts) and 2 (pairs) are supported",
    )
    need(count_flag, _INIT_V2, "expert_tokens_num_flag=False; only True is supported")
    most = 5120 if count_type == 2 else 10240
    need(0 < experts <= most, _INIT_V2, f"expert_num={experts} must be from 1 to {most}")
    need(index_type in (0, 1), _INIT_V2, f"row_idx_type={index_type} is neither 0 (gather) nor 1 (scatter)")
    whole = expert_idx.numel()
    need(active_num in (-1, 0, whole), _INIT_V2, f"active_num={active_num} has a reference only for all rows, {whole}")
    need(
        len(active) == 2 and 0 <= active[0] <= active[1] <= experts,
        _INIT_V2,
        f"active_expert_range={list(active)} must be [first, end] within 0 and {experts}",
    )
    need(
        not whole or (int(expert_idx.min()) >= 0 and int(expert_idx.max()) < experts),
        _INIT_V2,
        f"expert_idx must be from 0 to {experts - 1}",
    )


@register_reference(f"npu::{_INIT_V2}")
def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of active experts by expert (then zeros), their places, how many each expert has, and their scales."""
    _check_init_v2(
        x, expert_idx, active_num, expert_num, drop_pad_mode, expert_tokens_num_type, expert_tokens_num_flag,
        quant_mode, active_expert_range, row_idx_type, offset,
    )  # fmt: skip
    first, end = active_expert_range
    flat = expert_idx.flatten().long()
    active = (flat >= first) & (flat < end)
    order = torch.where(active, flat, expert_num).argsort(stable=True)[: int(active.sum())]
    rows = order // expert_idx.shape[1]
    expanded, scales = x.new_zeros(flat.numel(), x.shape[1]), torch.zeros(flat.numel())
    expanded[: len(rows)] = x[rows]
    if scale is not None:
        need(tuple(scale.shape) == (x.shape[0],), _INIT_V2, f"scale {tuple(scale.shape)} must be ({x.shape[0]},)")
        scales[: len(rows)] = scale.float()[rows]
    places = torch.full_like(flat, -1)
    if row_idx_type == 0:
        places[order] = torch.arange(len(order))
    else:
        places[: len(order)] = order
    counts = torch.bincount(flat[active], minlength=expert_num)
    if expert_tokens_num_type == 1:
        return expanded, places.to(torch.int32), counts[first:end], scales
    pairs = torch.zeros(expert_num, 2, dtype=torch.int64)
    used = counts.nonzero().squeeze(1)
    pairs[: len(used)] = torch.stack((used, counts[used]), 1)
    return expanded, places.to(torch.int32), pairs, scales


@register_reference(f"npu::{_COUNT}")
def npu_moe_compute_expert_tokens(sorted_experts: torch.Tensor, num_expert: int) -> torch.Tensor:
    """How many rows belong to the experts up to each one."""
    need_dtype(_COUNT, "sorted_expert_for_source_row", sorted_experts, (torch.int32,))
    need(sorted_experts.dim() == 1, _COUNT, f"the experts have {sorted_experts.dim()} dimensions, 1 is needed")
    need(0 < num_expert <= 2048, _COUNT, f"num_expert={num_expert} must be from 1 to 2048")
    need(bool((sorted_experts.diff() >= 0).all()), _COUNT, "the experts must not fall")
    return torch.searchsorted(sorted_experts, torch.arange(num_expert, dtype=torch.int32), right=True).to(torch.int32)


@register_reference(f"npu::{_FINALIZE}")
def npu_moe_finalize_routing(
    expanded: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    places: torch.Tensor,
    experts: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """Each row's expert outputs, biased, weighed and summed, and what skips the experts.

    Mode 0 lists places by expert choice, then row; mode 2 by row, then choice.
    """
    need_dtype(_FINALIZE, "expanded_permuted_rows", expanded, FLOATS)
    need(expanded.dim() == 2, _FINALIZE, f"expanded_permuted_rows has {expanded.dim()} dimensions, 2 are needed")
    need_dtype(_FINALIZE, "expanded_src_to_dst_row", places, (torch.int32,))
    need(drop_pad_mode in (0, 2), _FINALIZE, f"drop_pad_mode={drop_pad_mode} has no reference; 0 and 2 have one")
    need(skip2 is None or skip1 is not None, _FINALIZE, "skip2 needs skip1")
    need(bias is None or experts is not None, _FINALIZE, "bias needs export_for_source_row")
    top_k = scales.shape[1] if scales is not None else int(k or 1)
    need(places.numel() % top_k == 0, _FINALIZE, f"{places.numel()} places are no multiple of k={top_k}")
    rows = places.numel() // top_k
    for name, tensor, shape in (
        ("skip1", skip1, (rows, expanded.shape[1])),
        ("skip2", skip2, (rows, expanded.shape[1])),
        ("scales", scales, (rows, top_k)),
    ):
        if tensor is not None:
            need(tensor.dtype == expanded.dtype, _FINALIZE, f"{name} is {tensor.dtype}, the rows are {expanded.dtype}")
            need(tuple(tensor.shape) == shape, _FINALIZE, f"{name} {tuple(tensor.shape)} must be {shape}")
    index = places.view(top_k, rows).t() if drop_pad_mode == 0 else places.view(rows, top_k)
    taken = expanded.float()[index.long()]
    if bias is not None and experts is not None:
        taken = taken + bias.float()[experts.long()]
    total = (taken if scales is None else taken * scales.float().unsqueeze(-1)).sum(1)
    for skip in (skip1, skip2):
        total = total if skip is None else total + skip.float()
    return total.to(expanded.dtype)

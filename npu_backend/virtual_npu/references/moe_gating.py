"""Choosing experts: softmax or sigmoid of the router's logits, and the k best."""

from __future__ import annotations

import torch

from npu_backend.virtual_npu.references.autograd import gradients
from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import OperatorError, register_reference

_SOFTMAX, _GROUPED = "npu_moe_gating_top_k_softmax", "npu_moe_gating_top_k"
_MAX_K = 1024
_MAX_EXPERTS = 2048

# ---- softmax of all experts, or of the chosen ones ----


def _check(name: str, x: torch.Tensor, finished: torch.Tensor | None, k: int) -> None:
    need_dtype(name, "x", x, FLOATS)
    need(x.dim() in (2, 3), name, f"x has {x.dim()} dimensions, 2 or 3 are needed")
    need(0 < k <= min(x.shape[-1], _MAX_K), name, f"k={k} must be from 1 to {min(x.shape[-1], _MAX_K)}")
    if finished is not None:
        need_dtype(name, "finished", finished, (torch.bool,))
        need(finished.shape == x.shape[:-1], name, f"finished {tuple(finished.shape)} must be {tuple(x.shape[:-1])}")


def _finish(chosen: torch.Tensor, finished: torch.Tensor | None, experts: int) -> torch.Tensor:
    """Rows that are finished get the expert that does not exist, the number of experts."""
    return (chosen if finished is None else chosen.masked_fill(finished.unsqueeze(-1), experts)).to(torch.int32)


@register_reference(f"npu::{_SOFTMAX}")
def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest softmax values of each row, their experts (int32), and where each came from (int32)."""
    _check(_SOFTMAX, x, finished, k)
    values, chosen = torch.softmax(x.float(), -1).topk(k, -1)
    rows = x.numel() // x.shape[-1]
    sources = torch.arange(rows * k, dtype=torch.int32).view(k, rows).t().reshape(values.shape)
    return values.to(x.dtype), _finish(chosen, finished, x.shape[-1]), sources


@register_reference(f"npu::{_SOFTMAX}_v2")
def npu_moe_gating_top_k_softmax_v2(
    x: torch.Tensor,
    *,
    k: int = 1,
    finished: torch.Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest of the softmax (renorm 0), or the softmax of the k largest (1); the whole softmax if asked for."""
    name = f"{_SOFTMAX}_v2"
    _check(name, x, finished, k)
    need(renorm in (0, 1), name, f"renorm={renorm} is neither 0 nor 1")
    logits, chosen = x.float().topk(k, -1)
    whole = torch.softmax(x.float(), -1)
    values = torch.softmax(logits, -1) if renorm else whole.gather(-1, chosen)
    shown = whole if output_softmax and not renorm else x.new_empty(0, dtype=torch.float32)
    return values.to(x.dtype), _finish(chosen, finished, x.shape[-1]), shown


# ---- groups of experts, as DeepSeek's router forms them ----


def _check_grouped(
    x: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    k_group: int,
    groups: int,
    select_mode: int,
    renorm: int,
    norm: int,
) -> None:
    need_dtype(_GROUPED, "x", x, FLOATS)
    need(x.dim() == 2, _GROUPED, f"x has {x.dim()} dimensions, 2 are needed")
    experts = x.shape[-1]
    need(experts <= _MAX_EXPERTS, _GROUPED, f"{experts} experts; at most {_MAX_EXPERTS} are allowed")
    if bias is not None:
        need(bias.dtype == x.dtype, _GROUPED, f"bias is {bias.dtype}, x is {x.dtype}; they must have one dtype")
        need(tuple(bias.shape) == (experts,), _GROUPED, f"bias {tuple(bias.shape)} must be ({experts},)")
    need(groups > 0 and experts % groups == 0, _GROUPED, f"group_count={groups} does not divide {experts} experts")
    size = experts // groups
    need(size > 2, _GROUPED, f"group_count={groups} leaves {size} experts per group; more than 2 are needed")
    need(
        -(-size // 32) * 32 * groups <= _MAX_EXPERTS, _GROUPED, f"{groups} groups of {size}, padded to 32, are too many"
    )
    need(1 <= k_group <= groups, _GROUPED, f"k_group={k_group} must be from 1 to group_count={groups}")
    need(
        1 <= k <= size * k_group, _GROUPED, f"k={k} must be from 1 to {size * k_group}, the experts of {k_group} groups"
    )
    need(
        select_mode in (0, 1), _GROUPED, f"group_select_mode={select_mode} is neither 0 (best) nor 1 (sum of best two)"
    )
    need(renorm == 0, _GROUPED, f"renorm={renorm}; only 0 is supported")
    need(norm in (0, 1), _GROUPED, f"norm_type={norm} is neither 0 (softmax) nor 1 (sigmoid)")


def _weights(scores: torch.Tensor, chosen: torch.Tensor, norm: int, factor: float, eps: float) -> torch.Tensor:
    taken = scores.gather(1, chosen)
    return (taken / (taken.sum(-1, keepdim=True) + eps) if norm == 1 else taken) * factor


@register_reference(f"npu::{_GROUPED}")
def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights and experts (int32) of the k best in the k_group best groups, and all scores if asked for.

    The bias moves the choice only. Sigmoid scores are divided by the sum of the chosen ones.
    """
    if input_ids is not None or tid2eid is not None:
        raise OperatorError(f"npu::{_GROUPED}: input_ids and tid2eid (hashed routing) have no reference")
    _check_grouped(x, k, bias, k_group, group_count, group_select_mode, renorm, norm_type)
    scores = torch.sigmoid(x.float()) if norm_type == 1 else torch.softmax(x.float(), -1)
    ranked = scores if bias is None else scores + bias.float()
    if group_count > 1:
        grouped = ranked.unflatten(1, (group_count, -1))
        best = grouped.topk(2, -1).values.sum(-1) if group_select_mode == 1 else grouped.amax(-1)
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, best.topk(k_group, -1).indices, False)
        ranked = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
    chosen = ranked.argsort(dim=-1, descending=True, stable=True)[:, :k]
    weights = _weights(scores, chosen, norm_type, routed_scaling_factor, eps)
    return weights.to(x.dtype), chosen.to(torch.int32), scores if out_flag else scores.new_empty(0)


@register_reference(f"npu::{_GROUPED}_backward")
def npu_moe_gating_top_k_backward(
    x_norm: torch.Tensor,
    grad_y: torch.Tensor,
    experts: torch.Tensor,
    *,
    renorm: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> torch.Tensor:
    """Gradient of x from the sigmoid's values."""
    name = f"{_GROUPED}_backward"
    need(norm_type == 1, name, f"norm_type={norm_type}; only 1 (sigmoid) has a backward")
    need_dtype(name, "x_norm (call the operator with out_flag=True)", x_norm, (torch.float32,))
    need_dtype(name, "grad_y", grad_y, FLOATS)
    need_dtype(name, "expertIdx", experts, (torch.int32,))
    need(x_norm.dim() == 2, name, "x_norm is empty: backward needs out_flag=True")
    need(experts.shape == grad_y.shape, name, f"expertIdx {tuple(experts.shape)} must be {tuple(grad_y.shape)}")
    chosen = experts.long()
    upstream = gradients(
        lambda scores: _weights(scores, chosen, norm_type, routed_scaling_factor, eps), [x_norm], grad_y.float()
    )[0]
    return (upstream * x_norm * (1 - x_norm)).to(grad_y.dtype)

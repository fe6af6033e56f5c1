"""Grouped matmul: one product per expert, and the one that adds to what is there (gradients of stacked weights)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

_GMM = "npu_grouped_matmul"
_ADD = "npu_grouped_matmul_add"
_LONGEST_LIST = 128
_INNER_LIMIT = 65536
_MOST_GROUPS_OF_ADD = 1024


def _group_counts(group_list: torch.Tensor, list_type: int, rows: int) -> list[int]:
    """Rows of each group. Type 0 lists running sums, type 1 counts."""
    need(list_type in (0, 1), _GMM, f"group_list_type={list_type} is neither 0 (running sums) nor 1 (counts)")
    need(group_list.dtype == torch.int64, _GMM, f"group_list is {group_list.dtype}, int64 is needed")
    need(group_list.dim() == 1, _GMM, f"group_list has {group_list.dim()} dimensions, 1 is needed")
    values = group_list.tolist()
    if list_type == 0:
        rising = all(a <= b for a, b in zip([0, *values], values))
        need(
            rising,
            _GMM,
            f"group_list {values} of type 0 holds running sums and must not fall; for counts pass group_list_type=1",
        )
        values = [b - a for a, b in zip([0, *values], values)]
    need(all(value >= 0 for value in values), _GMM, f"group_list {values} must not be negative")
    kind = "running sums" if list_type == 0 else "counts"
    need(sum(values) == rows, _GMM, f"group_list ({kind}) covers {sum(values)} rows, x has {rows}")
    return values


def _check_operands(
    x: Sequence[torch.Tensor], weight: Sequence[torch.Tensor], bias: Sequence[torch.Tensor] | None
) -> None:
    for name, tensors in (("x", x), ("weight", weight)):
        need(
            1 <= len(tensors) <= _LONGEST_LIST,
            _GMM,
            f"{name} lists {len(tensors)} tensors; 1 to {_LONGEST_LIST} are allowed",
        )
        for tensor in tensors:
            need_dtype(_GMM, name, tensor, FLOATS)
            need(
                tensor.shape[-1] < _INNER_LIMIT,
                _GMM,
                f"the last size {tensor.shape[-1]} of {name} must be below {_INNER_LIMIT}",
            )
    dtypes = {tensor.dtype for tensor in (*x, *weight)}
    need(len(dtypes) == 1, _GMM, f"x and weight must have one dtype, got {sorted(map(str, dtypes))}")
    need(not bias or len(bias) == len(weight), _GMM, f"bias lists {len(bias or ())} tensors, weight {len(weight)}")


@register_reference(f"npu::{_GMM}")
def npu_grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    group_list: torch.Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: int | None = None,
    **others: object,
) -> list[torch.Tensor]:
    """One matmul per group of rows (group_type 0), per group of the summed axis (2), or per pair of tensors (-1)."""
    given = sorted(name for name, value in others.items() if value is not None)
    need(not given, _GMM, f"quantised use ({', '.join(given)}) has no reference")
    need(not act_type, _GMM, f"act_type={act_type} has no reference")
    need(output_dtype is None, _GMM, f"output_dtype={output_dtype} has no reference")
    need(split_item in (0, 1, 2, 3), _GMM, f"split_item={split_item} is not one of 0, 1, 2, 3")
    _check_operands(x, weight, bias)
    kind = -1 if group_type is None else group_type
    need(kind in (-1, 0, 2), _GMM, f"group_type={group_type} is not one of -1, 0, 2")
    if kind == -1:
        results = _products_of_pairs(x, weight, bias)
        return results if split_item in (0, 1) else [torch.cat(results)]
    need(len(x) == 1 and x[0].dim() == 2, _GMM, "grouped use takes one 2-D x")
    need(
        len(weight) == 1,
        _GMM,
        f"weight lists {len(weight)} tensors; grouped use has a reference for one stacked tensor",
    )
    need(
        split_item in (2, 3),
        _GMM,
        f"split_item={split_item} returns one tensor per weight; one stacked weight needs 2 or 3",
    )
    need(group_list is not None, _GMM, "group_list is missing")
    need(not bias, _GMM, "bias has no reference in grouped use")
    assert group_list is not None  # for the type checker; checked above
    product = _products_of_rows if kind == 0 else _products_of_the_summed_axis
    return [product(x[0], weight[0], group_list, group_list_type or 0)]


def _products_of_pairs(
    x: Sequence[torch.Tensor], weight: Sequence[torch.Tensor], bias: Sequence[torch.Tensor] | None
) -> list[torch.Tensor]:
    need(len(x) == len(weight), _GMM, f"x lists {len(x)} tensors, weight {len(weight)}; without groups they pair up")
    products = [a @ b for a, b in zip(x, weight)]
    return [p + b for p, b in zip(products, bias)] if bias else products


def _products_of_rows(
    rows: torch.Tensor, experts: torch.Tensor, group_list: torch.Tensor, list_type: int
) -> torch.Tensor:
    need(experts.dim() == 3, _GMM, f"group_type 0 takes a weight [experts, k, n], got {tuple(experts.shape)}")
    counts = _group_counts(group_list, list_type, rows.shape[0])
    need(
        len(counts) == experts.shape[0],
        _GMM,
        f"group_list has {len(counts)} groups, weight {experts.shape[0]} experts",
    )
    _check_inner(rows, experts, experts.shape[1])
    return torch.cat([part @ experts[e] for e, part in enumerate(rows.split(counts))])


def _products_of_the_summed_axis(
    x: torch.Tensor, weight: torch.Tensor, group_list: torch.Tensor, list_type: int
) -> torch.Tensor:
    need(weight.dim() == 2, _GMM, f"group_type 2 takes a weight [k, n], got {tuple(weight.shape)}")
    counts = _group_counts(group_list, list_type, x.shape[1])
    _check_inner(x, weight, weight.shape[0])
    return torch.stack([a @ b for a, b in zip(x.split(counts, 1), weight.split(counts))])


def _check_inner(x: torch.Tensor, weight: torch.Tensor, inner: int) -> None:
    need(x.shape[1] == inner, _GMM, f"x [.., {x.shape[1]}] does not multiply weight {tuple(weight.shape)}")


@register_reference(f"npu::{_GMM}.List", counted_as=f"npu::{_GMM}")
def npu_grouped_matmul_list(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    group_list: Sequence[int] | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """The same with the groups as a list of integers."""
    groups = None if group_list is None else torch.tensor(list(group_list), dtype=torch.int64)
    return npu_grouped_matmul(x, weight, group_list=groups, **options)


@register_reference(f"npu::{_ADD}")
def npu_grouped_matmul_add(
    total: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    group_list: torch.Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> torch.Tensor:
    """`total[g] + x[rows of g]^T @ weight[rows of g]`."""
    need(transpose_x and not transpose_weight, _ADD, "only transpose_x=True and transpose_weight=False are supported")
    need(group_type == 2, _ADD, f"group_type={group_type}; only 2 is supported")
    need_dtype(_ADD, "self", total, (torch.float32,))
    need_dtype(_ADD, "x", x, (torch.float16, torch.bfloat16))
    need(x.dtype == weight.dtype, _ADD, f"x is {x.dtype}, weight {weight.dtype}; they must have one dtype")
    need(x.dim() == weight.dim() == 2, _ADD, f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be 2-D")
    widest = max(x.shape[1], weight.shape[1])
    need(widest < _INNER_LIMIT, _ADD, f"the last size {widest} must be below {_INNER_LIMIT}")
    need(len(group_list) <= _MOST_GROUPS_OF_ADD, _ADD, f"{len(group_list)} groups; at most {_MOST_GROUPS_OF_ADD}")
    shape = (len(group_list), x.shape[1], weight.shape[1])
    need(total.numel() == shape[0] * shape[1] * shape[2], _ADD, f"self {tuple(total.shape)} must be {shape}")
    counts = _group_counts(group_list, group_list_type or 0, x.shape[0])
    products = [a.float().t() @ b.float() for a, b in zip(x.split(counts), weight.split(counts))]
    return total + torch.stack(products).view_as(total)


@register_reference(f"npu::{_ADD}_", counted_as=f"npu::{_ADD}")
def npu_grouped_matmul_add_(
    total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, group_list: torch.Tensor, **options: Any
) -> torch.Tensor:
    """The same, in place."""
    return total.copy_(npu_grouped_matmul_add(total, x, weight, group_list, **options))

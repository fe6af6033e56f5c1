"""One matrix product per expert through `torch_npu.npu_grouped_matmul`, with the gradients that it does not have.

Rules that public reports paid for, kept here and nowhere else:

    counts      `tokens_per_expert` makes them: int64, one per expert, from a comparison. Not histc (no integers off
                GPU, an inclusive upper edge) nor bincount (the data give its size: a host sync, no FakeTensor).
    group_list  counts (group_list_type 1) or running sums (0): `counts_of` makes counts of either and checks the sum.
    operands    contiguous, forward and backward. The one exception is documented: group_type 2 wants its left operand
                as a transposed view, which is the view of a contiguous tensor here.
    no tokens   an expert without tokens gets a gradient of exactly zero, whatever the operator left in its buffer.
    frozen      weights that need no gradient cost no product, and their input is not kept.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from npu_backend.errors import OperatorInputError

_COUNTS, _RUNNING_SUMS = 1, 0  # group_list_type


def tokens_per_expert(expert_ids: Tensor, experts: int) -> Tensor:
    """How many of these ids name each expert.

    Args:
        expert_ids: integers of any shape, each from 0 to `experts - 1`.
        experts: E.

    Returns:
        [E] int64; the same under FakeTensor and with deterministic algorithms.
    """
    numbers = torch.arange(experts, device=expert_ids.device, dtype=expert_ids.dtype)
    return (expert_ids.reshape(-1, 1) == numbers).sum(0)


def counts_of(group_list: Tensor, rows: int, *, group_list_type: int) -> Tensor:
    """Counts per expert from a group list in either form. Reads the values: it waits for the device.

    Args:
        group_list: [E] integers: running sums (type 0) or counts (type 1).
        rows: how many rows the groups cover together.
        group_list_type: as in npu_grouped_matmul; never guessed from the values.

    Raises:
        OperatorInputError: the groups do not cover the rows, or one is negative.
    """
    counts = group_list.to(torch.int64)
    if group_list_type == _RUNNING_SUMS:
        counts = counts.diff(prepend=counts.new_zeros(1))
    values = counts.tolist()
    if min(values, default=0) < 0 or sum(values) != rows:
        form = "running sums" if group_list_type == _RUNNING_SUMS else "counts"
        raise OperatorInputError(
            f"group_list {group_list.tolist()} read as {form} (group_list_type={group_list_type}) covers {sum(values)} "
            f"rows, but there are {rows}; pass the other type, or the counts of tokens_per_expert"
        )
    return counts


def grouped_linear(rows: Tensor, counts: Tensor, weights: Sequence[Tensor], *, out_in: bool) -> Tensor:
    """Multiply each expert's rows by its weight.

    Args:
        rows: [R, in], sorted by expert.
        counts: [E] int64, summing to R.
        weights: one tensor of all experts, [E, out, in] or [E, in, out]; or the [out, in] matrices of torch.nn.Linear
            in the experts' order, of one size, several per expert where outputs lie side by side (gate, up, gate, ...).
            All in the dtype of `rows`.
        out_in: whether the matrices are stored as [out, in].

    Returns:
        [R, out].
    """
    result: Tensor = _GroupedLinear.apply(rows, counts, out_in, *weights)  # type: ignore[no-untyped-call]
    return result


def grouped_linear_reference(rows: Tensor, counts: Tensor, weights: Sequence[Tensor], *, out_in: bool) -> Tensor:
    """The same in plain torch, one expert after the other."""
    stacked = _stacked(weights, counts.numel())
    stacked = stacked.transpose(1, 2) if out_in else stacked
    return torch.cat([part @ stacked[e] for e, part in enumerate(rows.split(counts.tolist()))])


class _GroupedLinear(torch.autograd.Function):
    """Keeps the parameters themselves for backward, never the stacked or transposed copies that the operator gets."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Tensor, out_in: bool, *weights: Tensor) -> Tensor:
        ctx.out_in = out_in
        ctx.save_for_backward(rows if any(ctx.needs_input_grad[3:]) else None, counts, *weights)
        stacked = _stacked(weights, counts.numel())
        return _per_group(rows, stacked.transpose(1, 2) if out_in else stacked, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, counts, *weights = ctx.saved_tensors
        grad_rows = None
        if ctx.needs_input_grad[0]:
            stacked = _stacked(weights, counts.numel())
            grad_rows = _per_group(grad, stacked if ctx.out_in else stacked.transpose(1, 2), counts)
        grad_weights: Sequence[Tensor | None] = [None] * len(weights)
        if rows is not None:
            left, right = (grad, rows) if ctx.out_in else (rows, grad)
            stacked = _summed_groups(left, right, counts)
            wanted = ctx.needs_input_grad[3:]
            parts = [stacked] if len(weights) == 1 else stacked.reshape(len(weights), -1, stacked.shape[2]).unbind(0)
            grad_weights = [part if want else None for part, want in zip(parts, wanted)]
        return grad_rows, None, None, *grad_weights


def _stacked(weights: Sequence[Tensor], experts: int) -> Tensor:
    """All experts' matrices as one [E, out, in] (or as they are, if they are one tensor already)."""
    return weights[0] if len(weights) == 1 else torch.cat(list(weights)).view(experts, -1, weights[0].shape[1])


def _per_group(rows: Tensor, stacked: Tensor, counts: Tensor) -> Tensor:
    """rows [R, k] times stacked [E, k, n], each row with its group's matrix: [R, n]."""
    return _grouped_matmul(rows.contiguous(), stacked.contiguous(), counts, group_type=0)


def _summed_groups(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """left [R, m], right [R, n]: for each group the sum of its rows' outer products, [E, m, n]; zero for no rows."""
    sums = _grouped_matmul(left.contiguous().t(), right.contiguous(), counts, group_type=2)
    return sums.masked_fill_((counts == 0)[:, None, None], 0)


def _grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor, *, group_type: int) -> Tensor:
    torch_npu = importlib.import_module("torch_npu")
    result: Tensor = torch_npu.npu_grouped_matmul(
        [x], [weight], group_list=counts, split_item=3, group_type=group_type, group_list_type=_COUNTS
    )[0]
    return result

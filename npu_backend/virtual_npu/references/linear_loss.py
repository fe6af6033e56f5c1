"""The fused linear layer and cross entropy over a vocabulary that ranks divide: three operators that go together."""

from __future__ import annotations

import torch

from npu_backend.virtual_npu.references.checks import need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

_HALVES = (torch.float16, torch.bfloat16)
_FORWARD, _LOSS = "npu_fused_linear_online_max_sum", "npu_fused_cross_entropy_loss_with_max_sum"
_BACKWARD = "npu_fused_linear_cross_entropy_loss_with_max_sum_backward"


def _check_operands(operator: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    need_dtype(operator, "input", x, _HALVES)
    need(weight.dtype == x.dtype, operator, f"weight is {weight.dtype}, input is {x.dtype}; they must have one dtype")
    need(x.dim() == 2 and weight.dim() == 2, operator, "input and weight must have 2 dimensions")
    need(
        x.shape[1] == weight.shape[1],
        operator,
        f"input {tuple(x.shape)} does not multiply weight {tuple(weight.shape)}, [vocabulary, hidden]",
    )


@register_reference(f"npu::{_FORWARD}")
def npu_fused_linear_online_max_sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    return_logits: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Per row, over this rank's part of the vocabulary: largest logit, sum of exponentials, the target's logit.

    Then which targets are elsewhere (one bit per row, packed into uint8), the targets as local indices (0 for those
    elsewhere), and the logits if they are asked for.
    """
    _check_operands(_FORWARD, x, weight)
    need_dtype(_FORWARD, "target", target, (torch.int32, torch.int64))
    need(target.shape == x.shape[:1], _FORWARD, f"target {tuple(target.shape)} must be [{x.shape[0]}]")
    need(0 <= vocab_start_index <= vocab_end_index, _FORWARD, "0 <= vocab_start_index <= vocab_end_index must hold")
    logits = (x.float() @ weight.float().t()).to(x.dtype)
    wide = logits.float()
    largest = wide.amax(-1)
    total = (wide - largest.unsqueeze(1)).exp().sum(-1)
    elsewhere = (target < vocab_start_index) | (target > vocab_end_index)
    local = (target - vocab_start_index).masked_fill(elsewhere, 0)
    predicted = wide.gather(1, local.long().unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0.0)
    return largest, total, predicted, _pack(elsewhere), local, logits if return_logits else logits.new_empty(0)


def _pack(bits: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def _unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    return ((packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1).reshape(-1)[:count].bool()


@register_reference(f"npu::{_LOSS}")
def npu_fused_cross_entropy_loss_with_max_sum(
    logits_max: torch.Tensor,
    sum_exp_logits: torch.Tensor,
    predicted_logits: torch.Tensor,
    *,
    label_smoothing: float | None = 0.0,
    input: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    vocab_parallel_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss per row from the maxima and sums of all ranks, and this rank's part of the softmax if logits are given."""
    need(not label_smoothing, _LOSS, f"label_smoothing={label_smoothing}: only 0 is supported")
    need(input is None and weight is None, _LOSS, "input and weight must be None")
    for name, tensor in (
        ("logits_max", logits_max),
        ("sum_exp_logits", sum_exp_logits),
        ("predicted_logits", predicted_logits),
    ):
        need_dtype(_LOSS, name, tensor, (torch.float32,))
        need(
            tensor.shape == logits_max.shape and tensor.dim() == 1,
            _LOSS,
            f"{name} {tuple(tensor.shape)} must be [rows]",
        )
    loss = sum_exp_logits.log() + logits_max - predicted_logits
    if vocab_parallel_logits is None:
        return loss, loss.new_empty(0)
    return loss, (vocab_parallel_logits.float() - logits_max.unsqueeze(1)).exp() / sum_exp_logits.unsqueeze(1)


@register_reference(f"npu::{_BACKWARD}")
def npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    target_mask: torch.Tensor,
    masked_target: torch.Tensor,
    label_smoothing: float = 0.0,
    logits_max: torch.Tensor | None = None,
    sum_exp_logits: torch.Tensor | None = None,
    softmax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input and weight: from the softmax, or from the maxima and sums with the logits computed anew."""
    _check_operands(_BACKWARD, x, weight)
    need(not label_smoothing, _BACKWARD, f"label_smoothing={label_smoothing}: only 0 is supported")
    wide, rows = weight.float(), x.float()
    if softmax is None:
        need(
            logits_max is not None and sum_exp_logits is not None,
            _BACKWARD,
            "either softmax or both logits_max and sum_exp_logits are needed",
        )
        assert logits_max is not None  # for the type checker; checked above
        assert sum_exp_logits is not None
        logits = (rows @ wide.t()).to(x.dtype).float()
        softmax = (logits - logits_max.unsqueeze(1)).exp() / sum_exp_logits.unsqueeze(1)
    present = (~_unpack(target_mask, x.shape[0])).float()
    difference = softmax.float().clone()
    difference.scatter_add_(1, masked_target.long().unsqueeze(1), -present.unsqueeze(1))
    difference = difference * grad.float().unsqueeze(1)
    return (difference @ wide).to(x.dtype), (difference.t() @ rows).to(x.dtype)

"""Cross entropy: the fused log-softmax and negative log-likelihood, with its backward operator."""

from __future__ import annotations

import torch

from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

_NAME = "npu_cross_entropy_loss"
_MAX_ROWS = 200000


@register_reference(f"npu::{_NAME}")
def npu_cross_entropy_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and log-probabilities [N, C] for backward; the two z-loss results are empty, as the device leaves them."""
    need_dtype(_NAME, "input", logits, FLOATS)
    need(logits.dim() == 2, _NAME, f"input has {logits.dim()} dimensions, [N, C] is needed")
    rows, classes = logits.shape
    need(
        rows <= _MAX_ROWS and classes > 0, _NAME, f"input {tuple(logits.shape)}: N is at most {_MAX_ROWS}, C at least 1"
    )
    need(
        target.dtype == torch.int64 and target.shape == (rows,),
        _NAME,
        f"target must be int64 [{rows}], got {target.dtype} {tuple(target.shape)}",
    )
    need(reduction in ("mean", "sum", "none"), _NAME, f"reduction={reduction!r} is not one of mean, sum, none")
    need(ignore_index < classes, _NAME, f"ignore_index={ignore_index} must be below C={classes}")
    need(0.0 <= label_smoothing < 1.0, _NAME, f"label_smoothing={label_smoothing} must be in [0, 1)")
    need(not return_zloss and not lse_square_scale_for_zloss, _NAME, "the z-loss is not enabled on the device")
    if weight is not None:
        need(weight.dtype == torch.float32 and weight.shape == (classes,), _NAME, f"weight must be float32 [{classes}]")
    used = target[target != ignore_index]
    if used.numel():
        low, high = int(used.min()), int(used.max())
        need(low >= 0 and high < classes, _NAME, f"target reaches from {low} to {high}; 0 to {classes - 1} are allowed")
    log_prob = torch.log_softmax(logits.float(), -1)
    loss = torch.nn.functional.nll_loss(log_prob, target, weight, ignore_index=ignore_index, reduction="none")
    if label_smoothing:
        scale = torch.ones(classes) if weight is None else weight
        smooth = -(log_prob * scale).sum(-1).masked_fill(target == ignore_index, 0.0) / classes
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    if reduction == "mean":
        loss = loss.sum().div(_row_weights(target, weight, ignore_index).sum()).view(1)
    elif reduction == "sum":
        loss = loss.sum().view(1)
    empty = logits.new_empty(0)
    return loss.to(logits.dtype), log_prob.to(logits.dtype), empty, empty.clone()


def _row_weights(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """What each row counts in the loss: its class's weight, nothing where it is ignored."""
    kept = target != ignore_index
    return kept.float() if weight is None else weight[target.clamp(min=0)] * kept


@register_reference(f"npu::{_NAME}_backward")
def npu_cross_entropy_loss_backward(
    grad_loss: torch.Tensor,
    log_prob: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    grad_zloss: torch.Tensor | None = None,
    lse_for_zloss: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
) -> torch.Tensor:
    """Gradient of the input: softmax minus the one-hot target, per row."""
    name = f"{_NAME}_backward"
    need(not label_smoothing, name, "label_smoothing has no gradient on the device")
    need(
        not (weight is not None and reduction == "mean"),
        name,
        "weight has no gradient on the device when reduction is mean",
    )
    rows = _row_weights(target, weight, ignore_index)
    scale = grad_loss.float() * rows
    if reduction == "mean":
        scale = scale / rows.sum()
    grad = log_prob.float().exp()
    grad.scatter_add_(1, target.clamp(min=0).unsqueeze(1), -torch.ones(len(target), 1))
    return (grad * scale.unsqueeze(1)).to(log_prob.dtype)

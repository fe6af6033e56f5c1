"""Optimiser steps that are one operator, `npu_apply_adam` and `npu_apply_adam_w`: they update their `out=` in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

_NAME = "npu_apply_adam_w"


@register_reference(f"npu::{_NAME}.out")
def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: torch.Tensor,
    max_grad_norm: torch.Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    out: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One AdamW step on `out = (parameter, first moment, second moment)`; the powers are those of the step before."""
    need(len(out) == 3, _NAME, f"out lists {len(out)} tensors; the parameter and its two moments are needed")
    parameter, first, second = out
    for name, tensor in (("grad", grad), ("var", parameter), ("m", first), ("v", second)):
        need_dtype(_NAME, name, tensor, FLOATS)
        need(
            tensor.dtype == parameter.dtype and tensor.shape == parameter.shape,
            _NAME,
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, var {parameter.dtype} {tuple(parameter.shape)}",
        )
    need(not amsgrad or max_grad_norm is not None, _NAME, "amsgrad=True needs max_grad_norm")
    gradient = -grad.float() if maximize else grad.float()
    mean = beta1 * first.float() + (1 - beta1) * gradient
    square = beta2 * second.float() + (1 - beta2) * gradient.square()
    largest = torch.maximum(max_grad_norm.float(), square) if amsgrad and max_grad_norm is not None else square
    mean_hat, square_hat = mean / (1 - beta1_power * beta1), largest / (1 - beta2_power * beta2)
    step = lr / (square_hat.sqrt() + epsilon) * mean_hat + lr * weight_decay * parameter.float()
    parameter.copy_(parameter.float() - step)
    first.copy_(mean)
    second.copy_(square)
    if amsgrad and max_grad_norm is not None:
        max_grad_norm.copy_(largest)
    return parameter, first, second


@register_reference("npu::npu_apply_adam.out")
def npu_apply_adam(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: torch.Tensor,
    use_locking: bool | None,
    use_nesterov: bool | None,
    *,
    out: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One Adam step on `out = (parameter, first moment, second moment)`; the powers are those of this step."""
    need(len(out) == 3, "npu_apply_adam", f"out lists {len(out)} tensors; the parameter and its two moments are needed")
    parameter, first, second = out
    gradient = grad.float()
    mean = beta1 * first.float() + (1 - beta1) * gradient
    square = beta2 * second.float() + (1 - beta2) * gradient.square()
    rate = lr * (1 - beta2_power) ** 0.5 / (1 - beta1_power)
    direction = beta1 * mean + (1 - beta1) * gradient if use_nesterov else mean
    parameter.copy_(parameter.float() - rate * direction / (square.sqrt() + epsilon))
    first.copy_(mean)
    second.copy_(square)
    return parameter, first, second

"""Gradients of aten operators for which torch_npu's autograd calls operators of its own.

Each is the CPU's own gradient of the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from npu_backend.virtual_npu.references.autograd import gradients
from npu_backend.virtual_npu.registry import register_reference

aten = torch.ops.aten


def _gradient(function: Callable[[torch.Tensor], Any], at: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return gradients(function, [at], grad)[0]


@register_reference("npu::npu_gather_backward")
def npu_gather_backward(
    grad: torch.Tensor, size: Sequence[int], dim: int, index: torch.Tensor, sparse_grad: bool
) -> torch.Tensor:
    """Gradient of gather: what was taken from a place is added there."""
    if not len(size):
        return grad.sum().reshape(())
    return grad.new_zeros(size).scatter_add_(dim, index, grad)


@register_reference("npu::repeat_interleave_backward_tensor")
@register_reference("npu::repeat_interleave_backward_int")
def repeat_interleave_backward(
    grad: torch.Tensor, x: torch.Tensor, repeats: int | torch.Tensor, dim: int | None = None
) -> torch.Tensor:
    """Gradient of repeat_interleave, repeats an integer or one per element."""
    return _gradient(lambda t: torch.repeat_interleave(t, repeats, dim), x, grad)


@register_reference("npu::l1_loss_backward")
def l1_loss_backward(grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int) -> torch.Tensor:
    """Gradient of l1_loss to its input."""
    return _gradient(lambda t: aten.l1_loss(t, target, reduction), x, grad)


@register_reference("npu::kl_div_backward")
def kl_div_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int = 1, *, log_target: bool = False
) -> torch.Tensor:
    """Gradient of kl_div to its input."""
    return _gradient(lambda t: aten.kl_div(t, target, reduction, log_target=log_target), x, grad)


@register_reference("npu::kl_div_target_backward")
def kl_div_target_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int = 1, *, log_target: bool = False
) -> torch.Tensor:
    """Gradient of kl_div to its target."""
    return _gradient(lambda t: aten.kl_div(x, t, reduction, log_target=log_target), target, grad)


@register_reference("npu::npu_binary_cross_entropy_with_logits_backward")
def binary_cross_entropy_with_logits_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    pos_weight: torch.Tensor | None,
    reduction: int,
) -> torch.Tensor:
    """Gradient of binary_cross_entropy_with_logits to its input."""
    return _gradient(lambda t: aten.binary_cross_entropy_with_logits(t, target, weight, pos_weight, reduction), x, grad)


@register_reference("npu::npu_renorm_backward")
def npu_renorm_backward(grad: torch.Tensor, x: torch.Tensor, p: float, dim: int, maxnorm: float) -> torch.Tensor:
    """Gradient of renorm."""
    return _gradient(lambda t: torch.renorm(t, p, dim, maxnorm), x, grad)


@register_reference("npu::fft_r2c_backward")
def fft_r2c_backward(
    grad: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool, last_dim_size: int
) -> torch.Tensor:
    """Gradient of a real-to-complex FFT. It is linear, so any point will do."""
    size = list(grad.shape)
    size[dim[-1]] = last_dim_size
    real = torch.zeros(size, dtype=grad.dtype.to_real())
    return _gradient(lambda t: aten._fft_r2c(t, dim, normalization, onesided), real, grad)


@register_reference("npu::fft_c2r_backward")
def fft_c2r_backward(grad: torch.Tensor, dim: Sequence[int], normalization: int) -> torch.Tensor:
    """Gradient of a complex-to-real FFT."""
    size = list(grad.shape)
    last = size[dim[-1]]
    size[dim[-1]] = last // 2 + 1
    spectrum = torch.zeros(size, dtype=grad.dtype.to_complex())
    return _gradient(lambda t: aten._fft_c2r(t, dim, normalization, last), spectrum, grad)


@register_reference("npu::stft_backward")
def stft_backward(grad: torch.Tensor, x: torch.Tensor, n_fft: int, *settings: Any) -> torch.Tensor:
    """Gradient of the short-time Fourier transform."""
    return _gradient(lambda t: aten.stft(t, n_fft, *settings), x, grad)

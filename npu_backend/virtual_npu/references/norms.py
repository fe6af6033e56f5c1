"""Norms of a sum: `add` and RMSNorm, `add` and layer norm."""

from __future__ import annotations

import torch

from npu_backend.virtual_npu.references.autograd import gradients
from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.references.dense import npu_rms_norm
from npu_backend.virtual_npu.registry import register_reference


def _check_pair(operator: str, x1: torch.Tensor, x2: torch.Tensor) -> None:
    need_dtype(operator, "x1", x1, FLOATS)
    need(
        x1.shape == x2.shape and x1.dtype == x2.dtype,
        operator,
        f"x1 {x1.dtype} {tuple(x1.shape)} and x2 {x2.dtype} {tuple(x2.shape)} must be alike",
    )


@register_reference("npu::npu_add_rms_norm")
def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm of `x1 + x2`, its reciprocal root, and the sum."""
    _check_pair("npu_add_rms_norm", x1, x2)
    total = (x1.float() + x2.float()).to(x1.dtype)
    y, rstd = npu_rms_norm(total, gamma, epsilon)
    return y, rstd, total


@register_reference("npu::npu_add_rms_norm_cast")
def npu_add_rms_norm_cast(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of half precision, with the result in float32 too."""
    need_dtype("npu_add_rms_norm_cast", "x1", x1, (torch.float16, torch.bfloat16))
    y, rstd, total = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return y.float(), y, rstd, total


@register_reference("npu::npu_add_rms_norm_v2")
def npu_add_rms_norm_v2(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    """In place: x1 becomes the norm, x2 the sum; returns the reciprocal root."""
    y, rstd, total = npu_add_rms_norm(x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(total)
    return rstd


def _layer_norm(total: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.nn.functional.layer_norm(total, gamma.shape, gamma, beta, epsilon)


def _check_layer_norm(operator: str, x: torch.Tensor, gamma: torch.Tensor) -> None:
    need_dtype(operator, "gamma", gamma, FLOATS)
    trailing = tuple(x.shape[x.dim() - gamma.dim() :])
    need(
        1 <= gamma.dim() <= x.dim() and tuple(gamma.shape) == trailing,
        operator,
        f"gamma {tuple(gamma.shape)} must be the last sizes of x1 {tuple(x.shape)}",
    )


@register_reference("npu::npu_add_layer_norm")
def npu_add_layer_norm(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float = 1e-5,
    additional_output: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layer norm of `x1 + x2`, its mean and reciprocal deviation, and the sum (empty unless it is asked for)."""
    _check_pair("npu_add_layer_norm", x1, x2)
    _check_layer_norm("npu_add_layer_norm", x1, gamma)
    total = x1.float() + x2.float()
    dims = tuple(range(-gamma.dim(), 0))
    mean = total.mean(dims, keepdim=True)
    rstd = torch.rsqrt((total - mean).square().mean(dims, keepdim=True) + epsilon)
    y = ((total - mean) * rstd * gamma.float() + beta.float()).to(x1.dtype)
    return y, mean, rstd, total.to(x1.dtype) if additional_output else x1.new_empty(0)


@register_reference("npu::npu_add_layer_norm_backward")
def npu_add_layer_norm_backward(
    dy: torch.Tensor | None,
    x1: torch.Tensor,
    x2: torch.Tensor,
    rstd: torch.Tensor,
    mean: torch.Tensor,
    gamma: torch.Tensor,
    dsum: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x1, x2 (alike), gamma and beta; `dsum` is the gradient that arrived at the sum itself."""
    total = x1.float() + x2.float()
    dims = tuple(range(-gamma.dim(), 0))
    normalised = (total - mean) * rstd
    upstream = torch.zeros_like(total) if dy is None else dy.float()
    scaled = upstream * gamma.float()
    centred = scaled - scaled.mean(dims, keepdim=True)
    dx = rstd * (centred - normalised * (scaled * normalised).mean(dims, keepdim=True))
    if dsum is not None and dsum.numel():
        dx = dx + dsum.float()
    dx = dx.to(x1.dtype)
    dgamma, dbeta = (upstream * normalised).sum_to_size(gamma.shape), upstream.sum_to_size(gamma.shape)
    return dx, dx.clone(), dgamma, dbeta


@register_reference("npu::npu_layer_norm_eval")
def npu_layer_norm_eval(
    x: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Layer norm without what backward would need."""
    need_dtype("npu_layer_norm_eval", "input", x, FLOATS)
    return torch.nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)


@register_reference("npu::npu_gemma_rms_norm")
def npu_gemma_rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm whose weight is `1 + gamma`."""
    _, rstd = npu_rms_norm(x, gamma, epsilon)
    return (x.float() * rstd * (1 + gamma.float())).to(x.dtype), rstd


@register_reference("npu::npu_layernorm_grad")
def npu_layernorm_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: list[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of layer norm to its input, weight and bias; mean and rstd are computed anew."""
    gamma = torch.ones(normalized_shape) if weight is None else weight.float()
    beta = torch.zeros(normalized_shape) if bias is None else bias.float()
    dx, dgamma, dbeta = gradients(lambda a, g, b: _layer_norm(a, g, b, 1e-5), [x.float(), gamma, beta], grad.float())
    return dx.to(x.dtype), dgamma.to(x.dtype), dbeta.to(x.dtype)

"""Operators of Ascend-only model code that torch has under another name: shapes, products, extremes, one-hot, losses.

Megatron's and MMCV's ports call them (`npu_confusion_transpose`, `npu_linear`, `npu_bmmV2`, `npu_max`, ...).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_backend.virtual_npu.references.checks import FLOATS, need, need_dtype
from npu_backend.virtual_npu.registry import register_reference

# ---- transpose and reshape in one ----


def _check_permutation(name: str, perm: Sequence[int], dimensions: int) -> list[int]:
    need(sorted(perm) == list(range(dimensions)), name, f"perm={list(perm)} is no order of {dimensions} dimensions")
    return list(perm)


@register_reference("npu::npu_confusion_transpose")
def npu_confusion_transpose(
    x: torch.Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool
) -> torch.Tensor:
    """Transpose, then reshape; or the other way round."""
    name = "npu_confusion_transpose"
    if transpose_first:
        return x.permute(_check_permutation(name, perm, x.dim())).reshape(list(shape))
    return x.reshape(list(shape)).permute(_check_permutation(name, perm, len(shape)))


@register_reference("npu::npu_confusion_transpose_backward")
def npu_confusion_transpose_backward(
    grad: torch.Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool
) -> torch.Tensor:
    """Back to the input's shape, `shape`. torch_npu's formula says what comes first here, the opposite of forward's."""
    inverse = sorted(range(len(perm)), key=lambda i: perm[i])
    if transpose_first:
        return grad.permute(inverse).reshape(list(shape))
    return grad.reshape([shape[i] for i in perm]).permute(inverse)


@register_reference("npu::npu_transpose")
def npu_transpose(x: torch.Tensor, perm: Sequence[int], require_contiguous: bool = True) -> torch.Tensor:
    """`x.permute(perm)`, as a copy."""
    return x.permute(_check_permutation("npu_transpose", perm, x.dim())).contiguous()


@register_reference("npu::npu_reshape")
def npu_reshape(x: torch.Tensor, shape: Sequence[int], can_refresh: bool = False) -> torch.Tensor:
    """`x.reshape(shape)`, as a copy."""
    return x.reshape(list(shape)).clone()


@register_reference("npu::npu_one_hot")
def npu_one_hot(
    x: torch.Tensor, num_classes: int = -1, depth: int = 1, on_value: float = 1, off_value: float = 0
) -> torch.Tensor:
    """`on_value` at each index of `depth` places, `off_value` elsewhere, in float32."""
    need_dtype("npu_one_hot", "input", x, (torch.uint8, torch.int32, torch.int64))
    hot = x.unsqueeze(-1) == torch.arange(depth)
    return torch.where(hot, float(on_value), float(off_value))


# ---- products ----


@register_reference("npu::npu_linear")
def npu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight^T + bias` of matrices."""
    need(x.dim() == weight.dim() == 2, "npu_linear", f"{tuple(x.shape)} and {tuple(weight.shape)} must be matrices")
    return torch.nn.functional.linear(x, weight, bias)


@register_reference("npu::npu_linear_backward")
def npu_linear_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input and weight."""
    return grad @ weight, grad.t() @ x


@register_reference("npu::npu_bmmV2")
def npu_bmm_v2(a: torch.Tensor, b: torch.Tensor, output_sizes: Sequence[int]) -> torch.Tensor:
    """`a @ b`; where sizes are given, summed to them over what was broadcast."""
    product = a @ b
    return product.sum_to_size(list(output_sizes)) if len(output_sizes) else product


@register_reference("npu::npu_bmm_v2_mat1_backward")
def npu_bmm_v2_mat1_backward(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Gradient of the left factor."""
    return (grad @ b.transpose(-1, -2)).sum_to_size(list(size))


@register_reference("npu::npu_bmm_v2_mat2_backward")
def npu_bmm_v2_mat2_backward(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Gradient of the right factor."""
    return (a.transpose(-1, -2) @ grad).sum_to_size(list(size))


# ---- extremes along a dimension ----


@register_reference("npu::npu_max.dim")
def npu_max(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest values and where they are (int32)."""
    values, indices = x.max(dim, keepdim)
    return values, indices.to(torch.int32)


@register_reference("npu::npu_min.dim")
def npu_min(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest values and where they are (int32)."""
    values, indices = x.min(dim, keepdim)
    return values, indices.to(torch.int32)


@register_reference("npu::npu_max_backward")
@register_reference("npu::npu_min_backward")
def extreme_backward(
    grad: torch.Tensor, dim: int, indices: torch.Tensor, sizes: Sequence[int], keepdim: bool
) -> torch.Tensor:
    """The gradient goes to the place that was taken."""
    if not keepdim:
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    return grad.new_zeros(list(sizes)).scatter_(dim, indices.long(), grad)


# ---- soft targets ----


@register_reference("npu::npu_softmax_cross_entropy_with_logits")
def npu_softmax_cross_entropy_with_logits(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`-sum(labels * log_softmax(x))` of each row of [N, C]."""
    name = "npu_softmax_cross_entropy_with_logits"
    need_dtype(name, "features", x, FLOATS)
    alike = x.dim() == 2 and x.shape == labels.shape and x.dtype == labels.dtype
    need(alike, name, f"features {tuple(x.shape)} and labels {tuple(labels.shape)} must be alike, [N, C]")
    return -(labels.float() * torch.log_softmax(x.float(), -1)).sum(-1).to(x.dtype)


@register_reference("npu::npu_softmax_cross_entropy_with_logits_backward")
def npu_softmax_cross_entropy_with_logits_backward(
    grad: torch.Tensor, x: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Gradient of the features."""
    wide = labels.float()
    whole = torch.softmax(x.float(), -1) * wide.sum(-1, keepdim=True) - wide
    return (grad.float().unsqueeze(-1) * whole).to(x.dtype)


# ---- overflow flags of older chips: nothing overflows here unnoticed, results hold inf or nan ----


@register_reference("npu::npu_alloc_float_status")
@register_reference("npu::npu_get_float_status")
@register_reference("npu::npu_clear_float_status")
def float_status(x: torch.Tensor, mode: int = 0) -> torch.Tensor:
    """Eight zeros: no overflow was flagged."""
    return torch.zeros(8)

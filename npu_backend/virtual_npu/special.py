"""Operators that cannot go through the boxed function: copies between devices, and what only torch_npu has in aten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from npu_backend.virtual_npu.devices import check_one_device
from npu_backend.virtual_npu.memory import alias, to_device


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    alias(target).copy_(alias(source))
    return target


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy(target, source)


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _copy(target.resize_(source.shape), source)


_FORMATS = (None, torch.preserve_format, torch.contiguous_format)


def _clone(tensor: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """torch_npu has no channels_last: its clone ignores that format, and `_to_copy` refuses it."""
    values = alias(tensor)
    format_ = torch.contiguous_format if memory_format not in _FORMATS else memory_format or torch.preserve_format
    return _copy(torch.empty_like(values, device=tensor.device, memory_format=format_), values)


def _to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    if memory_format not in _FORMATS:
        raise RuntimeError("Only contiguous_format or preserve_format is supported.")  # torch_npu's words
    values, format_ = alias(tensor), memory_format or torch.preserve_format
    target = device or tensor.device
    new = torch.empty_like(values, dtype=dtype, device=target, pin_memory=bool(pin_memory), memory_format=format_)
    return _copy(new, values)


def _item(tensor: torch.Tensor) -> Any:
    return alias(tensor).item()


def _histc(tensor: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """The device counts integers too; the CPU's kernel takes floating point only."""
    values = alias(tensor)
    wide = values if values.is_floating_point() else values.double()
    return to_device(torch.histc(wide, bins, min, max).to(values.dtype), tensor.device)


def _matmul_backward(
    grad: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `a @ b` with broadcasting; torch itself has no such operator."""
    if grad is None:  # nothing flows back
        return None, None
    g, x, y = alias(grad), alias(a), alias(b)
    if x.dim() == 1:  # a row
        x, g = x.unsqueeze(0), g.unsqueeze(-2 if y.dim() > 1 else -1)
    if y.dim() == 1:  # a column
        y, g = y.unsqueeze(1), g.unsqueeze(-1)
    rows = x
    if y.dim() == 2:  # one matrix for the whole batch: fold the batch into rows, so that nothing is summed afterwards
        g, rows = g.flatten(0, -2), x.flatten(0, -2)
    grad_a = (g @ y.mH).sum_to_size(rows.shape).reshape(a.shape) if mask[0] else None
    grad_b = (rows.mH @ g).sum_to_size(y.shape).reshape(b.shape) if mask[1] else None
    return (
        None if grad_a is None else to_device(grad_a, a.device),
        None if grad_b is None else to_device(grad_b, a.device),
    )


def _in_dtype(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`mm(a, b, out_dtype)` and its like: operands in half precision, the product in a wider dtype."""

    def product(*operands: Any, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        *tensors, dtype = operands
        check_one_device(f"aten::{function.__name__}.dtype", tensors[0].device, tensors)
        scales = {"beta": beta, "alpha": alpha} if len(tensors) == 3 else {}
        return to_device(function(*(alias(t).to(dtype) for t in tensors), **scales), tensors[0].device)

    return product


# Codes of c10::ScalarType, by which npu_dtype_cast names a dtype.
_DTYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip


def _dtype_cast(tensor: torch.Tensor, dtype: torch.dtype | int, *ignored: Any) -> torch.Tensor:
    """A cast and its backward; called by torch_npu's own autocast helpers."""
    return _to_copy(tensor, dtype=_DTYPES[dtype] if isinstance(dtype, int) else dtype)


def _dtype_cast_(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """In place: the tensor gets the other one's dtype."""
    tensor.data = _to_copy(tensor, dtype=like.dtype)
    return tensor


def _format_cast(tensor: torch.Tensor, *ignored: Any, **also_ignored: Any) -> torch.Tensor:
    """Memory formats other than the plain one do not exist here, so a cast to one changes nothing."""
    return tensor


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::copy_": _copy,
    "aten::_copy_from": _copy_from,
    "aten::_copy_from_and_resize": _copy_from_and_resize,
    "aten::clone": _clone,
    "aten::_to_copy": _to_copy,
    "aten::_local_scalar_dense": _item,
    "aten::histc": _histc,
    "aten::matmul_backward": _matmul_backward,
    "npu::npu_dtype_cast": _dtype_cast,
    "npu::npu_dtype_cast_backward": _dtype_cast,
    "npu::_npu_dtype_cast": _dtype_cast,
    "npu::_npu_dtype_cast_backward": _dtype_cast,
    "npu::npu_dtype_cast_": _dtype_cast_,
    "npu::npu_format_cast": _format_cast,
    "npu::npu_format_cast.Tensor": _format_cast,
    "npu::npu_format_cast_": _format_cast,
    "npu::npu_format_cast_.acl_format": _format_cast,
    "npu::_npu_format_cast": _format_cast,
    "npu::_npu_format_cast.aclnn": _format_cast,
    "npu::_npu_format_cast.input_dtype": _format_cast,
    "aten::mm.dtype": _in_dtype(torch.mm),
    "aten::bmm.dtype": _in_dtype(torch.bmm),
    "aten::addmm.dtype": _in_dtype(torch.addmm),
    "aten::baddbmm.dtype": _in_dtype(torch.baddbmm),
}

"""A CPU tensor on the memory of a device tensor, and a device tensor with the values of a CPU one.

Device memory is host memory, so an operator can run on the CPU in place. Making one tensor per operand has to be
cheap: one CPU tensor per dtype spans the whole address space (it is never read as such), and an operand is a strided
view of it at the right address. Such a view must not be resized, which is why `out=` operands get memory of their own
(fallback.py).
"""

from __future__ import annotations

import ctypes

import torch

_FIRST, _END = 1 << 16, 1 << 47  # user-space addresses; the first page is never mapped
_SMALL = 1 << 16  # bytes up to which a plain memmove beats torch's copy_
_whole: dict[tuple[torch.dtype, int], torch.Tensor] = {}


def _address_space(dtype: torch.dtype, shift: int) -> torch.Tensor:
    """All elements whose address is `shift` bytes past a multiple of their size: not 0 in a slice of a storage."""
    if (dtype, shift) not in _whole:
        buffer = (ctypes.c_char * (_END - _FIRST - (dtype.itemsize if shift else 0))).from_address(_FIRST + shift)
        with torch._C.DisableTorchFunction(), torch.inference_mode(False):
            _whole[dtype, shift] = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype)
    return _whole[dtype, shift]


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor on the same memory: same sizes, strides, dtype, conjugation. Other tensors pass through."""
    if tensor.device.type != "npu":
        return tensor
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    offset, shift = divmod(tensor.data_ptr() - _FIRST, tensor.itemsize)
    view = _address_space(tensor.dtype, shift).as_strided(tensor.size(), tensor.stride(), offset)
    if tensor.is_conj():
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on `device` with the values, and where they are dense the strides, of a CPU tensor."""
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"the virtual NPU has no tensors of layout {tensor.layout}")
    new = torch.empty_like(tensor, device=device)
    fill(new, tensor)
    return new


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a CPU tensor into a device tensor of the same sizes."""
    size = source.numel() * source.itemsize
    plain = not (source.is_conj() or source.is_neg() or target.is_neg() or target.is_conj())
    same = plain and source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()
    if same and size <= _SMALL:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
    else:
        alias(target).copy_(source)

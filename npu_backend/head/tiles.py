"""Tiles of logits in memory, and the products that make and use them."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGN = 256  # columns; a tile of the fused kernel, and wide enough for every load


def multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """out = a b, or out += a b, accumulated in float32 and rounded once where the library can."""
    if out.dtype == a.dtype and not add:
        torch.mm(a, b, out=out)
    elif out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out)
    elif out.dtype == torch.float32 and a.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out"):
        if add:
            torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, out=out)
        else:
            torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
    else:  # an older torch, or Triton's interpreter on the CPU
        product = torch.mm(a, b) if a.is_cuda else torch.mm(a.float(), b.float())
        out.add_(product) if add else out.copy_(product)


def product_dtype(x: Tensor) -> torch.dtype:
    """Of the logits that a library GEMM writes: float32 wherever it can, whatever it multiplies."""
    return torch.float32 if not x.is_cuda or hasattr(torch.ops.aten.mm, "dtype_out") else x.dtype


def kept_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """Of kept scores: as large as the compute dtype, since their gradient takes their place."""
    return torch.float16 if compute_dtype.itemsize == 2 else compute_dtype


def padded_columns(columns: int) -> int:
    """The row stride of a tile: rows begin at multiples of `ALIGN` elements."""
    return -(-columns // ALIGN) * ALIGN


def new_tile(x: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised [M, columns]."""
    return torch.empty(x.shape[0], padded_columns(columns), dtype=dtype, device=x.device)[:, :columns]


def whole_tile(tile: Tensor) -> Tensor:
    """What `new_tile` took a view of."""
    return tile.as_strided((tile.shape[0], tile.stride(0)), tile.stride())

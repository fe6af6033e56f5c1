"""An `npu::` operator on the virtual NPU (arithmetic by the CPU) against the formula that it stands for, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from references import assert_close_to
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device="npu")


def compare(
    call: Callable[..., Tensor], formula: Callable[..., Tensor], tensors: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Output and gradients of `call` on the device, as near to `formula` in float64 as the formula in this dtype is."""

    def run(function: Callable[..., Tensor], device: str, kind: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).to(device, kind).requires_grad_() for t in tensors.values()]
        out = function(*leaves)
        upstream = normal(*out.shape, seed=5).to(out.device, out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    exact, eager = run(formula, "cpu", torch.float64), run(formula, "cpu", dtype)
    for name, mine, peer, wanted in zip(["output", *tensors], run(call, "npu", dtype), eager, exact):
        assert mine.dtype == dtype, name
        assert_close_to(mine.cpu(), wanted, peer, what=name)

"""Add one on the NPU with a Triton kernel. Run as a process of its own by probe.py; doctor never imports it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one_kernel(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n) + 1, mask=offsets < n)


def check(device: str) -> None:
    """Run the kernel on 100 zeros.

    Raises:
        SystemExit: the result is wrong. Whatever else the driver or the compiler raises comes through.
    """
    given = torch.zeros(100, device=device)
    result = torch.empty_like(given)
    _add_one_kernel[(1,)](given, result, given.numel(), BLOCK=128)
    if not bool((result == 1).all()):
        raise SystemExit("a Triton kernel that adds 1 to 0 does not give 1")


if __name__ == "__main__":
    import torch_npu  # noqa: F401

    check("npu")

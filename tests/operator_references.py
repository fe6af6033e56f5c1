"""What the operators must compute, in float64, and how a result is compared with it: forward and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from references import assert_close_to
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PAIRS = [(a, b) for a in DTYPES for b in DTYPES]

Function = Callable[..., "Tensor | tuple[Tensor, ...]"]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers that are the same in every dtype up to rounding."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def offset_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return rms_norm(x, 1 + weight, eps)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float = 1e-6) -> Tensor:
    return rms_norm(x, weight, eps) * torch.nn.functional.silu(gate)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, N, S, D]; cos, sin [B, 1, S, d] with d <= D."""
    turning, passing = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = turning.chunk(2, -1)
    return torch.cat((turning * cos + torch.cat((-b, a), -1) * sin, passing), -1)


def experts(x: Tensor, index: Tensor, probs: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [T, H], index and probs [T, k], gate_up [E, 2I, H], down [E, H, I]: token by token."""
    rows = []
    for t in range(x.shape[0]):
        parts = []
        for e, p in zip(index[t].tolist(), probs[t]):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            parts.append(p * (down[e] @ (torch.nn.functional.silu(gate) * up)))
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


def run(function: Function, inputs: Mapping[str, Tensor], device: str = "cpu") -> dict[str, Tensor]:
    """Outputs of `function(**inputs)` and the gradients of its floating-point inputs, all on the CPU, by name.

    Inputs are fresh leaves with the strides of what was given; the upstream gradients are random, the same each time.
    """
    leaves = {name: _leaf(value, device) for name, value in inputs.items()}
    outputs = function(**leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    upstream = [normal(*out.shape, seed=99 + i).to(out.device, out.dtype) for i, out in enumerate(outputs)]
    grads = torch.autograd.grad(outputs, list(wanted.values()), upstream, allow_unused=True)
    got = {f"output {i}": out.detach().cpu() for i, out in enumerate(outputs)}
    return got | {f"grad {name}": grad.detach().cpu() for name, grad in zip(wanted, grads) if grad is not None}


def _leaf(value: Tensor, device: str) -> Tensor:
    leaf = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return leaf.copy_(value).requires_grad_(value.is_floating_point())


def double(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def assert_parity(
    patched: Function, original: Function, reference: Function, inputs: Mapping[str, Tensor], *, device: str = "cpu"
) -> dict[str, Tensor]:
    """Shapes and dtypes of the original; outputs and gradients as near to float64 as its own. Returns what it got."""
    got, eager, exact = run(patched, inputs, device), run(original, inputs), run(reference, double(inputs))
    assert got.keys() == eager.keys()
    for name, value in got.items():
        expected = eager[name]
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), f"{name}, as the original gives it"
        # one rounding of the narrowest dtype that the value went through on its way
        passed = [t.dtype for t in (*inputs.values(), value) if t.is_floating_point()]
        narrowest = max(passed, key=lambda dtype: torch.finfo(dtype).eps)
        assert_close_to(value, exact[name], expected, what=name, out_dtype=narrowest)
    return got

"""RMSNorm through `torch_npu.npu_rms_norm`.

Replaces the forward of three kinds of norm: plain (`weight * normalised`), offset (`(1 + weight) * normalised`, Gemma
and Qwen3-Next) and gated (plain, times SiLU of a gate). The operator wants input and gamma in one dtype and computes in
float32; transformers lets the two differ, with a rule for the result's dtype in each kind, kept in all nine pairs:

    plain, gated   both are widened to what they promote to; plain returns that, gated returns the input's dtype
    offset         float32, as transformers does it: `1 + weight` rounded to bfloat16 would lose every |weight| < 0.002

Goes to the original: no weight, one or more than eight dimensions, a weight that is not the last axis, and what
`checks.why_not` and `sharded.why_not_rows` name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_backend.operators import checks, counters, sharded

OP = "rms_norm"


def requires(original: Any, context: Any) -> str | None:
    """Why no norm can be replaced on this host."""
    return checks.lacks("npu_rms_norm")


def plain(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for norms that multiply by `weight` and keep their epsilon in `variance_epsilon`."""

    def run(self: Any, x: Tensor) -> Tensor:
        reason = _why_not(x, self.weight)
        if reason:
            counters.fell_back(OP, reason)
            return original(self, x)
        return rms_norm(x, self.weight, self.variance_epsilon)

    return checks.one_input(original, run)


def offset(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for norms that multiply by `1 + weight` and keep their epsilon in `eps`."""

    def run(self: Any, x: Tensor) -> Tensor:
        reason = _why_not(x, self.weight)
        if reason:
            counters.fell_back(OP, reason)
            return original(self, x)
        return rms_norm(x.float(), 1.0 + self.weight.float(), self.eps).to(x.dtype)

    return checks.one_input(original, run)


def gated(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for plain norms whose result is multiplied by SiLU of a gate, in float32."""

    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        reason = "no gate" if gate is None else _why_not(hidden_states, self.weight)
        if gate is None or reason:
            counters.fell_back(OP, reason or "")
            return original(self, hidden_states, gate)
        normalised = rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return (normalised * F.silu(gate.to(torch.float32))).to(hidden_states.dtype)

    return forward


def _why_not(x: Tensor, weight: Tensor | None) -> str | None:
    if weight is None:
        return "no weight"
    if not 2 <= x.dim() <= 8:
        return f"{x.dim()} dimensions"
    if weight.shape != x.shape[-1:]:
        return "a weight that is not the last axis"
    return checks.why_not(x, weight) or sharded.why_not_rows(x, weight)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`x / sqrt(mean(x^2) + epsilon) * weight` over the last axis.

    Args:
        x: [..., H], float16, bfloat16 or float32; a DTensor with whole rows is computed shard by shard.
        weight: [H], any of these dtypes.
        epsilon: added to the mean square.

    Returns:
        The shape of `x`, in the dtype that `x` and `weight` promote to.
    """
    counters.ran(OP)
    compute = functools.partial(_call, epsilon=epsilon)
    return sharded.on_rows(compute, x, weight) if checks.is_dtensor(x) else compute(x, weight)


def _call(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if x.numel() == 0:  # one rank's shard may hold no row
        return rms_norm_reference(x, weight, epsilon)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    torch_npu = importlib.import_module("torch_npu")
    result: Tensor = torch_npu.npu_rms_norm(x.to(dtype).contiguous(), weight.to(dtype).contiguous(), epsilon=epsilon)[0]
    return result


def rms_norm_reference(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The same in plain torch, as transformers writes it: float32 up to the weight, which scales the rounded values."""
    wide = x if x.dtype == torch.float64 else x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * normalised.to(x.dtype)

"""RMSNorm through `torch_npu.npu_rms_norm`.

Replaces the forward of every norm that `npu_backend.recognise` knows. The operator wants input and gamma in one dtype
and computes in float32; transformers lets the two differ, and its norms differ in when they round. Each rule is kept:

    plain          input and weight widened to what they promote to, which the result has
    rounded_last   float32 with the weight, then the input's dtype (OLMo 2, GPT-OSS)
    offset         the same with `1 + weight` (Gemma, Qwen3-Next): `1 + weight` rounded to bfloat16 would lose every
                   |weight| < 0.002
    weightless     the same without a weight; `scaled` asks the module whether it has one (Gemma 3n and 4)
    gated          plain, times SiLU of a gate; `gated_input` has the gate before the norm (Mamba 2)

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
    """Why this norm cannot be replaced on this host."""
    return checks.lacks("npu_rms_norm") or checks.unlike(original, *checks.ONE_INPUT, ("self", "hidden_states", "gate"))


Compute = Callable[[Tensor, Any, float], Tensor]  # x, weight or None, epsilon


def plain(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for norms that multiply by `weight` and keep their epsilon in `variance_epsilon`."""
    return _norm(original, rms_norm, "variance_epsilon")


def plain_eps(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """The same with the epsilon in `eps`."""
    return _norm(original, rms_norm, "eps")


def rounded_last(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for norms that multiply by `weight` before they round; epsilon in `variance_epsilon`."""
    return _norm(original, _rounded_last, "variance_epsilon")


def rounded_last_eps(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """The same with the epsilon in `eps`."""
    return _norm(original, _rounded_last, "eps")


def offset(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for norms that multiply by `1 + weight` and keep their epsilon in `eps`."""
    return _norm(original, lambda x, weight, epsilon: _rounded_last(x, 1.0 + weight.float(), epsilon), "eps")


def weightless(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for norms without a weight, epsilon in `eps`."""
    return _norm(original, _rounded_last, "eps", weight=_ones)


def scaled(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for norms that have a weight if `with_scale` says so, epsilon in `eps`."""
    return _norm(
        original, _rounded_last, "eps", weight=lambda self, x: self.weight if self.with_scale else _ones(self, x)
    )


def _rounded_last(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return rms_norm(x.float(), weight.float(), epsilon).to(x.dtype)


def _ones(self: Any, x: Tensor) -> Tensor:
    return x.new_ones(x.shape[-1:], dtype=torch.float32)


def _norm(
    original: Callable[..., Tensor],
    compute: Compute,
    epsilon: str,
    weight: Callable[[Any, Tensor], Any] = lambda self, x: self.weight,
) -> Callable[..., Tensor]:
    """A forward that computes what it may and leaves the rest to the original."""

    def run(self: Any, x: Tensor) -> Tensor:
        gamma = weight(self, x)
        reason = _why_not(x, gamma)
        if reason:
            counters.fell_back(OP, reason)
            return original(self, x)
        return compute(x, gamma, getattr(self, epsilon))

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


def gated_input(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for plain norms of an input that is multiplied by SiLU of a gate first, in float32."""

    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        reason = _why_not(hidden_states, self.weight) or (None if gate is None else checks.why_not(gate))
        if reason:
            counters.fell_back(OP, reason)
            return original(self, hidden_states, gate)
        wide = hidden_states.float()
        if gate is not None:
            wide = wide * F.silu(gate.float())
        result = rms_norm(wide, self.weight.float(), self.variance_epsilon)
        return result.to(torch.promote_types(hidden_states.dtype, self.weight.dtype))

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

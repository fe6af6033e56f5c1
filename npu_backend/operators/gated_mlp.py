"""SwiGLU MLP through `torch_npu.npu_swiglu`: `down(silu(gate(x)) * up(x))`.

Replaces the forward of MLPs with separate gate and up projections, and of Phi-3's, whose one projection holds both. The
projections stay module calls, so adapters, hooks and biases keep working; only the two elementwise kernels between them
become one. The activation is asked of every module: a GELU MLP (Gemma) is never computed as SwiGLU.

The operator wants one contiguous tensor with both halves in its last axis, of even size and not empty.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_backend.errors import OperatorInputError
from npu_backend.operators import checks, counters, sharded

OP = "gated_mlp"


def requires(original: Any, context: Any) -> str | None:
    """Why no MLP can be replaced on this host, or in this model."""
    return checks.lacks("npu_swiglu") or checks.not_silu(context.hf_config)


def split(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for MLPs with `gate_proj`, `up_proj`, `down_proj` and the activation `act_fn`."""

    def run(self: Any, x: Tensor) -> Tensor:
        reason = _why_not(x, self.act_fn)
        if reason:
            counters.fell_back(OP, reason)
            return original(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        reason = checks.why_not(gate, up) or sharded.why_not_elements(gate, up)
        if reason:  # the projections are done: only the product is left
            counters.fell_back(OP, reason)
            result: Tensor = self.down_proj(self.act_fn(gate) * up)
            return result
        counters.ran(OP)
        product = sharded.on_elements(_product, gate, up) if checks.is_dtensor(gate) else _product(gate, up)
        result = self.down_proj(product)
        return result

    return checks.one_input(original, run)


def fused(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for MLPs with `gate_up_proj` (gate first), `down_proj` and the activation `activation_fn`."""

    def run(self: Any, x: Tensor) -> Tensor:
        reason = _why_not(x, self.activation_fn) or ("a DTensor" if checks.is_dtensor(x) else None)
        if reason:
            counters.fell_back(OP, reason)
            return original(self, x)
        counters.ran(OP)
        result: Tensor = self.down_proj(swiglu(self.gate_up_proj(x)))
        return result

    return checks.one_input(original, run)


def _why_not(x: Tensor, activation: Any) -> str | None:
    if not checks.is_silu(activation):
        return f"activation {type(activation).__name__}"
    return checks.why_not(x)


def _product(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu(torch.cat((gate, up), -1))


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(first half) * second half` of the last axis.

    Args:
        gate_up: [..., 2 * I], float16, bfloat16 or float32, strided as it likes; may be empty.

    Returns:
        [..., I] in the same dtype.

    Raises:
        OperatorInputError: the last axis cannot be halved.
    """
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        size = gate_up.shape[-1] if gate_up.dim() else "no axis"
        raise OperatorInputError(
            f"swiglu splits the last axis into two halves, and its size is {size} (shape {list(gate_up.shape)}); "
            "pass the gate and up projections concatenated"
        )
    if gate_up.numel() == 0 or gate_up.dtype not in checks.DTYPES:
        return swiglu_reference(gate_up)
    result: Tensor = importlib.import_module("torch_npu").npu_swiglu(gate_up.contiguous(), dim=-1)
    return result


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """The same in plain torch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up

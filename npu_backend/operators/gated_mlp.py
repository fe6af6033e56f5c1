"""Gated MLP through `torch_npu.npu_swiglu` or `npu_geglu`: `down(act(gate(x)) * up(x))`.

Replaces the forward of MLPs with separate gate and up projections, and of those whose one projection holds both. The
projections stay module calls, so adapters, hooks and biases keep working; only the two elementwise kernels between them
become one. The activation is asked of every module: SiLU is computed by the one operator, GELU (exact, or by tanh) by
the other, and any other one by the original.

The operators want one contiguous tensor with both halves in its last axis, of even size and not empty.
"""

from __future__ import annotations

import functools
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
    """Why this MLP cannot be replaced on this host, or in this model."""
    missing = checks.lacks("npu_swiglu", "npu_geglu")
    return missing or checks.not_gated(context.hf_config) or checks.unlike(original, *checks.ONE_INPUT)


def split(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for MLPs with `gate_proj`, `up_proj`, `down_proj` and the activation `act_fn`."""
    return _split(original, "gate_proj", "up_proj", "down_proj", lambda self: self.act_fn)


def split_numbered(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for MLPs whose gate, up and down projections are `w1`, `w3` and `w2`, with SiLU."""
    return _split(original, "w1", "w3", "w2", lambda self: F.silu)


def fused(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for MLPs with `gate_up_proj` (gate first), `down_proj` and the activation `activation_fn`."""
    return _fused(original, "gate_up_proj", "down_proj", "activation_fn")


def fused_linear(original: Callable[..., Tensor], context: Any) -> Callable[..., Tensor]:
    """Factory for MLPs with `input_linear` (gate first), `output_linear` and the activation `activation`."""
    return _fused(original, "input_linear", "output_linear", "activation")


def _split(
    original: Callable[..., Tensor], gate_name: str, up_name: str, down_name: str, activation: Callable[[Any], Any]
) -> Callable[..., Tensor]:
    def run(self: Any, x: Tensor) -> Tensor:
        act_fn = activation(self)
        reason = _why_not(x, act_fn)
        if reason:
            counters.fell_back(OP, reason)
            return original(self, x)
        gate, up, down = getattr(self, gate_name)(x), getattr(self, up_name)(x), getattr(self, down_name)
        reason = checks.why_not(gate, up) or sharded.why_not_elements(gate, up)
        if reason:  # the projections are done: only the product is left
            counters.fell_back(OP, reason)
            result: Tensor = down(act_fn(gate) * up)
            return result
        counters.ran(OP)
        product = functools.partial(_product, kind=checks.gate_of(act_fn))
        result = down(sharded.on_elements(product, gate, up) if checks.is_dtensor(gate) else product(gate, up))
        return result

    return checks.one_input(original, run)


def _fused(original: Callable[..., Tensor], both_name: str, down_name: str, activation: str) -> Callable[..., Tensor]:
    def run(self: Any, x: Tensor) -> Tensor:
        act_fn = getattr(self, activation)
        reason = _why_not(x, act_fn) or ("a DTensor" if checks.is_dtensor(x) else None)
        if reason:
            counters.fell_back(OP, reason)
            return original(self, x)
        counters.ran(OP)
        result: Tensor = getattr(self, down_name)(_GATED[checks.gate_of(act_fn)](getattr(self, both_name)(x)))
        return result

    return checks.one_input(original, run)


def _why_not(x: Tensor, activation: Any) -> str | None:
    if checks.gate_of(activation) is None:
        return f"activation {type(activation).__name__}"
    return checks.why_not(x)


def _product(gate: Tensor, up: Tensor, *, kind: str | None) -> Tensor:
    return _GATED[kind](torch.cat((gate, up), -1))


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(first half) * second half` of the last axis.

    Args:
        gate_up: [..., 2 * I], float16, bfloat16 or float32, strided as it likes; may be empty.

    Returns:
        [..., I] in the same dtype.

    Raises:
        OperatorInputError: the last axis cannot be halved.
    """
    if not _computable("swiglu", gate_up):
        return swiglu_reference(gate_up)
    result: Tensor = importlib.import_module("torch_npu").npu_swiglu(gate_up.contiguous(), dim=-1)
    return result


def geglu(gate_up: Tensor, approximate: str = "none") -> Tensor:
    """`gelu(first half) * second half` of the last axis; arguments, result and errors as for `swiglu`.

    Args:
        gate_up: [..., 2 * I].
        approximate: "none" or "tanh", as for `torch.nn.functional.gelu`.
    """
    if not _computable("geglu", gate_up):
        return geglu_reference(gate_up, approximate)
    npu_geglu = importlib.import_module("torch_npu").npu_geglu
    result: Tensor = npu_geglu(gate_up.contiguous(), -1, int(approximate == "tanh"), True)[0]
    return result


# what `checks.gate_of` says -> the operator
_GATED: dict[str | None, Callable[[Tensor], Tensor]] = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": functools.partial(geglu, approximate="tanh"),
}


def _computable(name: str, gate_up: Tensor) -> bool:
    """Whether the operator takes this tensor; one that has no halves is an error."""
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        size = gate_up.shape[-1] if gate_up.dim() else "no axis"
        raise OperatorInputError(
            f"{name} splits the last axis into two halves, and its size is {size} (shape {list(gate_up.shape)}); "
            "pass the gate and up projections concatenated"
        )
    return gate_up.numel() > 0 and gate_up.dtype in checks.DTYPES


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """The same in plain torch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def geglu_reference(gate_up: Tensor, approximate: str = "none") -> Tensor:
    """The same in plain torch."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate=approximate) * up

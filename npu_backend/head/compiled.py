"""The tiled head as two operators, so that torch.compile has something it need not look into.

Compiled code knows all shapes beforehand: no row is left out, and only a `logits_cache_gib` that is a number keeps
scores. Backward leaves kept scores alone, as an operator without side effects must.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_backend.head import tiled, tiles


@torch.library.custom_op("npu_backend::tiled_head", mutates_args=(), device_types="cuda")
def tiled_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperatures: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
    dtype: torch.dtype,
    cache_columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs [N], entropy [N], and for backward the planes [2, N] and the kept scores, padded."""
    plan = _plan(hidden, weight, bias, dtype, logit_scale, softcap, temperature, cache_columns)
    found = tiled.forward(hidden, weight, bias, labels, temperatures, plan)
    cache = hidden.new_empty(0, dtype=plan.kept_dtype) if found.cache is None else tiles.whole_tile(found.cache)
    return found.log_probs, found.entropy, found.planes, cache


@torch.library.custom_op("npu_backend::tiled_head_backward", mutates_args=(), device_types="cuda")
def tiled_head_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    log_probs: Tensor,
    entropy: Tensor,
    planes: Tensor,
    cache: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    logit_scale: float,
    softcap: float | None,
    dtype: torch.dtype,
    cache_columns: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias (empty without one)."""
    plan = _plan(hidden, weight, bias, dtype, logit_scale, softcap, 1.0, cache_columns)
    kept = cache[:, :cache_columns] if cache_columns else None
    found = tiled.Found(None, log_probs, entropy, planes, kept)
    grads = tiled.backward(
        hidden, weight, bias, labels, found, (grad_log_probs, grad_entropy), (True, True, bias is not None), plan
    )
    return tuple(hidden.new_empty(0) if grad is None else grad for grad in grads)  # type: ignore[return-value]


@tiled_head.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    dtype, cache_columns = rest[-2:]
    rows = labels.shape[0]
    values = [hidden.new_empty(*shape, rows, dtype=torch.float32) for shape in ((), (), (2,))]
    shape = (rows, tiles.padded_columns(cache_columns)) if cache_columns else (0,)
    return (*values, hidden.new_empty(shape, dtype=tiles.kept_dtype(dtype)))


@tiled_head_backward.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape),
        torch.empty_like(weight),
        hidden.new_empty(0) if bias is None else bias.new_empty(bias.shape),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, labels, _, logit_scale, softcap, _, dtype, cache_columns = inputs
    ctx.save_for_backward(hidden, weight, bias, labels, *output)
    ctx.options = (logit_scale, softcap, dtype, cache_columns)


def _differentiate(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, *rest = ctx.saved_tensors
    grads = tiled_head_backward(hidden, weight, bias, *rest, grad_log_probs, grad_entropy, *ctx.options)
    return (grads[0], grads[1], None if bias is None else grads[2], *[None] * 7)


tiled_head.register_autograd(_differentiate, setup_context=_remember)


def _plan(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
    cache_columns: int,
) -> tiled.TilePlan:
    from npu_backend.head import rows_cuda, triton_cuda

    return tiled.TilePlan(
        kernels=rows_cuda,
        fused=triton_cuda.fused_kernels(weight, bias, dtype, logit_scale, softcap),
        compute_dtype=dtype,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
        calculate_entropy=True,
        cache_columns=cache_columns,
        tile_bytes=triton_cuda.TILE_BYTES,
        compact=False,
        consume=False,
    )

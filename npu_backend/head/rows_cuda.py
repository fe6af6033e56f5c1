"""The PPO head's row kernels in Triton: what is done to a tile of logits [M, C] on either side of the GEMM.

Scores are kept in units of log 2 and relative to the row's label: v_j = (z_j - z_label) / ln 2. That costs nothing and
has two uses. log2 p_j = v_j + log2 p_label, so backward needs no log-sum-exp; and a score stored in half precision is
finest near the label, where a sampled token says the probability is, instead of being as coarse as the largest logit.

Everything is accumulated in float32 relative to the largest score m of what is summed: S = sum 2^(v - m) and
T = sum 2^(v - m) (v - m), so that nothing large is subtracted from anything large. A part of the columns leaves
(m, S, T) in `partials`; `finish` merges the parts of a row.

Padded vocabulary entries (logits of -inf) contribute nothing; NaN stays NaN.

Letters: M rows, C columns of a tile, V vocabulary size, H hidden size. Tiles may have any row stride.
"""

# Triton reads the annotations of a kernel: no `from __future__ import annotations` here.
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

_LN_2 = tl.constexpr(LN_2)
# 2 to its power is 0, and 0 times it is 0: it stands for -inf where -inf would make 0 * inf = NaN.
_NEVER = tl.constexpr(-300.0)
_LOWEST = tl.constexpr(-1.0e30)
_NAN_STAYS = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _capped(logit, column_bias, logit_scale, softcap, SOFTCAP: tl.constexpr):
    u = (logit + column_bias) * logit_scale
    if SOFTCAP:
        u = softcap * (1.0 - 2.0 / (tl.exp(2.0 * u / softcap) + 1.0))
    return u


@triton.jit
def _label_scores(x_ptr, w_ptr, bias_ptr, labels_ptr, factor_ptr, out_ptr, x_stride, w_stride, H, logit_scale, softcap,
                  BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.maximum(tl.load(labels_ptr + row), 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + at, mask=at < H, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + label * w_stride + at, mask=at < H, other=0.0).to(tl.float32)
        total += x * w
    bias = tl.load(bias_ptr + label).to(tl.float32) if BIAS else 0.0
    u = _capped(tl.sum(total, 0), bias, logit_scale, softcap, SOFTCAP)
    tl.store(out_ptr + row, u * tl.load(factor_ptr + row))


@triton.jit
def _fold(m, s, t, v):
    """Fold scores v [K, L] into the running statistics of L lanes."""
    largest = tl.maximum(m, tl.max(v, 0))
    shifted = tl.maximum(v - largest[None, :], _NEVER, propagate_nan=_NAN_STAYS)
    weights = tl.exp2(shifted)
    moved = m - largest
    shrink = tl.exp2(moved)
    t = shrink * (t + s * moved) + tl.sum(weights * shifted, 0)
    s = shrink * s + tl.sum(weights, 0)
    return largest, s, t


@triton.jit
def _statistics(z_ptr, kept_ptr, bias_ptr, factor_ptr, base_ptr, partials_ptr, z_stride, kept_stride, plane, C, logit_scale,
                softcap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, KEEP: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr + row)
    base = tl.load(base_ptr + row)
    m = tl.full((LANES,), _LOWEST, tl.float32)
    s = tl.zeros((LANES,), tl.float32)
    t = tl.zeros((LANES,), tl.float32)
    block = tl.arange(0, 4)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = C // (4 * LANES) * (4 * LANES)
    for start in range(0, whole, 4 * LANES):  # no masks, so that loads stay wide whatever C is
        at = start + block
        logit = tl.load(z_ptr + row * z_stride + at).to(tl.float32)
        bias = tl.load(bias_ptr + at).to(tl.float32) if BIAS else 0.0
        v = _capped(logit, bias, logit_scale, softcap, SOFTCAP) * factor - base
        if KEEP:
            tl.store(kept_ptr + row * kept_stride + at, v.to(kept_ptr.dtype.element_ty))
        m, s, t = _fold(m, s, t, v)
    if whole < C:
        at = whole + block
        logit = tl.load(z_ptr + row * z_stride + at, mask=at < C, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + at, mask=at < C, other=0.0).to(tl.float32) if BIAS else 0.0
        v = _capped(logit, bias, logit_scale, softcap, SOFTCAP) * factor - base
        v = tl.where(at < C, v, -float("inf"))
        if KEEP:
            tl.store(kept_ptr + row * kept_stride + at, v.to(kept_ptr.dtype.element_ty), mask=at < C)
        m, s, t = _fold(m, s, t, v)
    largest = tl.max(m, 0)
    moved = m - largest
    shrink = tl.exp2(moved)
    tl.store(partials_ptr + row, largest)
    tl.store(partials_ptr + plane + row, tl.sum(s * shrink, 0))
    tl.store(partials_ptr + plane + plane + row, tl.sum(shrink * (t + s * moved), 0))


@triton.jit
def _finish(partials_ptr, log_probs_ptr, entropy_ptr, M, parts, plane, PARTS: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.full((ROWS,), _LOWEST, tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    t = tl.zeros((ROWS,), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        at = partials_ptr + part.to(tl.int64)[:, None] * M + rows[None, :]
        inside = (part < parts)[:, None] & (rows < M)[None, :]
        part_m = tl.load(at, mask=inside, other=_LOWEST)
        part_s = tl.load(at + plane, mask=inside, other=0.0)
        part_t = tl.load(at + plane + plane, mask=inside, other=0.0)
        largest = tl.maximum(m, tl.max(part_m, 0))
        moved = m - largest
        shrink = tl.exp2(moved)
        part_moved = part_m - largest[None, :]
        part_shrink = tl.exp2(part_moved)
        t = shrink * (t + s * moved) + tl.sum(part_shrink * (part_t + part_s * part_moved), 0)
        s = shrink * s + tl.sum(part_shrink * part_s, 0)
        m = largest
    log_total = tl.log2(s)
    # A log-prob is never positive; rounding of the label's own term could make it so by its last bit.
    log_probs = tl.minimum((m + log_total) * -_LN_2, 0.0, propagate_nan=_NAN_STAYS)
    tl.store(log_probs_ptr + rows, log_probs, mask=rows < M)
    tl.store(entropy_ptr + rows, (log_total - t / s) * _LN_2, mask=rows < M)


@triton.jit
def _gradient(source_ptr, target_ptr, bias_ptr, rows_ptr, factor_ptr, shift_ptr, constant_ptr, slope_ptr, base_ptr, source_stride,
              target_stride, C, logit_scale, softcap, GATHER: tl.constexpr, SCORES: tl.constexpr, BIAS: tl.constexpr,
              SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = row
    if GATHER:
        source = tl.load(rows_ptr + row).to(tl.int64)
    factor = tl.load(factor_ptr + row)
    shift = tl.load(shift_ptr + row)
    constant = tl.load(constant_ptr + row)
    slope = tl.load(slope_ptr + row)
    base = tl.load(base_ptr + row)
    start = tl.program_id(1) * BLOCK
    at = start + tl.arange(0, BLOCK)
    value = tl.load(source_ptr + source * source_stride + at, mask=at < C, other=0.0).to(tl.float32)
    if SCORES:
        v = value
    else:
        bias = tl.load(bias_ptr + at, mask=at < C, other=0.0).to(tl.float32) if BIAS else 0.0
        v = _capped(value, bias, logit_scale, softcap, SOFTCAP) * factor - base
    log_p = tl.maximum(v + shift, _NEVER, propagate_nan=_NAN_STAYS)
    gradient = tl.exp2(log_p) * (constant + slope * log_p)
    if SOFTCAP:
        saturation = (v + base) / (factor * softcap)
        gradient *= 1.0 - saturation * saturation
    tl.store(target_ptr + row * target_stride + at, gradient.to(target_ptr.dtype.element_ty), mask=at < C)


@triton.jit
def _label_gradient(target_ptr, labels_ptr, at_label_ptr, target_stride, first, M, C, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.load(labels_ptr + rows, mask=rows < M, other=-1) - first
    gradient = tl.load(at_label_ptr + rows, mask=rows < M, other=0.0)
    at = target_ptr + rows.to(tl.int64) * target_stride + column
    tl.store(at, gradient.to(target_ptr.dtype.element_ty), mask=(column >= 0) & (column < C) & (rows < M))


def label_scores(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, factor: Tensor, logit_scale: float, softcap: float | None
) -> Tensor:
    """The label's score in units of log 2 [M] float32, from one dot product a row. Negative labels give any number.

    Args:
        x: [M, H].
        weight: [V, H].
        bias: [V] or None.
        labels: [M] int64.
        factor: [M] float32: from a capped logit to a score in units of log 2.
        logit_scale: see `ScoreTransform`; so is softcap.
    """
    rows, width = x.shape
    scores = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    _label_scores[(rows,)](
        x, weight, bias, labels, factor, scores, x.stride(0), weight.stride(0), width, logit_scale, softcap or 1.0,
        BIAS=bias is not None, SOFTCAP=softcap is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return scores


def statistics(
    logits: Tensor, kept: Tensor | None, bias: Tensor | None, factor: Tensor, base: Tensor, partials: Tensor,
    logit_scale: float, softcap: float | None,
) -> None:  # fmt: skip
    """Leave (m, S, T) of each row of `logits` [M, C] in `partials` [3, 1, M], and the scores in `kept` [M, C].

    Args:
        logits: as the GEMM wrote them, float32 where the GEMM can.
        kept: None where nobody keeps them.
        bias: [C], this tile's part, or None.
        factor: [M]; base: [M], what `label_scores` gave.
        partials: a view of all parts' statistics.
        logit_scale: see `ScoreTransform`; so is softcap.
    """
    rows, columns = logits.shape
    _statistics[(rows,)](
        logits, kept, bias, factor, base, partials, logits.stride(0), 0 if kept is None else kept.stride(0),
        partials.stride(0), columns, logit_scale, softcap or 1.0,
        BIAS=bias is not None, SOFTCAP=softcap is not None, KEEP=kept is not None, LANES=1024, num_warps=8,
    )  # fmt: skip


def finish(partials: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partials [3, parts, M] into log-probs and entropy, [M] float32 each."""
    _, parts, rows = partials.shape
    log_probs = torch.empty(rows, dtype=torch.float32, device=partials.device)
    entropy = torch.empty_like(log_probs)
    _finish[(triton.cdiv(rows, 32),)](
        partials, log_probs, entropy, rows, parts, partials.stride(0), PARTS=16, ROWS=32, num_warps=4
    )
    return log_probs, entropy


def gradient(
    source: Tensor, target: Tensor, rows: Tensor | None, bias: Tensor | None, coefficients: Any, *, scores: bool,
    logit_scale: float, softcap: float | None,
) -> None:  # fmt: skip
    """Write the gradient of the logits [M, C], but for the labels' own, which `label_gradient` sets.

    Args:
        source: logits from the GEMM, or kept scores: [M, C], [anything, C] with `rows`.
        target: [M, C]; without `rows` it may be the memory of `source`, if their elements are of one size.
        rows: the row of `source` of each row of `target`, or None.
        bias: [C], this tile's part, or None.
        coefficients: of these M rows.
        scores: `source` holds kept scores.
        logit_scale: see `ScoreTransform`; so is softcap.
    """
    count, columns = target.shape
    if target.stride(0) % 16 == 0 and source.stride(0) % 16 == 0 and bias is None:
        columns = -(-columns // 16) * 16  # into the padding of the rows, so that loads and stores stay wide
    block = 4096
    _gradient[(count, triton.cdiv(columns, block))](
        source, target, bias, rows, coefficients.factor, coefficients.shift, coefficients.constant, coefficients.slope,
        coefficients.base, source.stride(0), target.stride(0), columns, logit_scale, softcap or 1.0,
        GATHER=rows is not None, SCORES=scores, BIAS=bias is not None, SOFTCAP=softcap is not None, BLOCK=block,
        num_warps=8,
    )  # fmt: skip


def label_gradient(target: Tensor, labels: Tensor, first: int, at_label: Tensor) -> None:
    """Set the gradient at the labels that lie in the tile `target` [M, C], whose columns begin at `first`."""
    rows, columns = target.shape
    _label_gradient[(triton.cdiv(rows, 256),)](
        target, labels, at_label, target.stride(0), first, rows, columns, ROWS=256, num_warps=4
    )

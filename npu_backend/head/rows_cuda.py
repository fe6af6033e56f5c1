"""The PPO head's row kernels in Triton: what is done to a tile of logits [M, C] on either side of the GEMM.

Scores are kept in units of log 2 and relative to the row's label: v_j = (z_j - z_label) / ln 2. That costs nothing and
has two uses. log2 p_j = v_j + log2 p_label, so backward needs no log-sum-exp; and a score stored in half precision is
finest near the label, where a sampled token says the probability is, instead of being as coarse as the largest logit.

Everything is accumulated in float32 relative to the largest score m of what is summed: S = sum 2^(v - m) and
T = sum 2^(v - m) (v - m), so that nothing large is subtracted from anything large. A part of the columns leaves
(m, S, T) in `partials`; `finish` merges the parts of a row.

What is known of each row travels in one float32 tensor of planes [M]:

    0 factor    from a capped logit to a score in units of log 2: log2 e / temperature
    1 base      the label's score
    2 shift     log2 of the label's probability              (2 to 5: backward only)
    3 constant  the gradient of logit j is p_j (constant + slope log2 p_j) ...
    4 slope     ... with upstream gradients, temperature and logit scale in them
    5 at_label  ... and this one for the label's logit

Padded vocabulary entries (logits of -inf) contribute nothing; NaN stays NaN. Tiles may have any row stride.
Letters: M rows, C columns of a tile, V vocabulary size, H hidden size.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads a kernel's annotations: no `from __future__ import annotations` here.

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2.0))
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


@triton.jit(do_not_specialize=["M", "V"])
def _label_scores(
    x_ptr, w_ptr, bias_ptr, labels_ptr, temperatures_ptr, rows_ptr, x_stride, w_stride, w_step, H, M, V, temperature,
    logit_scale, softcap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    here = (label >= 0) & (label < V)
    label = tl.where(here, label, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + at, mask=at < H, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + label * w_stride + at.to(tl.int64) * w_step, mask=at < H, other=0.0).to(tl.float32)
        total += x * w
    bias = tl.load(bias_ptr + label).to(tl.float32) if BIAS else 0.0
    if PER_ROW:
        temperature = tl.load(temperatures_ptr + row).to(tl.float32)
    factor = 1.0 / temperature * _LOG2_E
    base = _capped(tl.sum(total, 0), bias, logit_scale, softcap, SOFTCAP) * factor
    tl.store(rows_ptr + row, factor)
    tl.store(rows_ptr + M + row, tl.where(here, base, 0.0))


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


@triton.jit(do_not_specialize=["M", "plane"])
def _statistics(
    z_ptr, kept_ptr, bias_ptr, rows_ptr, partials_ptr, z_stride, kept_stride, plane, M, C, logit_scale, softcap,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, KEEP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(rows_ptr + row)
    base = tl.load(rows_ptr + M + row)
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
def _merged(partials_ptr, rows, M, parts, plane, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Statistics (m, S, T) of some rows over all parts."""
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
    return m, s, t


@triton.jit(do_not_specialize=["M", "parts", "plane"])
def _merge(partials_ptr, out_ptr, M, parts, plane, PARTS: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m, s, t = _merged(partials_ptr, rows, M, parts, plane, PARTS, ROWS)
    tl.store(out_ptr + rows, m, mask=rows < M)
    tl.store(out_ptr + M + rows, s, mask=rows < M)
    tl.store(out_ptr + 2 * M + rows, t, mask=rows < M)


@triton.jit(do_not_specialize=["M", "parts", "plane"])
def _finish(
    partials_ptr, labels_ptr, log_probs_ptr, entropy_ptr, M, parts, plane, PARTS: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m, s, t = _merged(partials_ptr, rows, M, parts, plane, PARTS, ROWS)
    log_total = tl.log2(s)
    ignored = tl.load(labels_ptr + rows, mask=rows < M, other=-1) < 0
    # A log-prob is never positive; rounding of the label's own term could make it so by its last bit.
    log_probs = tl.minimum((m + log_total) * -_LN_2, 0.0, propagate_nan=_NAN_STAYS)
    tl.store(log_probs_ptr + rows, tl.where(ignored, 0.0, log_probs), mask=rows < M)
    tl.store(entropy_ptr + rows, tl.where(ignored, 0.0, (log_total - t / s) * _LN_2), mask=rows < M)


@triton.jit
def _one_minus_exp(x):
    """1 - e^x for x <= 0, also where e^x is near 1."""
    series = 1.0 + x / 9.0
    for term in tl.static_range(8, 1, -1):
        series = 1.0 + x / term * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit(do_not_specialize=["M"])
def _coefficients(
    rows_ptr, labels_ptr, log_probs_ptr, entropy_ptr, g_ptr, h_ptr, out_ptr, loud_ptr, M, logit_scale, softcap,
    G: tl.constexpr, H: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < M
    factor = tl.load(rows_ptr + rows, mask=inside, other=1.0)
    base = tl.load(rows_ptr + M + rows, mask=inside, other=0.0)
    log_p = tl.load(log_probs_ptr + rows, mask=inside, other=0.0)
    entropy = tl.load(entropy_ptr + rows, mask=inside, other=0.0)
    counts = tl.load(labels_ptr + rows, mask=inside, other=-1) >= 0
    g = tl.load(g_ptr + rows, mask=inside & counts, other=0.0) if G else tl.zeros((ROWS,), tl.float32)
    h = tl.load(h_ptr + rows, mask=inside & counts, other=0.0) if H else tl.zeros((ROWS,), tl.float32)
    per_logit = factor * logit_scale * _LN_2
    at_label = per_logit * (g * _one_minus_exp(log_p) - h * tl.exp(log_p) * (log_p + entropy))
    if SOFTCAP:
        saturation = base / (factor * softcap)
        at_label *= 1.0 - saturation * saturation
    tl.store(out_ptr + rows, factor, mask=inside)
    tl.store(out_ptr + M + rows, base, mask=inside)
    tl.store(out_ptr + 2 * M + rows, tl.where(counts, log_p * _LOG2_E, _LOWEST), mask=inside)  # else 2^z may be inf
    tl.store(out_ptr + 3 * M + rows, -per_logit * (g + h * entropy), mask=inside)
    tl.store(out_ptr + 4 * M + rows, -per_logit * h * _LN_2, mask=inside)
    tl.store(out_ptr + 5 * M + rows, at_label, mask=inside)
    tl.store(loud_ptr + rows, (g != 0.0) | (h != 0.0), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _order(loud_ptr, order_ptr, count_ptr, holes_ptr, M, BLOCK: tl.constexpr):
    movers_ptr = holes_ptr + M
    total = 0
    for start in range(0, M, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(loud_ptr + at, mask=at < M, other=0).to(tl.int32), 0)
    tl.store(count_ptr, total)
    holes = 0
    movers = 0
    for start in range(0, M, BLOCK):
        at = start + tl.arange(0, BLOCK)
        loud = tl.load(loud_ptr + at, mask=at < M, other=0) != 0
        hole = ((at < total) & (loud == 0)).to(tl.int32)
        mover = ((at >= total) & loud).to(tl.int32)
        tl.store(order_ptr + at, at.to(tl.int64), mask=(at < total) & loud)
        tl.store(holes_ptr + holes + tl.cumsum(hole, 0) - 1, at, mask=hole != 0)
        tl.store(movers_ptr + movers + tl.cumsum(mover, 0) - 1, at, mask=mover != 0)
        holes += tl.sum(hole, 0)
        movers += tl.sum(mover, 0)
    tl.debug_barrier()  # what is read next was written by other threads
    for start in range(0, holes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        hole = tl.load(holes_ptr + at, mask=at < holes, other=0)
        tl.store(order_ptr + hole, tl.load(movers_ptr + at, mask=at < holes, other=0).to(tl.int64), mask=at < holes)


@triton.jit(do_not_specialize=["M", "first"])
def _gradient(
    source_ptr, target_ptr, bias_ptr, labels_ptr, order_ptr, count_ptr, rows_ptr, source_stride, target_stride, first,
    M, C, logit_scale, softcap, ORDER: tl.constexpr, SCORES: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * (SPAN * BLOCK)
    end = tl.minimum(begin + SPAN * BLOCK, C)
    source = row
    if ORDER:
        in_use = row < tl.load(count_ptr)
        source = tl.load(order_ptr + row, mask=in_use, other=0)
        end = tl.where(in_use, end, begin)
    column = tl.load(labels_ptr + source) - first
    factor = tl.load(rows_ptr + source)
    base = tl.load(rows_ptr + M + source)
    shift = tl.load(rows_ptr + 2 * M + source)
    constant = tl.load(rows_ptr + 3 * M + source)
    slope = tl.load(rows_ptr + 4 * M + source)
    at_label = tl.load(rows_ptr + 5 * M + source)
    for start in range(begin, end, BLOCK):
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
        gradient = tl.where(at == column, at_label, gradient)
        tl.store(target_ptr + row * target_stride + at, gradient.to(target_ptr.dtype.element_ty), mask=at < C)


def label_scores(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperatures: Tensor | None, *, temperature: float,
    logit_scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Planes factor and base of each row, [2, M]; base from one dot product a row, 0 where the label is not here.

    Args:
        x: [M, H]; weight: [V, H], of any strides; bias: [V] or None. What is not said to have strides is contiguous.
        labels: [M] int64, negative or V where it is ignored or in another rank's part of the vocabulary.
        temperatures: [M] or None, then `temperature` holds for all.
        temperature, logit_scale, softcap: see `ScoreTransform`.
    """
    rows, width = x.shape
    planes = torch.empty(2, rows, dtype=torch.float32, device=x.device)
    _label_scores[(rows,)](
        x, weight, bias, labels, temperatures, planes, x.stride(0), *weight.stride(), width, rows, weight.shape[0],
        temperature, logit_scale, softcap or 1.0, BIAS=bias is not None, SOFTCAP=softcap is not None,
        PER_ROW=temperatures is not None, BLOCK=min(1024, triton.next_power_of_2(width)), num_warps=4,
    )  # fmt: skip
    return planes


def statistics(
    logits: Tensor, kept: Tensor | None, bias: Tensor | None, planes: Tensor, partials: Tensor, *, logit_scale: float,
    softcap: float | None,
) -> None:  # fmt: skip
    """Leave (m, S, T) of each row of `logits` [M, C] in `partials` [3, 1, M], and the scores in `kept` [M, C].

    `logits` are as the GEMM wrote them (float32 where it can), `bias` is this tile's part [C], `planes` are what
    `label_scores` gave, and `partials` may be a view of all parts' statistics.
    """
    rows, columns = logits.shape
    _statistics[(rows,)](
        logits, kept, bias, planes, partials, logits.stride(0), 0 if kept is None else kept.stride(0),
        partials.stride(0), rows, columns, logit_scale, softcap or 1.0,
        BIAS=bias is not None, SOFTCAP=softcap is not None, KEEP=kept is not None, LANES=1024, num_warps=8,
    )  # fmt: skip


def merge(partials: Tensor) -> Tensor:
    """Statistics [3, parts, M] over all parts, [3, 1, M]."""
    _, parts, rows = partials.shape
    merged = partials.new_empty(3, 1, rows)
    grid = (triton.cdiv(rows, 32),)
    _merge[grid](partials, merged, rows, parts, partials.stride(0), PARTS=32, ROWS=32, num_warps=4)
    return merged


def finish(partials: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partials [3, parts, M] into log-probs and entropy, [M] float32 each, zero where the label is negative."""
    _, parts, rows = partials.shape
    log_probs = torch.empty(rows, dtype=torch.float32, device=partials.device)
    entropy = torch.empty_like(log_probs)
    _finish[(triton.cdiv(rows, 32),)](
        partials, labels, log_probs, entropy, rows, parts, partials.stride(0), PARTS=32, ROWS=32, num_warps=4
    )
    return log_probs, entropy


def coefficients(
    planes: Tensor, labels: Tensor, log_probs: Tensor, entropy: Tensor, grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None, *, logit_scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All six planes [6, M], and which rows have an upstream gradient that is not zero (loud), [M] bool.

    d log p_y / d z_j = [j = y] - p_j and d entropy / d z_j = -p_j (log p_j + entropy), by the chain rule down to
    logits. At the label 1 - p is taken as -expm1(log p): the difference of two numbers near 1 would lose what matters
    for a confident policy.

    Args:
        planes: what `label_scores` gave.
        labels: [M]; where negative the upstream gradients are taken as zero.
        log_probs, entropy: [M].
        grad_log_probs, grad_entropy: [M] float32, contiguous, or None for zeros.
        logit_scale, softcap: see `ScoreTransform`.
    """
    rows = labels.numel()
    out = torch.empty(6, rows, dtype=torch.float32, device=planes.device)
    loud = torch.empty(rows, dtype=torch.bool, device=planes.device)
    _coefficients[(triton.cdiv(rows, 256),)](
        planes, labels, log_probs, entropy, grad_log_probs, grad_entropy, out, loud, rows, logit_scale, softcap or 1.0,
        G=grad_log_probs is not None, H=grad_entropy is not None, SOFTCAP=softcap is not None, ROWS=256, num_warps=4,
    )  # fmt: skip
    return out, loud


def order(loud: Tensor) -> tuple[Tensor, Tensor]:
    """Which row goes to each of the first L places when only the L loud rows shall be there: ([M] int64, [1] int64: L).

    A loud row among the first L stays where it is, and the others fill the gaps. So no row moves to where a loud one
    has been, all may move at the same time, and nothing waits for the host. What lies beyond L in the first is any
    number.
    """
    rows = loud.numel()
    places = torch.empty(rows, dtype=torch.int64, device=loud.device)
    count = places.new_empty(1)
    holes_and_movers = places.new_empty(2, rows, dtype=torch.int32)
    _order[(1,)](loud.view(torch.uint8), places, count, holes_and_movers, rows, BLOCK=1024, num_warps=8)
    return places, count


def gradient(
    source: Tensor, target: Tensor, bias: Tensor | None, labels: Tensor, first: int, planes: Tensor,
    moves: tuple[Tensor, Tensor] | None = None, *, scores: bool, logit_scale: float, softcap: float | None,
) -> None:  # fmt: skip
    """Write the gradient of the logits [M, C].

    Args:
        source: logits from the GEMM, or kept scores: [M, C].
        target: [M, C]; it may be the memory of `source`, if their elements are of one size.
        bias: [C], this tile's part, or None.
        labels: [M] of the rows of `source`.
        first: the vocabulary entry of the first column.
        planes: [6, M] of the rows of `source`.
        moves: what `order` gave: only the rows named there are computed, and go to the places given there.
        scores: `source` holds kept scores.
        logit_scale, softcap: see `ScoreTransform`.
    """
    rows, columns = source.shape
    if target.stride(0) % 16 == 0 and source.stride(0) % 16 == 0 and bias is None:
        columns = -(-columns // 16) * 16  # into the padding of the rows, so that loads and stores stay wide
    places, count = (None, None) if moves is None else moves
    block, span = 2048, 10  # long enough that programs of rows that are left out, which find nothing to do, cost little
    _gradient[(rows, triton.cdiv(columns, span * block))](
        source, target, bias, labels, places, count, planes, source.stride(0), target.stride(0), first, rows, columns,
        logit_scale, softcap or 1.0, ORDER=moves is not None, SCORES=scores, BIAS=bias is not None,
        SOFTCAP=softcap is not None, SPAN=span, BLOCK=block, num_warps=4,
    )  # fmt: skip

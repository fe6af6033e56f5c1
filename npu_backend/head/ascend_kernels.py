"""The Triton-Ascend kernels of the PPO head: what is done to a chunk of logits [M, V] on either side of the GEMM.

This file needs triton and nothing else, so that the vendor's compiler can be given it wherever its toolchain lives.
`ascend_launches` says with which signatures and constants each kernel is compiled and launched; nothing else does.

Rules that come from the vendor's compiler, which accepts their opposite and is then wrong or runs out of memory:

* Programs are persistent: a fixed grid of one per core, each taking every n-th row, in blocks of one dimension.
* No argument is specialised by its value: one compilation serves every number of rows and every vocabulary.
* A gather's address is clamped: a masked one is read all the same. Offsets of rows are int64.
* Where a column mask is not needed for the result there is none: an integer comparison is emulated in vector code.
* No atomics. A masked operand of `tl.dot` leaves its part of the accumulator unwritten, so none is masked along what
  the result keeps.
* Neither num_warps nor num_stages: they mean nothing here.

In the row kernels -inf logits contribute nothing (a shifted score is at least `_NEVER`, because 0 * -inf would be NaN).
NaN stays NaN.

Letters: M rows, V vocabulary size, H hidden size; z scores, m their maximum, S = sum e^(z - m).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads a kernel's annotations: no `from __future__ import annotations` here.

import triton
import triton.language as tl

try:  # triton-ascend 3.2.1 and later
    from triton.language.extra.cann.extension import insert_slice
except ImportError:  # triton-ascend 3.2.0; upstream Triton has none
    insert_slice = getattr(tl, "insert_slice", None)

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # float32's: the maximum of nothing
_NEVER = tl.constexpr(-1000.0)  # e to its power is 0, and 0 times it is 0
_MINUS_INFINITY = tl.constexpr(float("-inf"))
_NAN_STAYS = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _scores(logits, bias, logit_scale, softcap, inverse_temperature, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """z = cap(logit_scale * (logits + bias)) / temperature, cap(u) = softcap * tanh(u / softcap)."""
    if BIAS:
        logits += bias
    if SOFTCAP:
        return (1.0 - 2.0 / (tl.exp(logits * (2.0 * logit_scale / softcap)) + 1.0)) * (softcap * inverse_temperature)
    return logits * (logit_scale * inverse_temperature)


@triton.jit
def _one_minus_exp(x):
    """1 - e^x for x <= 0, also where e^x is near 1."""
    series = 1.0 + x / 9.0
    for term in tl.static_range(8, 1, -1):
        series = 1.0 + x / term * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit(
    do_not_specialize=[
        "logits_ptr", "labels_ptr", "bias_ptr", "temperatures_ptr", "of_label_ptr", "peak_ptr", "total_ptr",
        "weighted_ptr", "stride", "M", "V", "logit_scale", "softcap",
    ]
)  # fmt: skip
def rows_forward(
    logits_ptr, labels_ptr, bias_ptr, temperatures_ptr, of_label_ptr, peak_ptr, total_ptr, weighted_ptr, stride, M, V,
    logit_scale, softcap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The label's score, m, S and sum e^(z - m) (z - m) of each row.

    MASK: scores of a -inf logit are not -inf (a softcap, a scale that is not positive), so the columns beyond V are
    masked by their number.
    """
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    for turn in range(0, (M - first + programs - 1) // programs):
        row = first + turn * programs
        base = logits_ptr + row.to(tl.int64) * stride
        inverse_temperature = 1.0 / tl.load(temperatures_ptr + row)
        m = _LOWEST
        s = 0.0
        t = 0.0
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logits = tl.load(base + at, mask=at < V, other=0.0 if MASK else _MINUS_INFINITY).to(tl.float32)
            bias = tl.load(bias_ptr + at, mask=at < V, other=0.0) if BIAS else 0.0
            z = _scores(logits, bias, logit_scale, softcap, inverse_temperature, BIAS, SOFTCAP)
            if MASK:
                z = tl.where(at < V, z, _LOWEST)
            largest = tl.maximum(m, tl.max(z, 0))
            shifted = tl.maximum(z - largest, _NEVER, propagate_nan=_NAN_STAYS)
            moved = tl.maximum(m - largest, _NEVER)
            shrink = tl.exp(moved)
            weights = tl.exp(shifted)
            if ENTROPY:
                t = (t + s * moved) * shrink + tl.sum(weights * shifted, 0)
            s = s * shrink + tl.sum(weights, 0)
            m = largest
        label = tl.load(labels_ptr + row)
        column = tl.minimum(tl.maximum(label, 0), V - 1)
        logit = tl.load(base + column).to(tl.float32)
        bias = tl.load(bias_ptr + column) if BIAS else 0.0
        of_label = _scores(logit, bias, logit_scale, softcap, inverse_temperature, BIAS, SOFTCAP)
        tl.store(of_label_ptr + row, tl.where(label == column, of_label, 0.0))
        tl.store(peak_ptr + row, m)
        tl.store(total_ptr + row, s)
        if ENTROPY:
            tl.store(weighted_ptr + row, t)


@triton.jit(
    do_not_specialize=[
        "logits_ptr", "out_ptr", "labels_ptr", "bias_ptr", "temperatures_ptr", "log_probs_ptr", "entropy_ptr",
        "peak_ptr", "total_ptr", "g_ptr", "h_ptr", "stride", "M", "V", "logit_scale", "softcap",
    ]
)  # fmt: skip
def rows_backward(
    logits_ptr, out_ptr, labels_ptr, bias_ptr, temperatures_ptr, log_probs_ptr, entropy_ptr, peak_ptr, total_ptr,
    g_ptr, h_ptr, stride, M, V, logit_scale, softcap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
    SLICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The logits' gradient, which may take the place of the logits; g and h are the upstream gradients of the log-prob
    and the entropy.

    p (constant + slope (z - m)) for every column but the label's, which is set to its own value: there 1 - p is taken
    as -expm1(log p). SLICE: set it by Ascend's insert_slice, which needs half the on-chip memory of a comparison.
    """
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    for turn in range(0, (M - first + programs - 1) // programs):
        row = first + turn * programs
        offset = row.to(tl.int64) * stride
        label = tl.load(labels_ptr + row).to(tl.int32)
        temperature = tl.load(temperatures_ptr + row)
        inverse_temperature = 1.0 / temperature
        log_prob = tl.load(log_probs_ptr + row)
        peak = tl.load(peak_ptr + row)
        total = tl.load(total_ptr + row)
        log_total = tl.log(total)
        per_logit = logit_scale * inverse_temperature
        g = tl.load(g_ptr + row) * per_logit
        constant = -g / total
        of_label = g * _one_minus_exp(log_prob)
        if ENTROPY:
            h = tl.load(h_ptr + row) * per_logit
            entropy = tl.load(entropy_ptr + row)
            constant -= h * (entropy - log_total) / total
            slope = -h / total
            of_label -= h * tl.exp(log_prob) * (log_prob + entropy)
        if SOFTCAP:
            to_tanh = temperature / softcap
            label_tanh = (log_prob + peak + log_total) * to_tanh
            of_label *= 1.0 - label_tanh * label_tanh
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + offset + at, mask=at < V, other=0.0).to(tl.float32)
            bias = tl.load(bias_ptr + at, mask=at < V, other=0.0) if BIAS else 0.0
            z = _scores(logits, bias, logit_scale, softcap, inverse_temperature, BIAS, SOFTCAP)
            shifted = tl.maximum(z - peak, _NEVER, propagate_nan=_NAN_STAYS)
            gradient = tl.exp(shifted) * (constant + slope * shifted if ENTROPY else constant)
            if SOFTCAP:
                tanh = z * to_tanh
                gradient *= 1.0 - tanh * tanh
            if (label >= start) & (label < start + BLOCK):
                if SLICE:
                    inserted = tl.full((1,), 0.0, tl.float32) + of_label
                    gradient = insert_slice(gradient, inserted, [label - start], [1], [1])
                else:
                    gradient = tl.where(at == label, of_label, gradient)
            tl.store(out_ptr + offset + at, gradient.to(out_ptr.dtype.element_ty), mask=at < V)


@triton.jit(
    do_not_specialize=[
        "hidden_ptr", "weight_ptr", "temperatures_ptr", "peak_ptr", "total_ptr", "weighted_ptr", "hidden_stride",
        "weight_stride", "M", "V", "H", "logit_scale", "parts", "part_columns",
    ]
)  # fmt: skip
def fused_forward(
    hidden_ptr, weight_ptr, temperatures_ptr, peak_ptr, total_ptr, weighted_ptr, hidden_stride, weight_stride, M, V, H,
    logit_scale, parts, part_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The GEMM and the statistics in one: m, S and sum e^(z - m) (z - m) of each part of the columns, [parts, M] each;
    the logits stay on chip. Needs V >= COLUMNS: the last tile is moved back to end at V, so that no weight is masked,
    and what the tile before has counted already is taken out by a bias.
    """
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    tasks = tl.cdiv(M, ROWS) * parts
    for turn in range(0, (tasks - first + programs - 1) // programs):
        task = first + turn * programs
        part = task % parts
        rows = (task // parts) * ROWS + tl.arange(0, ROWS)
        is_row = rows < M
        hidden_rows = hidden_ptr + rows.to(tl.int64)[:, None] * hidden_stride
        factor = logit_scale / tl.load(temperatures_ptr + rows, mask=is_row, other=1.0)
        m = tl.full((ROWS,), _LOWEST, tl.float32)
        s = tl.zeros((ROWS,), tl.float32)
        t = tl.zeros((ROWS,), tl.float32)
        for start in range(part * part_columns, tl.minimum((part + 1) * part_columns, V), COLUMNS):
            columns = tl.minimum(start, V - COLUMNS) + tl.arange(0, COLUMNS)
            weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * weight_stride
            logits = tl.zeros((ROWS, COLUMNS), tl.float32)
            for depth in range(0, H, DEPTH):
                at = depth + tl.arange(0, DEPTH)
                hidden = tl.load(hidden_rows + at[None, :], mask=is_row[:, None] & (at < H)[None, :], other=0.0)
                weight = tl.load(weight_rows + at[None, :], mask=(at < H)[None, :], other=0.0)
                logits = tl.dot(hidden, tl.trans(weight), logits)
            counted = tl.where(columns >= start, 0.0, -1.0e30)
            z = logits * factor[:, None] + counted[None, :]
            largest = tl.maximum(m, tl.max(z, 1))
            moved = tl.maximum(m - largest, _NEVER)
            shrink = tl.exp(moved)
            shifted = z - largest[:, None]
            weights = tl.exp(shifted)
            t = (t + s * moved) * shrink + tl.sum(weights * shifted, 1)
            s = s * shrink + tl.sum(weights, 1)
            m = largest
        at_row = part.to(tl.int64) * M + rows
        tl.store(peak_ptr + at_row, m, mask=is_row)
        tl.store(total_ptr + at_row, s, mask=is_row)
        tl.store(weighted_ptr + at_row, t, mask=is_row)


@triton.jit(
    do_not_specialize=[
        "hidden_ptr", "weight_ptr", "labels_ptr", "temperatures_ptr", "of_label_ptr", "hidden_stride", "weight_stride",
        "M", "V", "H", "logit_scale",
    ]
)  # fmt: skip
def label_scores(
    hidden_ptr, weight_ptr, labels_ptr, temperatures_ptr, of_label_ptr, hidden_stride, weight_stride, M, V, H,
    logit_scale, BLOCK: tl.constexpr,
):  # fmt: skip
    """The label's score from one dot product a row, 0 where no column is the label's."""
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    for turn in range(0, (M - first + programs - 1) // programs):
        row = first + turn * programs
        label = tl.load(labels_ptr + row)
        column = tl.minimum(tl.maximum(label, 0), V - 1)
        products = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, H, BLOCK):
            at = start + tl.arange(0, BLOCK)
            hidden = tl.load(hidden_ptr + row.to(tl.int64) * hidden_stride + at, mask=at < H, other=0.0)
            weight = tl.load(weight_ptr + column.to(tl.int64) * weight_stride + at, mask=at < H, other=0.0)
            products += hidden.to(tl.float32) * weight.to(tl.float32)
        of_label = tl.sum(products, 0) * (logit_scale / tl.load(temperatures_ptr + row))
        tl.store(of_label_ptr + row, tl.where(label == column, of_label, 0.0))

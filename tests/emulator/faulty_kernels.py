"""Small kernels that compile and are wrong, each with its right sister: what the emulator must tell apart.

Every one is a pattern that the vendor's compiler accepts without a word.
"""
# Triton reads a kernel's annotations: no `from __future__ import annotations` here.

import triton
import triton.language as tl


@triton.jit
def product(a_ptr, b_ptr, c_ptr, M, N, K, ATOMIC: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """C += A B on one tile; by an atomic addition of what `tl.dot` returns, or of that times one."""
    row = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + row[:, None] * K + row[None, :])
    b = tl.load(b_ptr + row[:, None] * N + row[None, :])
    c = tl.dot(a, b)
    if SCALED:
        c = c * M.to(tl.float32)
    at = c_ptr + row[:, None] * N + row[None, :]
    if ATOMIC:
        tl.atomic_add(at, c)
    else:
        tl.store(at, tl.load(at) + c)


@triton.jit
def exp_sums(a_ptr, w_ptr, out_ptr, scale, N, H, SHIFTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of e^(scale A W^T) of each row, N columns in blocks. The last one is masked and its rest put out by a
    bias; or it is shifted back, so that nothing is masked along the columns, and what counted already is put out.
    """
    row, depth = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    found = tl.zeros((ROWS,), tl.float32)
    for start in range(0, N, BLOCK):
        column = (tl.minimum(start, N - BLOCK) if SHIFTED else start) + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + row[:, None] * H + depth[None, :])
        at = w_ptr + column[:, None] * H + depth[None, :]
        w = tl.load(at) if SHIFTED else tl.load(at, mask=(column < N)[:, None], other=0.0)
        score = tl.dot(a, tl.trans(w))
        counts = (column >= start) & (column < N)
        found += tl.sum(tl.exp(score * scale + tl.where(counts, 0.0, -1.0e30)[None, :]), 1)
    tl.store(out_ptr + row, found)


@triton.jit
def picked(x_ptr, labels_ptr, out_ptr, M, V, CLAMPED: tl.constexpr, ROWS: tl.constexpr):
    """x[row, label] of a block of rows of which some do not exist; their addresses are masked, or clamped too."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    label = tl.load(labels_ptr + row, mask=row < M, other=0)
    safe = tl.minimum(row, M - 1) if CLAMPED else row
    x = tl.load(x_ptr + safe.to(tl.int64) * V + label, mask=row < M, other=0.0)
    tl.store(out_ptr + row, x, mask=row < M)

"""The PPO head's autograd function for devices with kernels of their own: tiles of the vocabulary, all rows at a time.

The logits are computed a tile of columns [M, C] at a time. A tile is all that is needed of its part of the weight's
gradient, which is therefore one GEMM over all rows, written to its final place and rounded once; what is summed over
tiles, in float32, is the small gradient of the hidden states. Forward leaves each row's softmax statistics per tile
and merges them at the end.

Three things are saved where they can be:

* the fused kernel, where there is one, consumes logits in registers: no-grad passes write none, and a backward pass
  that recomputes them reads none;
* `cache_columns` of the scores are kept for backward instead of being recomputed, in half precision relative to the
  label's score (`rows_cuda` says why that loses nothing that matters), and turned into their gradient in place;
* rows that can change nothing are left out: ignored rows in both directions, rows whose upstream gradients are exactly
  zero in backward (prompt and padding tokens, clipped ratios, groups without an advantage).

Letters: N rows, M rows that count, H hidden size, V vocabulary size, C columns of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from npu_backend.head.chunked import _FirstOrderOnly
from npu_backend.log import warn_once

_OUT_OF_MEMORY = "a smaller logits_cache_gib, or 0, asks for less"
_ALIGN = 256  # columns; a tile of the fused kernel, and wide enough for every load


@dataclass(frozen=True)
class TilePlan:
    """How one call is computed: everything that is not a tensor.

    Attributes:
        kernels: a module like `rows_cuda`.
        fused: a module like `gemm_stats_cuda`, or None for a library GEMM and row kernels.
        compute_dtype: of the GEMMs.
        logit_scale: see `chunked.ScoreTransform`; so are softcap and temperature.
        temperature: one number; the function's `temperatures` take its place where they are given.
        calculate_entropy: False returns None for it.
        cache_columns: of how many columns the scores are kept for backward.
        tile_bytes: bound on the memory of one tile.
        compact: leave out rows that change nothing: one host synchronisation in each direction.
    """

    kernels: ModuleType
    fused: ModuleType | None
    compute_dtype: torch.dtype
    logit_scale: float
    softcap: float | None
    temperature: float
    calculate_entropy: bool
    cache_columns: int
    tile_bytes: int
    compact: bool

    @property
    def kept_dtype(self) -> torch.dtype:
        """Of kept scores; as large as the compute dtype, since their gradient takes their place."""
        return torch.float16 if self.compute_dtype.itemsize == 2 else self.compute_dtype

    def tiles(self, start: int, stop: int, rows: int, element_bytes: int) -> Iterator[slice]:
        """Tiles of columns start..stop whose [rows, C] elements keep within `tile_bytes`."""
        width = max(_ALIGN, self.tile_bytes // (max(rows, 1) * element_bytes) // _ALIGN * _ALIGN)
        for first in range(start, stop, width):
            yield slice(first, min(first + width, stop))


@dataclass(frozen=True)
class Coefficients:
    """What backward needs to know of each row, [M] float32 each. With log2 p_j = v_j + shift, the gradient of logit j
    is p_j (constant + slope log2 p_j), and `at_label` for the label's logit.

    Attributes:
        factor: from a capped logit to a score in units of log 2.
        base: the label's score; v_j is relative to it.
        shift: log2 of the label's probability.
        constant, slope, at_label: see above; upstream gradients, temperature and logit scale are in them.
    """

    factor: Tensor
    base: Tensor
    shift: Tensor
    constant: Tensor
    slope: Tensor
    at_label: Tensor


class TiledHead(torch.autograd.Function):
    """apply(hidden [N, H], weight [V, H], bias [V] | None, labels [N], temperatures [N] | None, plan).

    Returns log-probs [N] and entropy [N] | None in float32. Labels are int64, negative where the row is ignored.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperatures: Tensor | None,
        plan: TilePlan,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        with _on(hidden), record_function("npu_backend.head.forward"):
            rows = _indices(labels >= 0) if plan.compact else None
            x = _counting_rows(hidden, labels, rows, plan)
            counting_labels = _take(labels, rows)
            factor = _factor(_take(temperatures, rows), x, plan)
            w = weight.to(plan.compute_dtype)
            base = plan.kernels.label_scores(x, w, bias, counting_labels, factor, plan.logit_scale, plan.softcap)
            cache = _new_cache(x, plan)
            partials = _statistics(x, w, bias, factor, base, cache, plan)
            found = plan.kernels.finish(partials)
            log_probs, entropy = (_spread(values, labels, rows) for values in found)
        ctx.plan = plan
        ctx.cache_is_fresh = True
        ctx.save_for_backward(hidden, weight, bias, labels, temperatures, rows, *found, base, cache)
        return log_probs, entropy if plan.calculate_entropy else None

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None, None
        hidden, weight, bias, *_ = ctx.saved_tensors
        with torch.no_grad(), _on(hidden), record_function("npu_backend.head.backward"):
            try:
                grads = _gradients(ctx, grad_log_probs, grad_entropy)
            except torch.OutOfMemoryError:
                if not _give_up_cache(ctx):
                    raise
                grads = _gradients(ctx, grad_log_probs, grad_entropy)
        if torch.is_grad_enabled():  # create_graph=True
            upstream = [g for g in (grad_log_probs, grad_entropy) if g is not None]
            grads = _FirstOrderOnly.apply(*grads, hidden, weight, bias, *upstream)
        return (*grads, None, None, None)


def _statistics(
    x: Tensor, w: Tensor, bias: Tensor | None, factor: Tensor, base: Tensor, cache: Tensor | None, plan: TilePlan
) -> Tensor:
    """The statistics of all columns in parts, [3, parts, M]; the scores of the first columns go to `cache`."""
    kept = 0 if cache is None else cache.shape[1]
    rows, vocab = x.shape[0], w.shape[0]
    if rows == 0:
        return torch.empty(3, 1, 0, dtype=torch.float32, device=x.device)
    if plan.fused is not None:
        spans = [slice(0, kept), slice(kept, vocab)] if 0 < kept < vocab else [slice(0, vocab)]
        counts = [plan.fused.parts(span.stop - span.start) for span in spans]
    else:
        spans = list(plan.tiles(0, kept, rows, 4)) + list(plan.tiles(kept, vocab, rows, 4))
        counts = [1] * len(spans)
    partials = torch.empty(3, sum(counts), rows, dtype=torch.float32, device=x.device)
    first = 0
    buffer = None
    for span, count in zip(spans, counts):
        part = partials[:, first : first + count]
        keep = cache[:, span] if span.start < kept and cache is not None else None
        if plan.fused is not None:
            plan.fused.statistics(x, w[span], keep, factor, base, part, plan.logit_scale)
        else:
            if buffer is None:
                buffer = _new_tile(x, max(span.stop - span.start for span in spans), _product_dtype(x))
            logits = buffer[:, : span.stop - span.start]
            _multiply(logits, x, w[span].t())
            plan.kernels.statistics(
                logits, keep, None if bias is None else bias[span], factor, base, part, plan.logit_scale, plan.softcap
            )
        first += count
    return partials


def _gradients(
    ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, each in its own dtype, None for those that nobody asked for."""
    hidden, weight, bias, labels, temperatures, rows, log_probs, entropy, base, cache = ctx.saved_tensors
    plan: TilePlan = ctx.plan
    wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    upstream = [_take(_upstream(grad, labels), rows) for grad in (grad_log_probs, grad_entropy)]
    loud = _indices((upstream[0] != 0) | (upstream[1] != 0)) if plan.compact else None
    if loud is not None:
        upstream = [grad[loud] for grad in upstream]
        log_probs, entropy, base = log_probs[loud], entropy[loud], base[loud]
        rows = loud if rows is None else rows[loud]
    x = _counting_rows(hidden, labels, rows, plan)
    counting_labels = _take(labels, rows)
    coefficients = _coefficients(
        log_probs, entropy, base, _factor(_take(temperatures, rows), x, plan), upstream[0], upstream[1], plan
    )
    if x.shape[0] == 0:
        return tuple(torch.zeros_like(t) if wants else None for t, wants in zip((hidden, weight, bias), ctx.needs_input_grad))
    w = weight.to(plan.compute_dtype)
    usable = cache if ctx.cache_is_fresh else None
    grad_weight = torch.empty_like(weight) if wants_weight else None
    grad_bias = torch.empty_like(bias) if wants_bias else None
    grad_x: Tensor | None = None
    for span, grad_logits in _gradient_tiles(x, w, bias, counting_labels, coefficients, usable, loud, plan):
        if loud is None and span.start == 0 and usable is not None:
            ctx.cache_is_fresh = False  # its memory holds the gradient now; another backward has to recompute
        with record_function("npu_backend.head.backward.products"):
            if grad_weight is not None:
                _multiply(grad_weight[span], grad_logits.t(), x)
            if grad_bias is not None:
                grad_bias[span] = grad_logits.sum(dim=0, dtype=torch.float32).to(grad_bias.dtype)
            if wants_hidden and grad_x is None:
                only_tile = span.stop == w.shape[0]
                grad_x = torch.empty_like(x, dtype=x.dtype if only_tile else torch.float32)
                _multiply(grad_x, grad_logits, w[span])
            elif grad_x is not None:
                _multiply(grad_x, grad_logits, w[span], add=True)
        del grad_logits
    grad_hidden = None
    if grad_x is not None:
        grad_x = grad_x.to(hidden.dtype)
        grad_hidden = grad_x if rows is None else torch.zeros_like(hidden).index_copy_(0, rows, grad_x)
    return grad_hidden, grad_weight, grad_bias


def _gradient_tiles(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    coefficients: Coefficients,
    cache: Tensor | None,
    loud: Tensor | None,
    plan: TilePlan,
) -> Iterator[tuple[slice, Tensor]]:
    """The gradient of the logits, tile by tile: the columns, and [M, C] in the compute dtype, valid until the next."""
    rows, vocab = x.shape[0], w.shape[0]
    kept = 0 if cache is None else cache.shape[1]
    options = {"logit_scale": plan.logit_scale, "softcap": plan.softcap}
    if cache is not None and loud is None:
        target = cache.view(plan.compute_dtype)
        with record_function("npu_backend.head.backward.scores"):
            plan.kernels.gradient(cache, target, None, None, coefficients, scores=True, **options)
            plan.kernels.label_gradient(target, labels, 0, coefficients.at_label)
        yield slice(0, kept), target
        start = kept
    else:
        start = 0
    if start == vocab:
        return
    product_bytes = 0 if plan.fused is not None else 4
    element_bytes = x.element_size() + product_bytes
    spans = list(plan.tiles(start, kept, rows, element_bytes)) + list(plan.tiles(kept, vocab, rows, element_bytes))
    width = max(span.stop - span.start for span in spans)
    buffer = _new_tile(x, width, x.dtype)
    product = _new_tile(x, width, _product_dtype(x)) if plan.fused is None and kept < vocab else None
    for span in spans:
        target = buffer[:, : span.stop - span.start]
        with record_function("npu_backend.head.backward.scores"):
            if cache is not None and span.start < kept:
                plan.kernels.gradient(cache[:, span], target, loud, None, coefficients, scores=True, **options)
            elif plan.fused is not None:
                plan.fused.gradient(x, w[span], target, coefficients, plan.logit_scale)
            else:
                assert product is not None
                logits = product[:, : span.stop - span.start]
                _multiply(logits, x, w[span].t())
                part = None if bias is None else bias[span]
                plan.kernels.gradient(logits, target, None, part, coefficients, scores=False, **options)
            plan.kernels.label_gradient(target, labels, span.start, coefficients.at_label)
        yield span, target


def _coefficients(
    log_probs: Tensor, entropy: Tensor, base: Tensor, factor: Tensor, g: Tensor, h: Tensor, plan: TilePlan
) -> Coefficients:
    """d log p_y / d z_j = [j = y] - p_j and d entropy / d z_j = -p_j (log p_j + entropy), by the chain rule down to logits.

    At the label 1 - p is taken as -expm1(log p): the difference of two numbers near 1 would lose what matters for a
    confident policy.
    """
    per_logit = factor * (math.log(2.0) * plan.logit_scale)
    at_label = per_logit * (g * -log_probs.expm1() - h * log_probs.exp() * (log_probs + entropy))
    if plan.softcap is not None:
        at_label = at_label * (1.0 - (base / (factor * plan.softcap)).square())
    return Coefficients(
        factor=factor,
        base=base,
        shift=log_probs * math.log2(math.e),
        constant=-per_logit * (g + h * entropy),
        slope=-per_logit * h * math.log(2.0),
        at_label=at_label,
    )


def _multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """out = a b, or out += a b, accumulated in float32 and rounded once where the library can."""
    if out.dtype == a.dtype and not add:
        torch.mm(a, b, out=out)
    elif out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out)
    elif out.dtype == torch.float32 and a.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out"):
        if add:
            torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, out=out)
        else:
            torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
    elif add:
        out.add_(torch.mm(a, b))
    else:
        out.copy_(torch.mm(a, b))


def _new_cache(x: Tensor, plan: TilePlan) -> Tensor | None:
    """Memory for the scores to keep; None where there is none to keep or no memory for it after all."""
    if plan.cache_columns == 0:
        return None
    try:
        return _new_tile(x, plan.cache_columns, plan.kept_dtype)
    except torch.OutOfMemoryError:
        warn_once("head.cache", f"PPO head: no memory to keep scores for backward; it recomputes them ({_OUT_OF_MEMORY})")
        return None


def _give_up_cache(ctx: Any) -> bool:
    """Free the kept scores, after which backward recomputes them. False if there are none to free."""
    cache = ctx.saved_tensors[-1]
    if cache is None or cache.untyped_storage().nbytes() == 0:
        return False
    ctx.cache_is_fresh = False
    cache.untyped_storage().resize_(0)
    warn_once("head.cache", f"PPO head: backward ran out of memory and gave up the kept scores ({_OUT_OF_MEMORY})")
    return True


def _product_dtype(x: Tensor) -> torch.dtype:
    """Of the logits that a library GEMM writes: float32 wherever it can, whatever it multiplies."""
    return torch.float32 if x.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out") else x.dtype


def _new_tile(x: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised [M, columns] whose rows begin at multiples of `_ALIGN` elements."""
    width = -(-columns // _ALIGN) * _ALIGN
    return torch.empty(x.shape[0], width, dtype=dtype, device=x.device)[:, :columns]


def _counting_rows(hidden: Tensor, labels: Tensor, rows: Tensor | None, plan: TilePlan) -> Tensor:
    """The hidden states [M, H] that count, in the compute dtype. Where ignored rows are not left out they are read as
    zeros: whatever padding tokens hold (NaN included) reaches nothing."""
    if rows is not None:
        hidden = hidden.index_select(0, rows)
    elif not plan.compact:
        hidden = hidden.masked_fill((labels < 0)[:, None], 0.0)
    return hidden.to(plan.compute_dtype).contiguous()


def _factor(temperatures: Tensor | None, x: Tensor, plan: TilePlan) -> Tensor:
    if temperatures is None:
        return torch.full((x.shape[0],), math.log2(math.e) / plan.temperature, dtype=torch.float32, device=x.device)
    return math.log2(math.e) / temperatures.float()


def _upstream(grad: Tensor | None, labels: Tensor) -> Tensor:
    """An upstream gradient (it may be strided or expanded, or None): float32, contiguous, zero where ignored."""
    if grad is None:
        return torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
    return grad.float().masked_fill(labels < 0, 0.0).contiguous()


def _indices(counts: Tensor) -> Tensor | None:
    """Indices of the rows that count, or None if all do. Synchronises with the host."""
    indices = counts.nonzero()[:, 0]
    return None if indices.numel() == counts.numel() else indices


def _take(values: Tensor | None, rows: Tensor | None) -> Any:
    return values if values is None or rows is None else values[rows]


def _spread(values: Tensor, labels: Tensor, rows: Tensor | None) -> Tensor:
    """Values of the rows that count, back in the places of all rows; zero elsewhere."""
    if rows is not None:
        return torch.zeros(labels.shape, dtype=values.dtype, device=values.device).index_copy_(0, rows, values)
    return values.masked_fill(labels < 0, 0.0)


@contextmanager
def _on(hidden: Tensor) -> Iterator[None]:
    """Kernels run on the tensors' device, whatever the current one is; and no autocast changes settled dtypes."""
    device = torch.cuda.device(hidden.device) if hidden.is_cuda else nullcontext()
    with device, torch.autocast(hidden.device.type, enabled=False):
        yield

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

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from npu_backend.head.chunked import _FirstOrderOnly
from npu_backend.log import warn_once

_LESS_MEMORY = "a smaller logits_cache_gib, or 0, asks for less"
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
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
        compact: leave out rows that change nothing, which takes a host synchronisation to find them.
        may_ignore: False where it is known that no row is ignored.
        consume: let the gradient take the place of the kept scores.
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
    may_ignore: bool = True
    consume: bool = True

    @property
    def transform(self) -> dict[str, float | None]:
        """What kernels need to make scores of logits."""
        return {"logit_scale": self.logit_scale, "softcap": self.softcap}

    @property
    def kept_dtype(self) -> torch.dtype:
        return kept_dtype(self.compute_dtype)

    def tiles(self, start: int, stop: int, rows: int, element_bytes: int) -> Iterator[slice]:
        """Tiles of columns start..stop, of about one width, whose [rows, C] elements keep within `tile_bytes`."""
        largest = max(_ALIGN, self.tile_bytes // (max(rows, 1) * element_bytes) // _ALIGN * _ALIGN)
        count = max(1, -(-(stop - start) // largest))
        width = -(-(stop - start) // (count * _ALIGN)) * _ALIGN
        for first in range(start, stop, max(width, 1)):
            yield slice(first, min(first + width, stop))


class Found(NamedTuple):
    """What forward computes; all of it is needed by backward.

    Attributes:
        counting: indices of the rows that count, or None if all do.
        log_probs: [M] float32; entropy: [M] float32: of the rows that count.
        planes: [2, M]: factor and base, see the kernels.
        cache: scores [M, cache_columns], or None.
    """

    counting: Tensor | None
    log_probs: Tensor
    entropy: Tensor
    planes: Tensor
    cache: Tensor | None


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
        found = forward(hidden, weight, bias, labels, temperatures, plan)
        ctx.plan = plan
        ctx.cache_is_fresh = True
        ctx.save_for_backward(hidden, weight, bias, labels, *found)
        log_probs = _spread(found.log_probs, labels, found.counting)
        return log_probs, _spread(found.entropy, labels, found.counting) if plan.calculate_entropy else None

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None, None
        hidden, weight, bias, labels, *found = ctx.saved_tensors
        upstream, wants = (grad_log_probs, grad_entropy), ctx.needs_input_grad[:3]
        found = Found(*found) if ctx.cache_is_fresh else Found(*found)._replace(cache=None)
        # Backward leaves the gradient where the scores were: another backward (retain_graph) has to recompute them.
        ctx.cache_is_fresh = False
        with torch.no_grad():
            try:
                grads = backward(hidden, weight, bias, labels, found, upstream, wants, ctx.plan)
            except torch.OutOfMemoryError:
                if found.cache is None:
                    raise
                warn_once("head.cache", f"PPO head: backward ran out of memory without kept scores ({_LESS_MEMORY})")
                found.cache.untyped_storage().resize_(0)
                found = found._replace(cache=None)
                grads = backward(hidden, weight, bias, labels, found, upstream, wants, ctx.plan)
        if torch.is_grad_enabled():  # create_graph=True
            given = [grad for grad in upstream if grad is not None]
            grads = _FirstOrderOnly.apply(*grads, hidden, weight, bias, *given)  # type: ignore[no-untyped-call]
        return (*grads, None, None, None)


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperatures: Tensor | None, plan: TilePlan
) -> Found:
    """Log-probs and entropy of the rows that count, and what backward needs to know."""
    with _on(hidden), _profiled("npu_backend.head.forward"):
        index = _indices(labels >= 0) if plan.compact and plan.may_ignore else None
        x = _counting_rows(hidden, labels, index, plan)
        labels = _take(labels, index)
        w = weight.to(plan.compute_dtype)
        planes = plan.kernels.label_scores(
            x, w, bias, labels, _take(temperatures, index), temperature=plan.temperature, **plan.transform
        )
        cache = _new_cache(x, plan)
        log_probs, entropy = plan.kernels.finish(_statistics(x, w, bias, planes, cache, plan), labels)
    return Found(index, log_probs, entropy, planes, cache)


def _statistics(
    x: Tensor, w: Tensor, bias: Tensor | None, planes: Tensor, cache: Tensor | None, plan: TilePlan
) -> Tensor:
    """The statistics of all columns in parts, [3, parts, M]; the scores of the first columns go to `cache`."""
    kept = 0 if cache is None else cache.shape[1]
    rows, vocab = x.shape[0], w.shape[0]
    if plan.fused is not None:
        spans = [slice(0, kept), slice(kept, vocab)] if 0 < kept < vocab else [slice(0, vocab)]
        counts = [plan.fused.parts(span.stop - span.start) for span in spans]
    else:
        spans = [*plan.tiles(0, kept, rows, 4), *plan.tiles(kept, vocab, rows, 4)]
        counts = [1] * len(spans)
        buffer = _new_tile(x, max(span.stop - span.start for span in spans), _product_dtype(x))
    partials = torch.empty(3, sum(counts), rows, dtype=torch.float32, device=x.device)
    if rows == 0:
        return partials
    first = 0
    for span, count in zip(spans, counts):
        part = partials[:, first : first + count]
        keep = cache[:, span] if span.start < kept and cache is not None else None
        if plan.fused is not None:
            plan.fused.statistics(x, w[span], keep, planes, part, logit_scale=plan.logit_scale)
        else:
            logits = buffer[:, : span.stop - span.start]
            _multiply(logits, x, w[span].t())
            plan.kernels.statistics(logits, keep, _take(bias, span), planes, part, **plan.transform)
        first += count
    return partials


def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    found: Found,
    upstream: tuple[Tensor | None, Tensor | None],
    wants: tuple[bool, bool, bool],
    plan: TilePlan,
) -> Gradients:
    """Gradients of hidden, weight and bias, each in its own dtype, None for those that nobody wants.

    Kept scores turn into their gradient in place where all rows take part.
    """
    index, all_labels = found.counting, labels
    with _on(hidden), _profiled("npu_backend.head.backward"):
        labels = _take(all_labels, index)
        grads = [None if grad is None else _take(grad, index).float().contiguous() for grad in upstream]
        planes, is_loud = plan.kernels.coefficients(
            found.planes, labels, found.log_probs, found.entropy, *grads, **plan.transform
        )
        loud = _indices(is_loud) if plan.compact else None
        if loud is not None:
            planes, labels = planes.index_select(1, loud), labels[loud]
            index = loud if index is None else index[loud]
        x = _counting_rows(hidden, all_labels, index, plan)
        if x.shape[0] == 0:
            return _zeros(hidden, wants[0]), _zeros(weight, wants[1]), _zeros(bias, wants[2])
        w = weight.to(plan.compute_dtype)
        tiles = _gradient_tiles(x, w, bias, labels, planes, found.cache, loud, plan)
        grad_x, grad_weight, grad_bias = _products(tiles, x, weight, w, bias, wants)
        if grad_x is not None:
            grad_x = grad_x.to(hidden.dtype)
            if index is not None:
                grad_x = torch.zeros_like(hidden).index_copy_(0, index, grad_x)
    return grad_x, grad_weight, grad_bias


def _products(
    tiles: Iterator[tuple[slice, Tensor]],
    x: Tensor,
    weight: Tensor,
    w: Tensor,
    bias: Tensor | None,
    wants: tuple[bool, bool, bool],
) -> Gradients:
    """Gradients of x [M, H], weight and bias from those of the logits. x's is float32 if it is a sum over tiles."""
    wants_x, wants_weight, wants_bias = wants
    grad_x: Tensor | None = None
    grad_weight = torch.empty_like(weight) if wants_weight else None
    grad_bias = torch.empty_like(bias) if bias is not None and wants_bias else None
    for span, grad_logits in tiles:
        with _profiled("npu_backend.head.backward.products"):
            if wants_x and grad_x is None:
                grad_x = torch.empty_like(x, dtype=x.dtype if span.stop == w.shape[0] else torch.float32)
                _multiply(grad_x, grad_logits, w[span])
            elif grad_x is not None:
                _multiply(grad_x, grad_logits, w[span], add=True)
            if grad_weight is not None:
                _multiply(grad_weight[span], grad_logits.t(), x)
            if grad_bias is not None:
                grad_bias[span] = grad_logits.sum(dim=0, dtype=torch.float32).to(grad_bias.dtype)
        del grad_logits
    return grad_x, grad_weight, grad_bias


def _gradient_tiles(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    planes: Tensor,
    cache: Tensor | None,
    loud: Tensor | None,
    plan: TilePlan,
) -> Iterator[tuple[slice, Tensor]]:
    """The gradient of the logits, tile by tile: the columns, and [M, C] in the compute dtype, valid until the next."""
    rows, vocab = x.shape[0], w.shape[0]
    kept = 0 if cache is None else cache.shape[1]
    start = 0
    if cache is not None and loud is None and plan.consume:
        target = cache.view(plan.compute_dtype)
        with _profiled("npu_backend.head.backward.scores"):
            plan.kernels.gradient(cache, target, None, None, planes, scores=True, **plan.transform)
            plan.kernels.label_gradient(target, labels, 0, planes)
        yield slice(0, kept), target
        start = kept
    if start == vocab:
        return
    element_bytes = x.element_size() + (0 if plan.fused is not None else 4)
    spans = [*plan.tiles(start, kept, rows, element_bytes), *plan.tiles(kept, vocab, rows, element_bytes)]
    width = max(span.stop - span.start for span in spans)
    buffer = _new_tile(x, width, x.dtype)
    product = _new_tile(x, width, _product_dtype(x)) if plan.fused is None and kept < vocab else None
    for span in spans:
        target = buffer[:, : span.stop - span.start]
        with _profiled("npu_backend.head.backward.scores"):
            if cache is not None and span.start < kept:
                plan.kernels.gradient(cache[:, span], target, loud, None, planes, scores=True, **plan.transform)
            elif plan.fused is not None:
                plan.fused.gradient(x, w[span], target, planes, logit_scale=plan.logit_scale)
            else:
                assert product is not None
                logits = product[:, : span.stop - span.start]
                _multiply(logits, x, w[span].t())
                part = _take(bias, span)
                plan.kernels.gradient(logits, target, None, part, planes, scores=False, **plan.transform)
            plan.kernels.label_gradient(target, labels, span.start, planes)
        yield span, target


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
    else:  # an older torch, or Triton's interpreter on the CPU
        product = torch.mm(a, b) if a.is_cuda else torch.mm(a.float(), b.float())
        out.add_(product) if add else out.copy_(product)


def _new_cache(x: Tensor, plan: TilePlan) -> Tensor | None:
    """Memory for the scores to keep; None where there is none to keep or no memory for it after all."""
    if plan.cache_columns == 0:
        return None
    try:
        return _new_tile(x, plan.cache_columns, plan.kept_dtype)
    except torch.OutOfMemoryError:
        warn_once("head.cache", f"PPO head: no memory for kept scores; backward recomputes them ({_LESS_MEMORY})")
        return None


def _product_dtype(x: Tensor) -> torch.dtype:
    """Of the logits that a library GEMM writes: float32 wherever it can, whatever it multiplies."""
    return torch.float32 if not x.is_cuda or hasattr(torch.ops.aten.mm, "dtype_out") else x.dtype


def kept_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """Of kept scores: as large as the compute dtype, since their gradient takes their place."""
    return torch.float16 if compute_dtype.itemsize == 2 else compute_dtype


def padded_columns(columns: int) -> int:
    """The row stride of a tile: rows begin at multiples of `_ALIGN` elements."""
    return -(-columns // _ALIGN) * _ALIGN


def _new_tile(x: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised [M, columns]."""
    return torch.empty(x.shape[0], padded_columns(columns), dtype=dtype, device=x.device)[:, :columns]


def whole_tile(tile: Tensor) -> Tensor:
    """What `_new_tile` took a view of."""
    return tile.as_strided((tile.shape[0], tile.stride(0)), tile.stride())


def _counting_rows(hidden: Tensor, labels: Tensor, index: Tensor | None, plan: TilePlan) -> Tensor:
    """The hidden states [M, H] that count, in the compute dtype.

    Where ignored rows are not left out they are read as zeros: what padding tokens hold, NaN included, reaches nothing.
    """
    if index is not None:
        hidden = hidden.index_select(0, index)
    elif plan.may_ignore and not plan.compact:
        hidden = hidden.masked_fill((labels < 0)[:, None], 0.0)
    return hidden.to(plan.compute_dtype).contiguous()


def _indices(counts: Tensor) -> Tensor | None:
    """Indices of the rows that count, or None if all do. Synchronises with the host."""
    indices = counts.nonzero()[:, 0]
    return None if indices.numel() == counts.numel() else indices


def _take(values: Tensor | None, at: Tensor | slice | None) -> Any:
    return values if values is None or at is None else values[at]


def _zeros(like: Tensor | None, wanted: bool) -> Tensor | None:
    return torch.zeros_like(like) if like is not None and wanted else None


def _spread(values: Tensor, labels: Tensor, index: Tensor | None) -> Tensor:
    """Values of the rows that count, back in the places of all rows; zero elsewhere."""
    if index is None:
        return values
    return torch.zeros(labels.shape, dtype=values.dtype, device=values.device).index_copy_(0, index, values)


def _profiled(name: str) -> AbstractContextManager[Any]:
    """A range for the profiler, where one is at work: its entry would cost more than many a kernel's launch."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


@contextmanager
def _on(hidden: Tensor) -> Iterator[None]:
    """Kernels run on the tensors' device, whatever the current one is; and no autocast changes settled dtypes."""
    device = torch.cuda.device(hidden.device) if hidden.is_cuda else nullcontext()
    with device, torch.autocast(hidden.device.type, enabled=False):
        yield

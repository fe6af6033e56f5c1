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

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from npu_backend.head import vocab_parallel
from npu_backend.head.selection import FirstOrderOnly, Later, indices, spread, sum_over_ranks, take, within
from npu_backend.head.tiles import ALIGN, kept_dtype, multiply, new_tile, product_dtype
from npu_backend.log import warn_once

_LESS_MEMORY = "a smaller logits_cache_gib, or 0, asks for less"
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


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
        group: the process group among whose ranks the vocabulary is divided, or None.
        sum_hidden: sum the hidden states' gradient over `group`.
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
    group: Any = None
    sum_hidden: bool = False

    @property
    def transform(self) -> dict[str, float | None]:
        """What kernels need to make scores of logits."""
        return {"logit_scale": self.logit_scale, "softcap": self.softcap}

    @property
    def kept_dtype(self) -> torch.dtype:
        return kept_dtype(self.compute_dtype)

    def tiles(self, start: int, stop: int, rows: int, element_bytes: int) -> Iterator[slice]:
        """Tiles of columns start..stop, of about one width, whose [rows, C] elements keep within `tile_bytes`."""
        largest = max(ALIGN, self.tile_bytes // (max(rows, 1) * element_bytes) // ALIGN * ALIGN)
        count = max(1, -(-(stop - start) // largest))
        width = -(-(stop - start) // (count * ALIGN)) * ALIGN
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

    Returns log-probs [N] and entropy [N] | None in float32. Labels are int64, negative where the row is ignored, V
    where the label is in another rank's part of the vocabulary.
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
        log_probs = spread(found.log_probs, labels, found.counting)
        return log_probs, spread(found.entropy, labels, found.counting) if plan.calculate_entropy else None

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
            grads = FirstOrderOnly.apply(*grads, hidden, weight, bias, *given)  # type: ignore[no-untyped-call]
        return (*grads, None, None, None)


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperatures: Tensor | None, plan: TilePlan
) -> Found:
    """Log-probs and entropy of the rows that count, and what backward needs to know."""
    with _on(hidden), _profiled("npu_backend.head.forward"):
        index = indices(labels >= 0) if plan.compact and plan.may_ignore else None
        x = _counting_rows(hidden, labels, index, plan)
        labels = take(labels, index)
        w, bias = weight.to(plan.compute_dtype), _contiguous(bias)
        planes = plan.kernels.label_scores(
            x, w, bias, labels, take(temperatures, index), temperature=plan.temperature, **plan.transform
        )
        if plan.group is not None:
            dist.all_reduce(planes[1], group=plan.group)  # the base is 0 wherever the label is not
        cache = _new_cache(x, plan)
        partials = _statistics(x, w, bias, planes, cache, plan)
        if plan.group is not None:
            partials = vocab_parallel.gather_parts(plan.kernels.merge(partials), plan.group)
        log_probs, entropy = plan.kernels.finish(partials, labels)
    return Found(index, log_probs, entropy, planes, cache)


def _statistics(
    x: Tensor, w: Tensor, bias: Tensor | None, planes: Tensor, cache: Tensor | None, plan: TilePlan
) -> Tensor:
    """The statistics of all columns in parts, [3, parts, M]; the scores of the first columns go to `cache`.

    The fused kernel takes whole tiles of its own; what is left at the end of the vocabulary goes through the library.
    """
    kept = 0 if cache is None else cache.shape[1]
    rows, vocab = x.shape[0], w.shape[0]
    whole = 0 if plan.fused is None else plan.fused.whole_tiles(vocab)
    fused = [slice(*ends) for ends in itertools.pairwise(sorted({0, min(kept, whole), whole}))]
    others = [*plan.tiles(whole, max(whole, kept), rows, 4), *plan.tiles(max(whole, kept), vocab, rows, 4)]
    counts = [*(plan.fused.parts(span.stop - span.start) for span in fused if plan.fused), *[1] * len(others)]
    partials = torch.empty(3, sum(counts), rows, dtype=torch.float32, device=x.device)
    if rows == 0:
        return partials
    buffer = new_tile(x, max((span.stop - span.start for span in others), default=0), product_dtype(x))
    first = 0
    for span, count in zip([*fused, *others], counts):
        part = partials[:, first : first + count]
        keep = cache[:, span] if cache is not None and span.start < kept else None
        if plan.fused is not None and span.stop <= whole:
            plan.fused.statistics(x, w[span], keep, planes, part, logit_scale=plan.logit_scale)
        else:
            logits = buffer[:, : span.stop - span.start]
            multiply(logits, x, w[span].t())
            plan.kernels.statistics(logits, keep, take(bias, span), planes, part, **plan.transform)
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

    Kept scores turn into their gradient in place, those of the loud rows alone, which gather at the beginning. All of
    that is queued before the host knows how many they are, so that the device does not wait for it.
    """
    with _on(hidden), _profiled("npu_backend.head.backward"):
        all_labels, labels = labels, take(labels, found.counting)
        grads = [None if grad is None else take(grad, found.counting).float().contiguous() for grad in upstream]
        planes, is_loud = plan.kernels.coefficients(
            found.planes, labels, found.log_probs, found.entropy, *grads, **plan.transform
        )
        moves = plan.kernels.order(is_loud) if plan.compact else None
        loud_rows = None if moves is None else Later(moves[1])
        cache = found.cache
        if cache is not None and plan.consume and labels.numel():
            target = cache.view(plan.compute_dtype)
            with _profiled("npu_backend.head.backward.scores"):
                plan.kernels.gradient(cache, target, None, labels, 0, planes, moves, scores=True, **plan.transform)
            cache = target
        rows = labels.numel() if loud_rows is None else loud_rows.get()
        loud = None
        if moves is not None and rows < labels.numel():
            loud = moves[0][:rows]
            labels, planes = labels[loud], planes.index_select(1, loud)
            cache = None if cache is None else cache[:rows]
        index = within(found.counting, loud)
        x = _counting_rows(hidden, all_labels, index, plan)
        w = weight.to(plan.compute_dtype)
        tiles = _gradient_tiles(x, w, _contiguous(bias), labels, planes, cache, plan)
        grad_x, grad_weight, grad_bias = _products(tiles, x, weight, w, bias, wants)
        if grad_x is not None:
            grad_x = spread(grad_x.to(hidden.dtype), hidden, index)
            if plan.sum_hidden:
                grad_x = sum_over_ranks(grad_x, plan.group)
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
    if x.shape[0] == 0:
        return _zeros(x, wants_x), _zeros(weight, wants_weight), _zeros(bias, wants_bias)
    grad_weight = torch.empty_like(weight) if wants_weight else None
    grad_bias = torch.empty_like(bias) if bias is not None and wants_bias else None
    for span, grad_logits in tiles:
        with _profiled("npu_backend.head.backward.products"):
            if wants_x and grad_x is None:
                grad_x = torch.empty_like(x, dtype=x.dtype if span.stop == w.shape[0] else torch.float32)
                multiply(grad_x, grad_logits, w[span])
            elif grad_x is not None:
                multiply(grad_x, grad_logits, w[span], add=True)
            if grad_weight is not None:
                multiply(grad_weight[span], grad_logits.t(), x)
            if grad_bias is not None:
                grad_bias[span] = grad_logits.sum(dim=0, dtype=torch.float32).to(grad_bias.dtype)
        del grad_logits
    return grad_x, grad_weight, grad_bias


def _gradient_tiles(
    x: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor, planes: Tensor, cache: Tensor | None, plan: TilePlan
) -> Iterator[tuple[slice, Tensor]]:
    """The gradient of the logits, tile by tile: the columns, and [M, C] in the compute dtype, valid until the next.

    `cache` holds the gradient of the first columns already where it was consumed, else their scores.
    """
    rows, vocab = x.shape[0], w.shape[0]
    kept = 0 if cache is None else cache.shape[1]
    start = 0
    if cache is not None and plan.consume:
        yield slice(0, kept), cache
        start = kept
    if start == vocab:
        return
    element_bytes = x.element_size() + (0 if plan.fused is not None else 4)
    spans = [*plan.tiles(start, kept, rows, element_bytes), *plan.tiles(kept, vocab, rows, element_bytes)]
    width = max(span.stop - span.start for span in spans)
    buffer = new_tile(x, width, x.dtype)
    product = new_tile(x, width, product_dtype(x)) if plan.fused is None and kept < vocab else None
    for span in spans:
        target = buffer[:, : span.stop - span.start]
        with _profiled("npu_backend.head.backward.scores"):
            if cache is not None and span.start < kept:
                plan.kernels.gradient(
                    cache[:, span], target, None, labels, span.start, planes, scores=True, **plan.transform
                )
            elif plan.fused is not None:
                plan.fused.gradient(x, w[span], target, labels, span.start, planes, logit_scale=plan.logit_scale)
            else:
                assert product is not None
                logits = product[:, : span.stop - span.start]
                multiply(logits, x, w[span].t())
                plan.kernels.gradient(
                    logits, target, take(bias, span), labels, span.start, planes, scores=False, **plan.transform
                )
        yield span, target


def _new_cache(x: Tensor, plan: TilePlan) -> Tensor | None:
    """Memory for the scores to keep; None where there is none to keep or no memory for it after all."""
    if plan.cache_columns == 0:
        return None
    try:
        return new_tile(x, plan.cache_columns, plan.kept_dtype)
    except torch.OutOfMemoryError:
        warn_once("head.cache", f"PPO head: no memory for kept scores; backward recomputes them ({_LESS_MEMORY})")
        return None


def _counting_rows(hidden: Tensor, labels: Tensor, index: Tensor | None, plan: TilePlan) -> Tensor:
    """The hidden states [M, H] that count, in the compute dtype.

    Where ignored rows are not left out they are read as zeros: what padding tokens hold, NaN included, reaches nothing.
    """
    if index is not None:
        hidden = hidden.index_select(0, index)
    elif plan.may_ignore and not plan.compact:
        hidden = hidden.masked_fill((labels < 0)[:, None], 0.0)
    return hidden.to(plan.compute_dtype).contiguous()


def _contiguous(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.contiguous()


def _zeros(like: Tensor | None, wanted: bool) -> Tensor | None:
    return torch.zeros_like(like) if like is not None and wanted else None


def _profiled(name: str) -> AbstractContextManager[Any]:
    """A range for the profiler, where one is at work: its entry would cost more than many a kernel's launch."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


@contextmanager
def _on(hidden: Tensor) -> Iterator[None]:
    """Kernels run on the tensors' device, whatever the current one is; and no autocast changes settled dtypes."""
    device = torch.cuda.device(hidden.device) if hidden.is_cuda else nullcontext()
    with device, torch.autocast(hidden.device.type, enabled=False):
        yield

"""The PPO head's one autograd function: chunks of rows, a library GEMM per chunk, row kernels around it.

For each chunk of M rows, forward computes logits = x W^T and hands them to `rows_statistics`; backward computes them
again (or takes them from the cache), lets `rows_backward` turn them into their gradient, and multiplies it by W and x.
So the full [N, V] logits never exist. Everything here is shared by all devices: the row kernels are a parameter.
With a vocabulary that is divided among ranks, V is this rank's part, and `vocab_parallel` merges the statistics.

Rows that change nothing (`selection`) are left out where the plan says so; what remains is packed into full chunks.

Every GEMM is `aten::mm` and nothing else, so that whoever overrides that operator (with a batch-invariant one, say)
reaches the head too.

Autograd and sharding: the weight is saved as it was given, not cast or copied. FSDP2 frees the gathered parameter after
forward and fills the same storage again before backward, which is when the saved tensor is read.

Letters: N rows, M rows of a chunk, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from npu_backend.head import selection, vocab_parallel
from npu_backend.head.selection import FirstOrderOnly, spread, sum_over_ranks, take

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class ScoreTransform:
    """Logits to scores: z = cap(logit_scale * (logits + bias)) / temperature, cap(u) = softcap * tanh(u / softcap).

    Attributes:
        dtype: in which all of it is computed.
        bias: [V] in `dtype`, contiguous, or None.
        logit_scale: 1.0 for none.
        softcap: None for none.
        temperature: one number, 1.0 for none, or one per row: [M] in float32 or float64, contiguous.
    """

    dtype: torch.dtype
    bias: Tensor | None
    logit_scale: float
    softcap: float | None
    temperature: float | Tensor


class RowStatistics(NamedTuple):
    """Softmax statistics of rows, one vector each, in the score dtype.

    Attributes:
        of_label: the label's score; 0 where no column is the label's.
        peak: m, the largest score, or the dtype's lowest finite number where all are -inf.
        total: S = sum e^(z-m).
        weighted: sum e^(z-m) (z-m), or None where nobody wants the entropy.
    """

    of_label: Tensor
    peak: Tensor
    total: Tensor
    weighted: Tensor | None


class RowKernels(Protocol):
    """A module of row kernels; `rows_eager` says what each function has to do."""

    def rows_statistics(
        self, logits: Tensor, labels: Tensor, to_scores: ScoreTransform, *, calculate_entropy: bool
    ) -> RowStatistics: ...

    def rows_backward(
        self,
        logits: Tensor,
        labels: Tensor,
        to_scores: ScoreTransform,
        log_probs: Tensor,
        entropy: Tensor | None,
        peak: Tensor,
        total: Tensor,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Plan:
    """How one call is computed: everything that is not a tensor.

    Attributes:
        kernels: the row kernels.
        chunk_rows: M; the last chunk has fewer rows unless the caller has padded the labels.
        compute_dtype: of the GEMMs.
        logit_scale: see `ScoreTransform`.
        softcap: see `ScoreTransform`.
        temperature: one number; the function's `temperatures` take its place where they are given.
        calculate_entropy: False skips its work.
        cache_bytes: how many bytes of logits may be kept for backward.
        compact: leave out rows that change nothing, which takes a host synchronisation to find them.
        may_ignore: False where it is known that no row is ignored.
        multiple: of so many rows: the number of labels, and of the rows that remain where others are left out.
        group: the process group among whose ranks the vocabulary is divided, or None.
        sum_hidden: sum the hidden states' gradient over `group`.
    """

    kernels: RowKernels
    chunk_rows: int
    compute_dtype: torch.dtype
    logit_scale: float
    softcap: float | None
    temperature: float
    calculate_entropy: bool
    cache_bytes: int
    compact: bool = False
    may_ignore: bool = True
    multiple: int = 1
    group: Any = None
    sum_hidden: bool = False

    @property
    def score_dtype(self) -> torch.dtype:
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    def chunks(self, total: int) -> Iterator[slice]:
        for start in range(0, total, self.chunk_rows):
            yield slice(start, min(start + self.chunk_rows, total))

    def cached_chunks(self, vocab_size: int) -> int:
        return self.cache_bytes // (self.chunk_rows * vocab_size * self.compute_dtype.itemsize)

    def to_scores(self, bias: Tensor | None, temperatures: Tensor | None, rows: slice) -> ScoreTransform:
        return ScoreTransform(
            dtype=self.score_dtype,
            bias=None if bias is None else bias.to(self.score_dtype).contiguous(),
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            temperature=self.temperature if temperatures is None else temperatures[rows],
        )


class ChunkedHead(torch.autograd.Function):
    """apply(hidden [N, H], weight [V, H], bias [V] | None, labels [N'], temperatures [N'] | None, plan).

    Returns log-probs [N'] and entropy [N'] | None in the plan's score dtype. Labels are int64, negative where the row
    is ignored, V where the label is in another rank's part of the vocabulary. N' may exceed N: the rows beyond N are
    zeros (so that every chunk can have the same M); label them negative.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperatures: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        all_labels, counting = labels, None
        if plan.compact and plan.may_ignore:
            counting = selection.indices(selection.filled(labels >= 0, plan.multiple))
            labels, temperatures = take(labels, counting), take(temperatures, counting)
        of_label, peak, total = hidden.new_empty((3, *labels.shape), dtype=plan.score_dtype)
        weighted = torch.empty_like(total) if plan.calculate_entropy else None
        found = RowStatistics(of_label, peak, total, weighted)
        cache: list[Tensor] = []
        # The dtypes are settled; an autocast around forward, or around backward, must not change them again.
        with torch.autocast(hidden.device.type, enabled=False):
            weight_t = weight.to(plan.compute_dtype).t()
            for rows in plan.chunks(labels.numel()):
                logits = torch.mm(_hidden_rows(hidden, labels, rows, plan, counting), weight_t)
                to_scores = plan.to_scores(bias, temperatures, rows)
                of_chunk = plan.kernels.rows_statistics(
                    logits, labels[rows], to_scores, calculate_entropy=plan.calculate_entropy
                )
                for of_all, of_some in zip(found, of_chunk):
                    if of_all is not None and of_some is not None:
                        of_all[rows] = of_some
                if len(cache) < plan.cached_chunks(weight.shape[0]):
                    cache.append(logits)
                del logits  # before the next chunk's are allocated
        if plan.group is not None:
            found = vocab_parallel.merge(found, plan.group)
        log_probs, entropy = _finish(found, labels)
        ctx.plan = plan
        vectors = (labels, temperatures, log_probs, entropy, found.peak, found.total)
        ctx.save_for_backward(hidden, weight, bias, counting, *vectors, *cache)
        log_probs = spread(log_probs, all_labels, counting)
        return log_probs, None if entropy is None else spread(entropy, all_labels, counting)

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None, None
        saved = ctx.saved_tensors  # read once: whatever hooks unpack them (checkpoint's allow it only once)
        hidden, weight, bias, *_ = saved
        upstream = (grad_log_probs, grad_entropy)
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            grads = _gradients(ctx.plan, saved, ctx.needs_input_grad[:3], upstream)
        if torch.is_grad_enabled():  # create_graph=True
            given = [grad for grad in upstream if grad is not None]
            grads = FirstOrderOnly.apply(*grads, hidden, weight, bias, *given)  # type: ignore[no-untyped-call]
        return (*grads, None, None, None)


def _finish(found: RowStatistics, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    """Log-prob and entropy of each row, [N'] each, zeros where the label is negative.

    All is relative to the row's maximum, so that nothing large is subtracted from anything large: the log-prob is never
    positive, the entropy never negative.
    """
    ignored = labels < 0
    log_total = found.total.log()
    log_probs = ((found.of_label - found.peak) - log_total).masked_fill(ignored, 0.0)
    entropy = None
    if found.weighted is not None:
        entropy = (log_total - found.weighted / found.total).masked_fill(ignored, 0.0)
    return log_probs, entropy


def _gradients(
    plan: Plan,
    saved: tuple[Any, ...],
    wants: tuple[bool, bool, bool],
    upstream: tuple[Tensor | None, Tensor | None],
) -> Gradients:
    """Gradients of hidden, weight and bias, each in its own dtype, None for those that nobody asked for."""
    hidden, weight, bias, counting, *vectors_and_cache = saved
    vectors, cache = vectors_and_cache[:6], vectors_and_cache[6:]
    given = [_upstream(take(grad, counting), vectors[0], plan) for grad in upstream]
    loud: Tensor | None = None
    per_chunk: list[int] = []
    if plan.compact:
        counts = selection.filled(selection.is_loud(given), plan.multiple)
        loud, per_chunk = selection.indices_by_chunk(counts, plan.chunk_rows)
    # From here on: the loud rows alone, in chunks of their own.
    vectors = [take(vector, loud) for vector in (*vectors, *given)]
    index, labels = selection.within(counting, loud), vectors[0]
    # A sum over chunks is kept in the score dtype and rounded once; a single chunk has nothing to add to.
    sum_dtype = plan.score_dtype if labels.numel() > plan.chunk_rows else plan.compute_dtype
    wants_hidden, wants_weight, wants_bias = wants
    grad_hidden = torch.empty_like(hidden[: labels.numel()]) if wants_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if wants_weight else None
    grad_bias = torch.zeros_like(bias, dtype=plan.score_dtype) if wants_bias else None
    compute_weight = weight.to(plan.compute_dtype)
    for rows in plan.chunks(labels.numel()):
        x = _hidden_rows(hidden, labels, rows, plan, index)
        logits = _kept_logits(cache, rows, loud, per_chunk, plan.chunk_rows)
        if logits is None:
            logits = torch.mm(x, compute_weight.t())
        of_labels, temperatures, *others = (take(vector, rows) for vector in vectors)
        to_scores = plan.to_scores(bias, temperatures, slice(None))
        grad_logits = plan.kernels.rows_backward(logits, of_labels, to_scores, *others)
        if grad_hidden is not None:
            real_rows = grad_hidden[rows]  # without those that pad the last chunk
            real_rows.copy_(torch.mm(grad_logits, compute_weight)[: real_rows.shape[0]])
        if grad_weight is not None:
            grad_weight.add_(torch.mm(grad_logits.t(), x))
        if grad_bias is not None:
            grad_bias.add_(grad_logits.sum(dim=0, dtype=plan.score_dtype))
        del logits, grad_logits  # before the next chunk's are allocated
    if grad_hidden is not None:
        grad_hidden = spread(grad_hidden, hidden, index)
        if plan.sum_hidden:
            grad_hidden = sum_over_ranks(grad_hidden, plan.group)
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None else grad_bias.to(bias.dtype),
    )


def _kept_logits(
    cache: list[Tensor], rows: slice, loud: Tensor | None, per_chunk: list[int], chunk_rows: int
) -> Tensor | None:
    """The logits of a chunk of backward, if forward kept those of all its rows.

    They are `loud[rows]`, or just `rows` without; of the loud rows so many are `per_chunk` of forward.
    """
    if loud is None:
        number = rows.start // chunk_rows
        return cache[number] if number < len(cache) else None
    if rows.stop > sum(per_chunk[: len(cache)]):
        return None
    pieces, stop = [], 0
    for number, (logits, count) in enumerate(zip(cache, per_chunk)):
        start, stop = stop, stop + count
        here = loud[max(start, rows.start) : min(stop, rows.stop)]
        if here.numel():
            pieces.append(logits.index_select(0, here - number * chunk_rows))
    return torch.cat(pieces)


def _hidden_rows(hidden: Tensor, labels: Tensor, rows: slice, plan: Plan, index: Tensor | None = None) -> Tensor:
    """The chunk's hidden states [M, H] in the compute dtype, zero-padded to M rows.

    `labels` are those of the rows of `hidden` that `index` picks, if it is given. It picks none of the padding: that
    comes last and is less than a chunk, and where rows are left out while chunks stay full, at least a chunk is.

    Ignored rows are read as zeros: whatever padding tokens hold (NaN included) reaches neither an output nor, as
    0 * NaN, the weight's gradient.
    """
    x = (hidden[rows] if index is None else hidden.index_select(0, index[rows])).to(plan.compute_dtype)
    missing = (rows.stop - rows.start) - x.shape[0]
    if missing:
        x = pad(x, (0, 0, 0, missing))
    return x.masked_fill((labels[rows] < 0)[:, None], 0.0)


def _upstream(grad: Tensor | None, labels: Tensor, plan: Plan) -> Tensor | None:
    """An upstream gradient as the row kernels want it: score dtype, contiguous (it may be strided or expanded)."""
    if grad is None:
        return None
    return grad.to(plan.score_dtype).masked_fill(labels < 0, 0.0).contiguous()

"""The PPO head's autograd function on an NPU: `chunked` turned by a right angle, tiles of the vocabulary for all rows.

A chunk of rows leaves a part of a sum for the whole weight's gradient, which has to be read, added to and written for
every chunk: for a large vocabulary more bytes than the logits. A tile of the vocabulary leaves its part of that
gradient finished: one GEMM over all rows, written to its place and rounded once, and no float32 buffer of the weight's
size. What is summed over tiles instead, in float32, is the small gradient of the hidden states.

To the row kernels a tile is what they know from `vocab_parallel`: a part of the columns, with labels that may be
elsewhere. They may put the gradient of the logits in the place of the logits. GEMMs are `aten::mm`. Rows that change
nothing (`selection`) are left out where the plan says so.

Letters: N rows, M of them that are left, H hidden size, V vocabulary size (this rank's part where it is divided),
C columns of a tile, P tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from npu_backend.head import selection, vocab_parallel
from npu_backend.head.chunked import Plan, RowStatistics, _finish, _hidden_rows, _upstream
from npu_backend.head.selection import FirstOrderOnly, spread, sum_over_ranks, take

# A tile is as large as a chunk of `chunk_rows` would be, but no narrower than this, a block of the row kernels: what
# they do once per row must stay small beside what they do per column.
NARROWEST = 8192
_ALIGN = 256  # columns


class VocabTiledHead(torch.autograd.Function):
    """apply(hidden [N, H], weight [V, H], bias [V] | None, labels [N], temperatures [N] | None, plan): `ChunkedHead`.

    N is at least 1. The plan's `chunk_rows` bounds a tile: it has about as many elements as that many rows of logits.
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
            counting = selection.indices(_and_one(labels >= 0))
            labels, temperatures = take(labels, counting), take(temperatures, counting)
        parts: list[RowStatistics] = []
        cache: list[Tensor] = []
        with torch.autocast(hidden.device.type, enabled=False):
            x, w = _operands(hidden, weight, labels, plan, counting)
            for index, tile in enumerate(_tiles(labels.numel(), weight.shape[0], plan.chunk_rows)):
                logits = torch.mm(x, w[tile].t())
                to_scores = plan.to_scores(None if bias is None else bias[tile], temperatures, slice(None))
                parts.append(
                    plan.kernels.rows_statistics(
                        logits, labels - tile.start, to_scores, calculate_entropy=plan.calculate_entropy
                    )
                )
                # The first tiles without a gap: backward finds them by their number.
                if len(cache) == index and sum(kept.nbytes for kept in (*cache, logits)) <= plan.cache_bytes:
                    cache.append(logits)
                del logits  # before the next tile's are allocated
        found = merge_parts(_stacked(parts))
        if plan.group is not None:
            found = vocab_parallel.merge(found, plan.group)
        log_probs, entropy = _finish(found, labels)
        ctx.plan = plan
        ctx.cache_is_fresh = True
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
        hidden, weight, bias, counting, *vectors_and_cache = ctx.saved_tensors
        vectors, cache = vectors_and_cache[:6], vectors_and_cache[6:]
        if not ctx.cache_is_fresh:  # another backward (retain_graph): the first left gradients where logits were
            cache = []
        ctx.cache_is_fresh = False
        plan = ctx.plan
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            vectors += [_upstream(take(grad, counting), vectors[0], plan) for grad in (grad_log_probs, grad_entropy)]
            loud = selection.indices(_and_one(selection.is_loud(vectors[6:]))) if plan.compact else None
            index = selection.within(counting, loud)
            tiles = _gradient_tiles(hidden, weight, bias, index, vectors, cache, loud, plan)
            grads = _products(tiles, hidden, weight, bias, index, ctx.needs_input_grad[:3], plan)
        if torch.is_grad_enabled():  # create_graph=True
            given = [grad for grad in (grad_log_probs, grad_entropy) if grad is not None]
            grads = FirstOrderOnly.apply(*grads, hidden, weight, bias, *given)  # type: ignore[no-untyped-call]
        return (*grads, None, None, None)


def _stacked(parts: list[RowStatistics]) -> RowStatistics:
    weighted = [part.weighted for part in parts if part.weighted is not None]
    return RowStatistics(
        of_label=torch.stack([part.of_label for part in parts]),
        peak=torch.stack([part.peak for part in parts]),
        total=torch.stack([part.total for part in parts]),
        weighted=torch.stack(weighted) if weighted else None,
    )


def merge_parts(parts: RowStatistics) -> RowStatistics:
    """The statistics of all columns, [N] each, from those of parts of them, [P, N] each."""
    peak = parts.peak.amax(dim=0)
    moved = parts.peak - peak
    shrink = moved.exp()
    weighted = None
    if parts.weighted is not None:
        moved = moved.masked_fill(shrink == 0.0, 0.0)  # -inf would make 0 * inf = NaN
        weighted = ((parts.weighted + parts.total * moved) * shrink).sum(dim=0)
    return RowStatistics(parts.of_label.sum(dim=0), peak, (parts.total * shrink).sum(dim=0), weighted)


def _gradient_tiles(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    vectors: list[Any],
    cache: list[Tensor],
    loud: Tensor | None,
    plan: Plan,
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Tile by tile: its columns, the gradient of its logits [M, C], the hidden states [M, H] and its weight [C, H].

    The M rows are `index` of the hidden states, and `loud` of what forward computed and kept.
    """
    tiles = _tiles(vectors[0].numel(), weight.shape[0], plan.chunk_rows)
    labels, temperatures, *others = (take(vector, loud) for vector in vectors)
    x, w = _operands(hidden, weight, labels, plan, index)
    for number, tile in enumerate(tiles):
        grad_logits = plan.kernels.rows_backward(
            take(cache[number], loud) if number < len(cache) else torch.mm(x, w[tile].t()),
            labels - tile.start,
            plan.to_scores(None if bias is None else bias[tile], temperatures, slice(None)),
            *others,
        )
        yield tile, grad_logits, x, w[tile]
        del grad_logits  # before the next tile's logits are allocated


def _products(
    tiles: Iterator[tuple[slice, Tensor, Tensor, Tensor]],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    wants: tuple[bool, bool, bool],
    plan: Plan,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, each in its own dtype, None for those that nobody wants."""
    like = hidden if index is None else hidden[: index.numel()]
    grad_hidden = torch.zeros_like(like, dtype=plan.score_dtype) if wants[0] else None
    grad_weight = torch.empty_like(weight) if wants[1] else None
    grad_bias = torch.empty_like(bias) if bias is not None and wants[2] else None
    for tile, grad_logits, x, w in tiles:
        if grad_hidden is not None:
            grad_hidden.add_(torch.mm(grad_logits, w))
        if grad_weight is not None:
            grad_weight[tile] = torch.mm(grad_logits.t(), x)
        if grad_bias is not None:
            grad_bias[tile] = grad_logits.sum(dim=0, dtype=plan.score_dtype)
        del grad_logits
    if grad_hidden is not None:
        grad_hidden = spread(grad_hidden, hidden, index)
        if plan.sum_hidden:
            grad_hidden = sum_over_ranks(grad_hidden, plan.group)
        grad_hidden = grad_hidden.to(hidden.dtype)
    return grad_hidden, grad_weight, grad_bias


def _and_one(counts: Tensor) -> Tensor:
    """The row kernels take no empty batch: the first row counts in any case."""
    counts[0] = True
    return counts


def _operands(
    hidden: Tensor, weight: Tensor, labels: Tensor, plan: Plan, index: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of the GEMMs, in the compute dtype: hidden states [M, H], zeros where ignored, and weight [V, H]."""
    return _hidden_rows(hidden, labels, slice(0, labels.numel()), plan, index), weight.to(plan.compute_dtype)


def _tiles(rows: int, vocab_size: int, chunk_rows: int) -> Iterator[slice]:
    """Tiles of columns, of about one width: as many elements as `chunk_rows` rows of logits have, or a little more."""
    widest = max(NARROWEST, chunk_rows * vocab_size // rows)
    count = -(-vocab_size // widest)
    width = -(-vocab_size // (count * _ALIGN)) * _ALIGN
    for first in range(0, vocab_size, width):
        yield slice(first, min(first + width, vocab_size))

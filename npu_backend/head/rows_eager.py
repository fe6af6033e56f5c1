"""The row kernels of the PPO head in plain torch: what is done to one chunk of logits, in each direction.

A row-kernel module has these two functions and nothing else; `chunked.py` calls them and owns everything around them.
Common to both:

    logits  [M, V] as the GEMM wrote them, in the compute dtype. Forward must leave them alone (they may be cached).
    labels  [M] int64; a negative label marks a row that is ignored (what it gets is not used), V one whose label is not
            among these columns but in another rank's part of the vocabulary.
    to_scores  the `ScoreTransform` from logits to scores z, whose softmax is the policy.

All statistics are in `to_scores.dtype`: float32, or float64 for float64 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npu_backend.head.chunked import RowStatistics, ScoreTransform

# exp of it is 0 even in float64, and 0 times it is 0: it stands for -inf where -inf would make 0 * inf = NaN.
_NEVER = -1000.0


def rows_statistics(
    logits: Tensor, labels: Tensor, to_scores: ScoreTransform, *, calculate_entropy: bool
) -> RowStatistics:
    """The statistics of each row over these columns, all [M]. What is summed is relative to the row's maximum."""
    scores = _scores(logits, to_scores)[0]
    column, is_here = _columns_of(labels, scores)
    of_label = scores.gather(1, column)[:, 0].masked_fill(~is_here, 0.0)
    peak = scores.amax(dim=1).clamp_(min=torch.finfo(scores.dtype).min)
    shifted = scores.sub_(peak[:, None])
    if not calculate_entropy:
        return RowStatistics(of_label, peak, shifted.exp_().sum(dim=1), None)
    weights = shifted.exp()
    total = weights.sum(dim=1)
    return RowStatistics(of_label, peak, total, weights.mul_(shifted.clamp_(min=_NEVER)).sum(dim=1))


def rows_backward(
    logits: Tensor,
    labels: Tensor,
    to_scores: ScoreTransform,
    log_probs: Tensor,
    entropy: Tensor | None,
    peak: Tensor,
    total: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Gradient of the logits, [M, V] in their dtype, rounded to it once.

    `log_probs`, `entropy`, `peak` and `total` are those of the whole vocabulary. The upstream gradients are [M],
    contiguous, in `to_scores.dtype`, zero where the label is negative; at least one of them is given.

    d log-prob_y / d z_j = [j = y] - p_j and d entropy / d z_j = -p_j (log p_j + entropy). At the label 1 - p is taken
    as -expm1(log-prob): the difference of two numbers near 1 would lose what matters for a confident policy. Scores are
    taken relative to the maximum here too, p_j = e^(z_j - m) / S, and what belongs to a row is multiplied as a vector.
    """
    scores, saturation = _scores(logits, to_scores)
    shifted = scores.sub_(peak[:, None])
    weights = shifted.exp()
    grad = None
    if grad_entropy is not None:
        assert entropy is not None  # its gradient exists only if it does
        from_shifted = entropy - total.log()  # log p + entropy = (z - m) + this
        of_entropy = shifted.clamp_(min=_NEVER).add_(from_shifted[:, None]).mul_(weights)
        grad = of_entropy.mul_((-grad_entropy / total)[:, None])
    if grad_log_probs is not None:
        column, is_here = _columns_of(labels, weights)
        at_label = torch.where(is_here, log_probs.expm1() * total, weights.gather(1, column)[:, 0])
        of_log_probs = weights.scatter_(1, column, at_label[:, None]).mul_((-grad_log_probs / total)[:, None])
        grad = of_log_probs if grad is None else grad.add_(of_log_probs)
    assert grad is not None
    return _scores_backward(grad, saturation, to_scores).to(logits.dtype)


def _columns_of(labels: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The column of each label, [M, 1] and always a valid one, and whether it really is the label's, [M]."""
    vocab_size = scores.shape[1]
    return labels.clamp(0, vocab_size - 1)[:, None], (labels >= 0) & (labels < vocab_size)


def _scores(logits: Tensor, to_scores: ScoreTransform) -> tuple[Tensor, Tensor | None]:
    """A fresh buffer of scores, and tanh's output if there is a softcap (its derivative needs it)."""
    z = logits.to(to_scores.dtype, copy=True)
    saturation = None
    if to_scores.bias is not None:
        z.add_(to_scores.bias)
    if to_scores.logit_scale != 1.0:
        z.mul_(to_scores.logit_scale)
    if to_scores.softcap is not None:
        saturation = z.div_(to_scores.softcap).tanh_()
        z = saturation * to_scores.softcap
    z = _divide(z, to_scores.temperature)
    return z, saturation


def _scores_backward(grad: Tensor, saturation: Tensor | None, to_scores: ScoreTransform) -> Tensor:
    """The same chain backwards, in place."""
    grad = _divide(grad, to_scores.temperature)
    if saturation is not None:
        grad.mul_(saturation.square_().neg_().add_(1.0))
    if to_scores.logit_scale != 1.0:
        grad.mul_(to_scores.logit_scale)
    return grad


def _divide(z: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return z.div_(temperature[:, None])
    return z if temperature == 1.0 else z.div_(temperature)

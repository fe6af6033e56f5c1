"""The whole model with every operator patched against the unpatched one: log-probs of the tokens that it was given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from npu_backend.verification import models
from npu_backend.verification.replay import Comparison, Float32IsFloat64, compare_one

MOST_PARAMETERS = 10**9  # of a model whose float64 copy is made on the CPU


def compare(
    model: nn.Module,
    unpatched: Callable[[], contextlib.AbstractContextManager[None]],
    fresh: Callable[[], nn.Module],
    dtypes: Sequence[torch.dtype | None],
) -> Iterator[tuple[str, Comparison]]:
    """Name of the dtype, and the comparison of the log-probs; nothing for a model too large for a float64 copy.

    Args:
        model: the patched model.
        unpatched: a context in which the originals are in place.
        fresh: a copy of the model, of what is in place.
        dtypes: those to compare in; None is the model's own.
    """
    if sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS:
        return
    some = next(model.parameters())
    with unpatched():
        with Float32IsFloat64():
            reference = _log_probs(fresh(), torch.float64, torch.device("cpu"))
        eager = [_log_probs(fresh(), dtype or some.dtype, some.device) for dtype in dtypes]
    for dtype, plain in zip(dtypes, eager):
        patched = _log_probs(fresh(), dtype or some.dtype, some.device)
        yield str(dtype or some.dtype).removeprefix("torch."), compare_one(patched, plain, reference)


@torch.no_grad()
def _log_probs(model: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Log-probs [sequences, tokens - 1] of each next token, in float32, or float64 where the model is."""
    model = model.to(device, dtype)
    inputs = models.inputs(model)
    logits = type(model).forward(model, **inputs, use_cache=False).logits[:, :-1]
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    log_probs: Tensor = scores.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    return log_probs

"""Which rows take part in the PPO head's work, and their way there and back: what `chunked` and `tiled` share.

Two kinds of rows can change nothing: ignored rows, in both directions, and in backward rows whose upstream gradients
are exactly zero (prompt and padding tokens, clipped ratios, groups without an advantage). The others count, and those
that still do in backward are called loud. To leave rows out the host has to know how many remain: one synchronisation
in each direction.

Letters: N rows of a call, M rows that are left, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from npu_backend.errors import BackendUnavailableError

_compaction: ContextVar[bool | None] = ContextVar("npu_backend_row_compaction", default=None)


@contextmanager
def row_compaction(enabled: bool) -> Iterator[None]:
    """Whether rows that change nothing are left out. Left to itself only `triton` on CUDA does so.

    Without it the head does not wait for the device. A CUDA graph being captured and torch.compile do without it in
    any case.
    """
    token = _compaction.set(enabled)
    try:
        yield
    finally:
        _compaction.reset(token)


def leaves_rows_out(hidden: Tensor, *, default: bool) -> bool:
    """Whether this call does, where `default` is the backend's own way."""
    if torch.compiler.is_compiling() or (hidden.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    wanted = _compaction.get()
    return default if wanted is None else wanted


def indices(counts: Tensor) -> Tensor | None:
    """Indices of the rows that count, or None if all do. Synchronises with the host."""
    found = counts.nonzero()[:, 0]
    return None if found.numel() == counts.numel() else found


def indices_by_chunk(counts: Tensor, chunk_rows: int) -> tuple[Tensor | None, list[int]]:
    """As `indices`, and how many of them are in each chunk of that many rows. Still one synchronisation."""
    chunk_rows = min(chunk_rows, max(counts.numel(), 1))
    per_chunk: list[int] = pad(counts, (0, -counts.numel() % chunk_rows)).view(-1, chunk_rows).sum(dim=1).tolist()
    found = sum(per_chunk)
    if found == counts.numel():
        return None, per_chunk
    # The host knows how many there are, so that nothing waits for their places: they are first in a stable order.
    return counts.logical_not().byte().argsort(stable=True)[:found], per_chunk


def is_loud(upstream: Iterable[Tensor | None]) -> Tensor:
    """Which rows have an upstream gradient, [M] bool. At least one of the gradients, [M] each, is given."""
    loud = [grad != 0 for grad in upstream if grad is not None]
    return loud[0] if len(loud) == 1 else loud[0] | loud[1]


def filled(counts: Tensor, multiple: int) -> Tensor:
    """Let the first of the other rows count too, until it is a multiple of so many rows that do (or all of them)."""
    if multiple == 1:
        return counts
    missing = -counts.sum() % multiple
    return counts | (counts.logical_not().cumsum(0) <= missing)


def within(outer: Tensor | None, inner: Tensor | None) -> Tensor | None:
    """Indices among all rows, where `inner` are indices among the rows at `outer`; None stands for all of them."""
    return inner if outer is None else take(outer, inner)


def take(values: Any, at: Tensor | slice | None) -> Any:
    """The values at some places; as they are where either is None."""
    return values if values is None or at is None else values[at]


def spread(values: Tensor, like: Tensor, index: Tensor | None) -> Tensor:
    """Values of some rows back in the places of all rows of `like`; zero elsewhere."""
    if index is None:
        return values
    return values.new_zeros((like.shape[0], *values.shape[1:])).index_copy_(0, index, values)


def sum_over_ranks(grad_hidden: Tensor, group: Any) -> Tensor:
    """The sum over the ranks among whom the vocabulary is divided: each has a part of the hidden states' gradient."""
    grad_hidden = grad_hidden.contiguous()
    dist.all_reduce(grad_hidden, group=group)
    return grad_hidden


class Later:
    """A number of the device's, on its way to the host while other work is queued."""

    def __init__(self, number: Tensor) -> None:
        self._event = None
        self._number = number
        if number.is_cuda:
            self._number = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def get(self) -> int:
        """The number. Waits for what was queued before it, not for what came after."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._number)


class FirstOrderOnly(torch.autograd.Function):
    """Passes gradients on; differentiating them again is an error. The other inputs only connect the graph."""

    @staticmethod
    def forward(
        ctx: Any, grad_hidden: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return grad_hidden, grad_weight, grad_bias

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise BackendUnavailableError(
            "linear_log_prob has no second derivative, and something differentiates its gradients (create_graph=True, "
            "a gradient penalty, a Hessian product). Detach the gradients, or compute that loss from full logits."
        )

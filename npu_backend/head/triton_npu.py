"""Backend `triton` on an NPU: aclnn GEMMs around Triton-Ascend row kernels, used once they have passed a trial here.

No device has run these kernels yet, and what compiles depends on the releases of triton-ascend and CANN. So the first
call of a process compiles those that it needs and compares them with plain torch on a few rows. What goes wrong there,
the compiler's message included, is the reason for which `torch` takes the call; it costs one trial per process.

On a virtual NPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from npu_backend import triton_interpreter, virtual_npu
from npu_backend.head import ascend_launches, rows_ascend, rows_eager
from npu_backend.head.chunked import Plan, ScoreTransform, _finish, _hidden_rows
from npu_backend.head.inputs import HeadInputs
from npu_backend.head.selection import leaves_rows_out
from npu_backend.head.vocab_tiles import VocabTiledHead, merge_parts

_TRIAL_ERROR = 1e-3  # between float32 arithmetic of two kinds, on scores of a few units; a wrong kernel is off by far
_TRIAL_COLUMNS = 2**13 + 5  # more than a block; what is compiled does not depend on how many
_MESSAGE = 4000  # characters of a compiler's message, its end
_fused: ContextVar[bool] = ContextVar("npu_backend_fused_forward", default=False)


@contextmanager
def fused_forward(enabled: bool = True) -> Iterator[None]:
    """Let calls that need no gradient keep their logits on chip: a kernel of cube and vector cores does GEMM and
    statistics. Off by default: whether it is faster than the library's GEMM no device has measured.

    It takes calls without bias and softcap; others, and those of a vocabulary divided among ranks, run as usual.
    """
    token = _fused.set(enabled)
    try:
        yield
    finally:
        _fused.reset(token)


def why_unusable(device: torch.device, dtype: torch.dtype, given: HeadInputs | None = None) -> str | None:
    """None if the kernels can run on `device` and compute `given` in `dtype`, else the reason, the compiler's words
    included. Without `given` a plain output layer is meant.

    The first call for a device, dtype and form of output layer compiles the kernels and tries them.
    """
    if torch.compiler.is_compiling():
        return "torch.compile does not trace the kernels for an NPU"
    if dtype == torch.float64:
        return "the kernels compute in float32, and these inputs are float64"
    if virtual_npu.is_active():
        reason = triton_interpreter.why_unusable()
        if reason is not None:
            return f"a virtual NPU runs Triton kernels in Triton's interpreter: {reason}"
        triton_interpreter.activate()
    elif importlib.util.find_spec("triton") is None:
        return "triton-ascend is not installed"
    if given is None:
        return _trial(device, dtype, False, False, False)
    return _trial(device, dtype, given.bias is not None, given.softcap is not None, given.logit_scale <= 0.0)


def log_prob_and_entropy(
    given: HeadInputs,
    dtype: torch.dtype,
    *,
    calculate_entropy: bool,
    cache_bytes: int | None,
    chunk_rows: int,
    needs_backward: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [N] and entropy [N] | None in float32.

    Args:
        given: checked inputs, at least one row.
        dtype: of the GEMMs.
        calculate_entropy: False returns None for it.
        cache_bytes: of logits that may be kept for backward; None, for `auto`, keeps none: that it pays on an NPU
            nobody has measured.
        chunk_rows: a tile has as many elements as that many rows of logits.
        needs_backward: a gradient is wanted.
    """
    plan = Plan(
        kernels=rows_ascend,
        chunk_rows=chunk_rows,
        compute_dtype=dtype,
        logit_scale=given.logit_scale,
        softcap=given.softcap,
        temperature=given.temperature,
        calculate_entropy=calculate_entropy,
        cache_bytes=(cache_bytes or 0) if needs_backward else 0,
        compact=leaves_rows_out(given.hidden, default=False),
        may_ignore=given.may_ignore,
        group=given.group,
        sum_hidden=given.sums_hidden,
    )
    with _on(given.hidden.device):
        if not needs_backward and _takes_fused(given):
            return _fused_forward(given, plan)
        outputs: tuple[Tensor, Tensor | None] = VocabTiledHead.apply(  # type: ignore[no-untyped-call]
            given.hidden, given.weight, given.bias, given.labels, given.temperatures, plan
        )
    return outputs


def _takes_fused(given: HeadInputs) -> bool:
    plain = given.bias is None and given.softcap is None and given.group is None
    return (
        _fused.get()
        and plain
        and ascend_launches.fused_forward_fits(rows_ascend.chip(given.hidden.device), given.weight.shape[0])
    )


def _fused_forward(given: HeadInputs, plan: Plan) -> tuple[Tensor, Tensor | None]:
    labels = given.labels
    x = _hidden_rows(given.hidden, labels, slice(0, labels.numel()), plan).contiguous()
    w = given.weight.to(plan.compute_dtype).contiguous()
    to_scores = plan.to_scores(None, given.temperatures, slice(None))
    log_probs, entropy = _finish(merge_parts(rows_ascend.fused_statistics(x, w, labels, to_scores)), labels)
    # The label's score has its own dot product: the last bit could make a log-prob positive.
    return log_probs.clamp_(max=0.0), entropy if plan.calculate_entropy else None


@functools.cache
def _trial(device: torch.device, dtype: torch.dtype, bias: bool, softcap: bool, negative: bool) -> str | None:
    """Compile and run every kernel that such calls need; None if they agree with plain torch, else the reason."""
    random = torch.Generator().manual_seed(0)
    columns = _TRIAL_COLUMNS
    to_scores = ScoreTransform(
        dtype=torch.float32,
        bias=torch.randn(columns, generator=random) if bias else None,
        logit_scale=-1.0 if negative else 1.0,
        softcap=5.0 if softcap else None,
        temperature=torch.tensor([0.7, 1.0, 2.0]),
    )
    logits = (3.0 * torch.randn(3, columns, generator=random)).to(dtype)
    labels = torch.tensor([0, columns - 1, columns // 2])
    expected = _row_results(rows_eager, logits, labels, to_scores, torch.device("cpu"))
    try:
        with _on(device):
            got = _row_results(rows_ascend, logits, labels, to_scores, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the compiler, its driver or the device's runtime raise
        message = str(error).strip()[-_MESSAGE:]
        return f"its kernels do not compile or run here: {type(error).__name__}: {message}"
    for name, value in expected.items():
        off = (got[name] - value).abs().max().item()
        rounding = torch.finfo(dtype).eps if value.dim() == 2 else 0.0  # of the gradient
        if not off <= (_TRIAL_ERROR + rounding) * max(1.0, value.abs().max().item()):
            return f"its kernels give wrong numbers here: {name} is off by {off:.1e} from plain torch"
    return None


def _row_results(
    kernels: Any, logits: Tensor, labels: Tensor, to_scores: ScoreTransform, device: torch.device
) -> dict[str, Tensor]:
    """Statistics and gradients of a few rows, with and without the entropy, on the CPU."""
    there = dataclasses.replace(
        to_scores,
        bias=None if to_scores.bias is None else to_scores.bias.to(device),
        temperature=torch.as_tensor(to_scores.temperature).to(device),
    )
    labels = labels.to(device)
    results: dict[str, Tensor] = {}
    for entropy in (True, False):
        found = kernels.rows_statistics(logits.to(device), labels, there, calculate_entropy=entropy)
        log_probs, entropies = _finish(found, labels)
        ones = torch.ones_like(log_probs)
        grad = kernels.rows_backward(
            logits.to(device), labels, there, log_probs, entropies, found.peak, found.total,
            ones, ones if entropy else None,
        )  # fmt: skip
        results |= {f"log_probs, {entropy=}": log_probs.cpu(), f"the gradient, {entropy=}": grad.float().cpu()}
        if entropies is not None:
            results["entropy"] = entropies.cpu()
    return results


def _on(device: torch.device) -> Any:
    """Kernels run on the tensors' device, whatever the current one is."""
    return torch.get_device_module(device).device(device)

"""The row kernels of the PPO head on Ascend, as `rows_eager` says what they have to do; backward works in place.

They take any row stride, and labels that are not among the columns (negative ones, and those past the last), so that a
chunk may be a part of the vocabulary too. `ascend_launches` decides with which constants they run. Tensors are on an
NPU; in Triton's interpreter also on the CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from npu_backend import soc as socs
from npu_backend.head import ascend_launches
from npu_backend.head.ascend_launches import KernelLaunch
from npu_backend.head.chunked import RowStatistics, ScoreTransform

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def rows_statistics(
    logits: Tensor, labels: Tensor, to_scores: ScoreTransform, *, calculate_entropy: bool
) -> RowStatistics:
    """The statistics of each row over these columns, [M] float32 each."""
    rows, columns = logits.shape
    of_label, peak, total, weighted = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    softcap, bias = to_scores.softcap, to_scores.bias
    launch = ascend_launches.rows_forward(
        chip(logits.device),
        _NAMES[logits.dtype],
        bias=bias is not None,
        softcap=softcap is not None,
        mask=softcap is not None or to_scores.logit_scale <= 0.0,
        entropy=calculate_entropy,
    )
    temperatures = _temperatures(to_scores, total)
    # A pointer that a kernel's constants switch off still has to be one: any tensor of the type will do.
    _run(
        launch,
        logits,
        labels,
        temperatures if bias is None else bias,
        temperatures,
        of_label,
        peak,
        total,
        weighted,
        logits.stride(0),
        rows,
        columns,
        to_scores.logit_scale,
        1.0 if softcap is None else softcap,
    )
    return RowStatistics(of_label, peak, total, weighted if calculate_entropy else None)


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
    """The gradient of the logits in the place of the logits, [M, V], rounded to their dtype once."""
    rows, columns = logits.shape
    softcap, bias = to_scores.softcap, to_scores.bias
    launch = ascend_launches.rows_backward(
        chip(logits.device),
        _NAMES[logits.dtype],
        bias=bias is not None,
        softcap=softcap is not None,
        entropy=grad_entropy is not None,
        slices=not _is_interpreted(),
    )
    temperatures = _temperatures(to_scores, total)
    _run(
        launch,
        logits,
        logits,
        labels,
        temperatures if bias is None else bias,
        temperatures,
        log_probs,
        log_probs if entropy is None else entropy,
        peak,
        total,
        torch.zeros_like(total) if grad_log_probs is None else grad_log_probs,
        total if grad_entropy is None else grad_entropy,
        logits.stride(0),
        rows,
        columns,
        to_scores.logit_scale,
        1.0 if softcap is None else softcap,
    )
    return logits


def fused_statistics(hidden: Tensor, weight: Tensor, labels: Tensor, to_scores: ScoreTransform) -> RowStatistics:
    """The statistics of all columns from hidden states [M, H] and weight [V, H], without logits in memory.

    [parts, M] each: statistics of parts of the columns, to be merged. Scores are not rounded to the dtype of the
    operands. No bias, no softcap; V is at least what `ascend_launches.fused_forward_fits` asks for.
    """
    (rows, width), columns = hidden.shape, weight.shape[0]
    soc, dtype = chip(hidden.device), _NAMES[hidden.dtype]
    launch = ascend_launches.fused_forward(soc, dtype)
    parts, part_columns = ascend_launches.fused_parts(launch, rows, columns)
    of_label = torch.zeros(parts, rows, dtype=torch.float32, device=hidden.device)
    peak, total, weighted = torch.empty(3, parts, rows, dtype=torch.float32, device=hidden.device)
    temperatures = _temperatures(to_scores, of_label[0])
    sizes = (hidden.stride(0), weight.stride(0), rows, columns, width, to_scores.logit_scale)
    _run(launch, hidden, weight, temperatures, peak, total, weighted, *sizes, parts, part_columns)
    _run(ascend_launches.label_scores(soc, dtype), hidden, weight, labels, temperatures, of_label[0], *sizes)
    return RowStatistics(of_label, peak, total, weighted)


def _run(launch: KernelLaunch, *arguments: Any) -> None:
    from npu_backend.head import ascend_kernels

    getattr(ascend_kernels, launch.kernel)[launch.grid](*arguments, **launch.constants)


def _temperatures(to_scores: ScoreTransform, like: Tensor) -> Tensor:
    """One per row: the kernels know no other form."""
    largest = torch.finfo(torch.float32).max  # beyond it a score of -inf, which stays one, would be divided by infinity
    if isinstance(to_scores.temperature, Tensor):
        double = to_scores.temperature.dtype == torch.float64
        return to_scores.temperature.clamp(max=largest).float() if double else to_scores.temperature
    return torch.full_like(like, min(to_scores.temperature, largest))


@functools.cache
def chip(device: torch.device) -> socs.Soc:
    if device.type == "cpu":
        return socs.find_soc(socs.DEFAULT)
    return socs.find_or_smallest(str(torch.get_device_module(device).get_device_name(device)))


@functools.cache
def _is_interpreted() -> bool:
    from npu_backend import triton_interpreter

    return triton_interpreter.is_interpreting()

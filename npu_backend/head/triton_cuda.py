"""Backend `triton` on CUDA: what it needs, how much it may keep, and the call of the tiled head.

`auto` for `logits_cache_gib` takes half of what is free once backward's own needs are set aside. A cache that cannot be
had after all is given up, in forward and in backward, wherever recomputing avoids running out of memory.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from npu_backend.head.inputs import HeadInputs
from npu_backend.head.selection import leaves_rows_out
from npu_backend.head.tiled import TiledHead, TilePlan
from npu_backend.head.tiles import padded_columns
from npu_backend.log import info_rank0

TILE_BYTES = 448 * 2**20
_CACHE_SHARE = 0.5
_COLUMN_ALIGN = 256

_reported: set[str] = set()


def interpreted() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on the CPU: for tests, far too slow for anything else."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_unusable(device: torch.device, dtype: torch.dtype) -> str | None:
    """None if the kernels can run on `device` and compute in `dtype`, else the reason."""
    on_cpu = device.type == "cpu" and interpreted()
    if device.type != "cuda" and not on_cpu:
        return f"this release has no Triton kernels for the PPO head on {device.type}"
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        return "triton is not installed (torch's CUDA builds come with it)"
    if not on_cpu:
        if not torch.cuda.is_initialized() and not torch.cuda.is_available():
            return "torch finds no CUDA device"
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"the kernels need compute capability 8.0, {torch.cuda.get_device_name(device)} has {major}.{minor}"
    if dtype == torch.float64:
        return "the kernels compute in float32, and these inputs are float64"
    return None


# What torch.compiler.assume_constant_result does, which would import all of torch._dynamo to do it.
why_unusable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def log_prob_and_entropy(
    given: HeadInputs,
    dtype: torch.dtype,
    *,
    calculate_entropy: bool,
    cache_bytes: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [N] and entropy [N] | None in float32.

    Args:
        given: checked inputs.
        dtype: of the GEMMs.
        calculate_entropy: False returns None for it.
        cache_bytes: of scores that may be kept for backward; None for `auto`, 0 where no backward can follow.
    """
    if torch.compiler.is_compiling():
        from npu_backend.head.compiled import tiled_head

        log_probs, entropy, *_ = tiled_head(
            given.hidden,
            given.weight,
            given.bias,
            given.labels,
            given.temperatures,
            given.logit_scale,
            given.softcap,
            given.temperature,
            dtype,
            _cache_columns(given, dtype, cache_bytes or 0),
        )
        return log_probs, entropy if calculate_entropy else None
    from npu_backend.head import rows_cuda

    capturing = given.hidden.is_cuda and torch.cuda.is_current_stream_capturing()
    if cache_bytes is None:
        cache_bytes = 0 if capturing or _saved_tensors_are_hooked() else _free_share(given, dtype)
    columns = _cache_columns(given, dtype, cache_bytes)
    _report(f"PPO head: keeps the scores of {columns} of {given.weight.shape[0]} vocabulary entries for backward")
    plan = TilePlan(
        kernels=rows_cuda,
        fused=fused_kernels(given.weight, given.bias, dtype, given.logit_scale, given.softcap),
        compute_dtype=dtype,
        logit_scale=given.logit_scale,
        softcap=given.softcap,
        temperature=given.temperature,
        calculate_entropy=calculate_entropy,
        cache_columns=columns,
        tile_bytes=TILE_BYTES,
        compact=leaves_rows_out(given.hidden, default=True),
        may_ignore=given.may_ignore,
        group=given.group,
        sum_hidden=given.sums_hidden,
    )
    outputs: tuple[Tensor, Tensor | None] = TiledHead.apply(  # type: ignore[no-untyped-call]
        given.hidden, given.weight, given.bias, given.labels, given.temperatures, plan
    )
    return outputs


def _cache_columns(given: HeadInputs, dtype: torch.dtype, cache_bytes: int) -> int:
    """Of how many vocabulary entries the scores fit into that many bytes: all, or whole tiles.

    float16 keeps none: relative to an unlikely label, half precision is coarser than the logits that eager rounds.
    """
    if dtype == torch.float16:
        return 0
    vocab = given.weight.shape[0]
    column_bytes = max(given.labels.numel(), 1) * dtype.itemsize
    if cache_bytes >= padded_columns(vocab) * column_bytes:
        return vocab
    return cache_bytes // column_bytes // _COLUMN_ALIGN * _COLUMN_ALIGN


def _saved_tensors_are_hooked() -> bool:
    """Whether checkpoint or offloading takes what is saved: kept scores would be computed twice or go to the host, and
    checkpoint wants the same shapes the second time, when another amount of memory is free.
    """
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: None)
    return top(True) is not None


def _free_share(given: HeadInputs, dtype: torch.dtype) -> int:
    """Bytes that `auto` may keep: half of what the allocator can still give, less what backward itself will take."""
    device = given.hidden.device
    if device.type != "cuda":  # the interpreter: no memory is the device's
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    memory = torch.cuda.memory_stats_as_nested_dict(device)
    reserved, allocated, fragments = (
        memory[key]["all"]["current"] for key in ("reserved_bytes", "allocated_bytes", "inactive_split_bytes")
    )
    unused = reserved - allocated - fragments  # a fragment cannot be given back, and need not be in one piece
    rows, width = given.hidden.shape
    backward = given.weight.numel() * given.weight.element_size() + rows * width * (4 + given.hidden.element_size())
    if dtype != given.weight.dtype:
        backward += given.weight.numel() * dtype.itemsize
    return max(0, int(_CACHE_SHARE * (free + unused - backward - TILE_BYTES)))


def fused_kernels(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, logit_scale: float, softcap: float | None
) -> ModuleType | None:
    """The fused Hopper kernels if they can take these inputs; without them the same is done by two kernels."""
    if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) != (9, 0):
        return None
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
        _report(f"PPO head: triton {triton.__version__} is older than the fused Hopper kernels need (3.6)")
        return None
    from npu_backend.head import gemm_stats_cuda

    reason = gemm_stats_cuda.unusable_reason(weight, bias, dtype, logit_scale, softcap)
    if reason is not None:
        _report(f"PPO head: a library GEMM instead of the fused Hopper kernels: {reason}")
        return None
    return gemm_stats_cuda


def _report(message: str) -> None:
    """Say it once."""
    if message not in _reported:
        _reported.add(message)
        info_rank0(message)

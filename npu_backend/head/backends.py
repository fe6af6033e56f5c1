"""Which backend runs a call of the PPO head, and why.

`torch` is what every other choice falls back to: once, with the reason on rank 0, unless NPU_BACKEND_STRICT=1 makes
that an error. What cannot work at all (a broken Liger, Triton on a plain CPU) is an error in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from npu_backend.config import IMPL_BACKENDS, read_environment
from npu_backend.errors import BackendUnavailableError, ConfigError
from npu_backend.head import liger, triton_cuda
from npu_backend.log import warn_once

DEFAULT_BACKEND = "torch"
_NOT_DIVIDED = "only 'torch' takes a vocabulary that is divided among the ranks of a process_group"


@dataclass(frozen=True)
class Choice:
    """The backend that runs, and why it is this one ("" when it is simply what was asked for)."""

    name: str
    reason: str = ""


def check_name(impl_backend: str | None) -> str:
    """The backend's name, the default for None.

    Raises:
        ConfigError: there is no such backend.
    """
    if impl_backend is None:
        return DEFAULT_BACKEND
    if impl_backend not in IMPL_BACKENDS:
        raise ConfigError(
            f"Unsupported FusedLinearForPPO backend: {impl_backend}. Known backends: {', '.join(IMPL_BACKENDS)}."
        )
    return impl_backend


def resolve(
    impl_backend: str | None,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    vocab_parallel: bool = False,
) -> Choice:
    """Choose the backend that runs on `device`, computing in `dtype`, perhaps with a vocabulary divided among ranks.

    Raises:
        ConfigError: there is no such backend.
        BackendUnavailableError: it cannot work here, or NPU_BACKEND_STRICT=1 forbids the fallback.
    """
    name = check_name(impl_backend)
    if name == "torch":
        return Choice("torch")
    if name == "auto":
        reason = _NOT_DIVIDED if vocab_parallel else triton_cuda.why_unusable(device, dtype)
        if reason is None:
            return Choice("triton", f"auto on {device.type}: the fastest in docs/benchmarks")
        return Choice("torch", f"auto on {device.type}: {reason}")
    if name == "triton" and device.type == "cpu":
        raise BackendUnavailableError(
            "PPO head: impl_backend='triton' cannot run on the CPU, Triton has no compiler for it. "
            "Use 'torch' or 'auto' here."
        )
    if vocab_parallel:
        reason = _NOT_DIVIDED
    elif name == "liger":
        reason = liger.why_unusable()
    else:
        reason = triton_cuda.why_unusable(device, dtype)
    if reason is None:
        return Choice(name)
    if read_environment().strict:
        raise BackendUnavailableError(
            f"PPO head: impl_backend={name!r} cannot be used: {reason}; NPU_BACKEND_STRICT=1 forbids the fallback. "
            "Use impl_backend='torch', or unset NPU_BACKEND_STRICT."
        )
    warn_once(f"head.{name}.{device.type}", f"PPO head: impl_backend={name!r} falls back to 'torch': {reason}")
    return Choice("torch", reason)

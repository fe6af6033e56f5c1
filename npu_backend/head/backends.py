"""Which backend runs a call of the PPO head, and why.

`torch` is what every other choice falls back to: once, with the reason on rank 0, unless NPU_BACKEND_STRICT=1 makes
that an error. What cannot work at all (a broken Liger, Triton on a plain CPU) is an error in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from npu_backend import virtual_npu
from npu_backend.config import IMPL_BACKENDS, read_environment
from npu_backend.errors import BackendUnavailableError, ConfigError, did_you_mean
from npu_backend.head import liger, measured, triton_cuda, triton_npu
from npu_backend.head.inputs import HeadInputs
from npu_backend.log import warn_once
from npu_backend.operators import counters

DEFAULT_BACKEND = "torch"
_WHY_TRITON = {
    "cuda": "the fastest in docs/benchmarks",
    "npu": "the fewest bytes moved (docs/ascend.md; not timed), and its kernels passed their trial here",
}
_NOT_DIVIDED = "it does not take a vocabulary that is divided among the ranks of a process_group"


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
            f"Unsupported FusedLinearForPPO backend: {impl_backend}. Known backends: {', '.join(IMPL_BACKENDS)}"
            f"{did_you_mean(impl_backend, IMPL_BACKENDS)}"
        )
    return impl_backend


def resolve(
    impl_backend: str | None,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    vocab_parallel: bool = False,
    given: HeadInputs | None = None,
) -> Choice:
    """Choose the backend that runs on `device`, computing in `dtype`, perhaps with a vocabulary divided among ranks.

    On an NPU the choice of `triton` or `auto` compiles the kernels that `given` needs, once per process.

    Raises:
        ConfigError: there is no such backend.
        BackendUnavailableError: it cannot work here, or NPU_BACKEND_STRICT=1 forbids the fallback.
    """
    name = check_name(impl_backend)
    if name == "torch":
        return Choice("torch")
    if name == "auto":
        name, reason = _fastest(device, dtype, vocab_parallel, given)
        return _noted(Choice(name, f"auto on {device.type}: {reason}"))
    if name == "triton" and device.type == "cpu" and not triton_cuda.interpreted():
        raise BackendUnavailableError(
            "PPO head: impl_backend='triton' cannot run on the CPU, Triton has no compiler for it. "
            "Use 'torch' or 'auto' here."
        )
    hindrance = _why_not(name, device, dtype, vocab_parallel, given)
    if hindrance is None and name == "liger" and device.type != "cuda":
        return _noted(Choice(name, f"on {device.type} Liger's function is a chunked loop in torch, no kernel"))
    if hindrance is None:
        return Choice(name)
    if read_environment().strict:
        raise BackendUnavailableError(
            f"PPO head: impl_backend={name!r} cannot be used: {hindrance}; NPU_BACKEND_STRICT=1 forbids the fallback. "
            "Use impl_backend='torch', or unset NPU_BACKEND_STRICT."
        )
    warn_once(f"head.{name}.{device.type}", f"PPO head: impl_backend={name!r} falls back to 'torch': {hindrance}")
    return Choice("torch", hindrance)


def _noted(choice: Choice) -> Choice:
    """The choice, which reports then show with its reason."""
    if not torch.compiler.is_compiling():
        counters.note_choice(f"PPO head: {choice.name!r} ({choice.reason})")
    return choice


def _fastest(
    device: torch.device, dtype: torch.dtype, vocab_parallel: bool, given: HeadInputs | None
) -> tuple[str, str]:
    """The fastest that was measured on this host and can run; where nothing was, `triton`, then `torch`. And why."""
    if device.type == "npu" and virtual_npu.is_active():
        return "torch", "on a virtual NPU the kernels are interpreted, not compiled"
    if device.type not in _WHY_TRITON:
        return "torch", "no other backend is meant for it"
    # The ranks of a divided vocabulary choose alike, whatever was measured on their hosts.
    order, why = ((), "") if vocab_parallel else measured.order(device, dtype)
    if not order:
        order, why = ("triton",), _WHY_TRITON[device.type]
    hindrances: list[str] = []
    for name in (*order, "torch"):
        hindrance = _why_not(name, device, dtype, vocab_parallel, given)
        if hindrance is None and name == "liger" and given is not None and liger.refused_options(given):
            hindrance = f"it has no {liger.refused_options(given)}"
        if hindrance is None:
            return name, "; ".join(hindrances) or why
        hindrances.append(f"not {name!r}: {hindrance}")
    raise AssertionError("torch runs everywhere")


def _why_not(
    name: str, device: torch.device, dtype: torch.dtype, vocab_parallel: bool, given: HeadInputs | None
) -> str | None:
    """None if this backend can run here, else the reason."""
    if name == "torch":
        return None
    if name == "liger":
        return _NOT_DIVIDED if vocab_parallel else liger.why_unusable()
    if device.type == "npu":
        return triton_npu.why_unusable(device, dtype, given)
    if vocab_parallel and torch.compiler.is_compiling():
        return f"under torch.compile {_NOT_DIVIDED}"
    return triton_cuda.why_unusable(device, dtype)

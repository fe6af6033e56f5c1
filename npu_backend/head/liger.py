"""Backend `liger`: Liger-Kernel's fused scaled cross entropy as a PPO head.

Liger picks its own implementation by device: a kernel on CUDA of capability 9.0, elsewhere a chunked loop in torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any

import torch
from torch import Tensor

from npu_backend.errors import BackendUnavailableError, HeadInputError
from npu_backend.head.inputs import IGNORED, HeadInputs
from npu_backend.head.selection import FirstOrderOnly

_MODULE = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
_FUNCTION = "LigerFusedLinearScaledCrossEntropyFunction"
_INSTALL = "pip install --no-deps 'liger-kernel>=0.8.2'"


def why_unusable() -> str | None:
    """None if Liger is installed, else the reason. One that is installed but broken raises when it is used."""
    if importlib.util.find_spec("liger_kernel") is None:
        return f"liger-kernel is not installed ({_INSTALL})"
    return None


def refused_options(given: HeadInputs) -> str:
    """The options that are given and for which Liger's function has no argument, in words; empty for none."""
    options = {
        "bias": given.bias is not None,
        "logit_scale": given.logit_scale != 1.0,
        "softcap": given.softcap is not None,
        "a temperature per row": given.temperatures is not None,
    }
    return ", ".join(name for name, is_given in options.items() if is_given)


def check_options(given: HeadInputs) -> None:
    """Refuse what Liger's function has no argument for.

    Raises:
        HeadInputError: names the options.
    """
    refused = refused_options(given)
    if refused:
        raise HeadInputError(
            f"linear_log_prob: impl_backend='liger' cannot apply {refused}: Liger's function has no such argument. "
            "Use impl_backend='torch'."
        )


def log_prob_and_entropy(
    given: HeadInputs, dtype: torch.dtype, *, calculate_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [N] and entropy [N] | None, by Liger's function in `dtype`.

    Raises:
        BackendUnavailableError: the installed Liger lacks the function, or fails to import.
    """
    hidden, weight = given.hidden, given.weight.to(dtype).contiguous()
    if given.may_ignore:  # read as zeros: Liger multiplies what they hold, NaN included, by their gradient of zero
        hidden = hidden.masked_fill((given.labels < 0)[:, None], 0.0)
    hidden = hidden.to(dtype).contiguous()
    outputs = _function().apply(
        _once(hidden, weight),
        _once(weight, hidden),
        given.labels,
        temperature=given.temperature,
        ignore_index=IGNORED,
        return_entropy=calculate_entropy,
    )
    negative, entropy = outputs if calculate_entropy else (outputs, None)
    return -negative, entropy


def _once(value: Tensor, other: Tensor) -> Tensor:
    """`value`, whose gradient cannot be differentiated: Liger's kernels leave no derivative of it that is right."""
    once: Tensor = _Once.apply(value, other) if value.requires_grad else value  # type: ignore[no-untyped-call]
    return once


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(value, other)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # create_graph=True
            grad, *_ = FirstOrderOnly.apply(grad, None, None, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return grad, None


def _function() -> Any:
    try:
        return getattr(importlib.import_module(_MODULE), _FUNCTION)
    except Exception as error:  # Triton raises RuntimeError at import where it finds no driver
        raise BackendUnavailableError(
            f"PPO head: impl_backend='liger' needs {_MODULE}.{_FUNCTION} (liger-kernel >= 0.8.2), but the installed "
            f"liger-kernel {_version()} does not give it: {type(error).__name__}: {error}. Install a newer one "
            f"({_INSTALL}), or use impl_backend='torch'."
        ) from error


def _version() -> str:
    try:
        return importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:
        return "(of unknown version)"

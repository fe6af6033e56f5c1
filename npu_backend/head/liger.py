"""Backend `liger`: Liger-Kernel's fused scaled cross entropy as a PPO head.

Liger picks its own implementation by device: a kernel on CUDA of capability 9.0, elsewhere a chunked loop in torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any

from torch import Tensor

from npu_backend.errors import BackendUnavailableError, HeadInputError

_MODULE = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
_FUNCTION = "LigerFusedLinearScaledCrossEntropyFunction"
_INSTALL = "pip install --no-deps 'liger-kernel>=0.8.2'"


def why_unusable() -> str | None:
    """None if Liger is installed, else the reason. One that is installed but broken raises when it is used."""
    if importlib.util.find_spec("liger_kernel") is None:
        return f"liger-kernel is not installed ({_INSTALL})"
    return None


def log_prob_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    calculate_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [N] and entropy [N] | None of hidden [N, H], weight [V, H] of one dtype; a negative label is ignored.

    Raises:
        BackendUnavailableError: the installed Liger lacks the function, or fails to import.
    """
    outputs = _function().apply(
        hidden.contiguous(),
        weight.contiguous(),
        labels,
        temperature=temperature,
        ignore_index=-1,
        return_entropy=calculate_entropy,
    )
    if calculate_entropy:
        negative, entropy = outputs
        return -negative, entropy
    return -outputs, None


def check_options(**unsupported: Any) -> None:
    """Refuse what Liger's function cannot compute.

    Raises:
        HeadInputError: an option is not None.
    """
    given = [name for name, value in unsupported.items() if value is not None]
    if given:
        raise HeadInputError(
            f"linear_log_prob: impl_backend='liger' cannot apply {', '.join(given)}: Liger's function has no such "
            "argument. Use impl_backend='torch'."
        )


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

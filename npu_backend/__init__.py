"""npu-backend: an Ascend-NPU-first hardware backend for RL and LLM training.

Importing this package touches no device and imports neither torch nor any optional dependency: the public names below
are loaded on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module that defines it. The only list of what is public.
_PUBLIC = {
    "apply_npu_fsdp_patches": "npu_backend.manager",
    "plan_patches": "npu_backend.manager",
    "patch_status": "npu_backend.manager",
    "revert_patches": "npu_backend.manager",
    "PatchReport": "npu_backend.report",
    "VerifyReport": "npu_backend.report",
    "verify": "npu_backend.verification",
    "FusedLinearForPPO": "npu_backend.head.modules",
    "linear_log_prob": "npu_backend.head.linear_log_prob",
    "linear_cross_entropy": "npu_backend.head.linear_log_prob",
    "LinearLogProbOutput": "npu_backend.head.linear_log_prob",
    "patch_forward_with_backends": "npu_backend.head.adapter",
    "NPUBackendError": "npu_backend.errors",
    "ConfigError": "npu_backend.errors",
    "PatchConflictError": "npu_backend.errors",
    "PatchTargetError": "npu_backend.errors",
    "BackendUnavailableError": "npu_backend.errors",
    "HeadInputError": "npu_backend.errors",
}

__all__ = ["__version__", "virtual_npu", *_PUBLIC]

if TYPE_CHECKING:
    from npu_backend import virtual_npu
    from npu_backend.errors import (
        BackendUnavailableError,
        ConfigError,
        HeadInputError,
        NPUBackendError,
        PatchConflictError,
        PatchTargetError,
    )
    from npu_backend.head.adapter import patch_forward_with_backends
    from npu_backend.head.linear_log_prob import LinearLogProbOutput, linear_cross_entropy, linear_log_prob
    from npu_backend.head.modules import FusedLinearForPPO
    from npu_backend.manager import apply_npu_fsdp_patches, patch_status, plan_patches, revert_patches
    from npu_backend.report import PatchReport, VerifyReport
    from npu_backend.verification import verify


def __getattr__(name: str) -> Any:
    if name == "virtual_npu":
        return importlib.import_module("npu_backend.virtual_npu")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'npu_backend' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

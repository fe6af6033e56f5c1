"""Liger's Ascend kernels on a host without an Ascend: their Python source in Triton's interpreter. Never imported by
default.

A stand-in for the correctness of code paths only (which operator runs where, its arithmetic, its gradients, how patches
are applied and taken back), for the demo and the tests on a host without an NPU. It shows nothing about speed, memory,
or what the vendor's compiler does with these kernels. Tensors are on the CPU, or on a virtual NPU, whose memory is the
CPU's: there `apply_npu_fsdp_patches` takes Liger as it would on a device, once this is active.

`activate()` must come before anything imports triton. It starts the interpreter (`triton_interpreter`), tells Liger
(nobody else) that there is an NPU, and gives it a chip's core count and buffer size. Not supported: atomic additions in
bfloat16 (Liger's MoE backward; use float32 or float16).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from npu_backend import soc as socs
from npu_backend import triton_interpreter
from npu_backend.config import BackendConfig, model_types_of
from npu_backend.device import Device, versions
from npu_backend.errors import BackendUnavailableError
from npu_backend.families import families_of
from npu_backend.manager import Context
from npu_backend.patches import liger
from npu_backend.patches.engine import ENGINE
from npu_backend.report import PatchReport

LABEL = "Liger's Ascend sources in Triton's interpreter"
SUPPORTED = {"triton": triton_interpreter.SUPPORTED, "liger-kernel": "0.8.5"}
_active = ""


def activate(soc: str = socs.DEFAULT) -> None:
    """Make Liger select its Ascend kernels and make them run on CPU tensors, in this process from now on.

    Args:
        soc: The chip whose core count and buffer size the kernels are tiled for.

    Raises:
        ConfigError: no such chip.
        BackendUnavailableError: triton or Liger is absent, of another release, or was imported too early.
    """
    global _active
    chip = socs.find_soc(soc)
    if _active == chip.name:
        return
    _check_host()
    triton_interpreter.activate()
    os.environ["ASCEND_UB_CAPACITY_BITS"] = str(chip.ub_bytes * 8)  # what CANN answers on a chip
    import triton

    triton.runtime.driver.set_active(_Driver(chip.vector_cores))
    importlib.import_module("liger_kernel.utils").is_npu_available = lambda: True  # type: ignore[attr-defined]
    importlib.import_module("liger_kernel.ops")
    liger.check_ascend_operators()
    _active = chip.name


def apply_liger_in_interpreter(hf_config: Any, soc: str = socs.DEFAULT) -> PatchReport:
    """Apply the patch set `liger` for a model, with Liger's Ascend kernels in the interpreter.

    `apply_npu_fsdp_patches` refuses Liger on a CPU, rightly; this is the way for a demonstration and for tests.

    Args:
        hf_config: The model's Hugging Face configuration.
        soc: As for `activate`.

    Raises:
        BackendUnavailableError, ConfigError: as `activate`.
        PatchConflictError, PatchTargetError: as `apply_npu_fsdp_patches`; nothing changed.
    """
    activate(soc)
    config = BackendConfig(use_liger=True, model_types=model_types_of(hf_config), hf_config=hf_config)
    context = Context(config, Device("cpu", f"tiled for {_active}", name=LABEL))
    with ENGINE.lock:
        plan = ENGINE.plan(liger.PATCH_SET, families_of(config.model_types), context=context, asked_by=str(config))
        rows = ENGINE.apply(plan)
    return PatchReport(tuple(rows), liger.PATCH_SET.name, str(context.device), "applied", versions=versions())


def _check_host() -> None:
    found = versions()
    for name, supported in SUPPORTED.items():
        if not found.get(name, "").startswith(supported):
            raise BackendUnavailableError(
                f"{LABEL}: {name} {supported} is needed, {found.get(name, 'none')} is installed. "
                f"`pip install --no-deps {name}=={supported}{'.0' if supported.count('.') == 1 else ''}`"
            )
    if _active or "liger_kernel.ops" in sys.modules:
        before = f"activate({_active!r}) chose another chip" if _active else "Liger was imported with other kernels"
        raise BackendUnavailableError(f"{LABEL}: in this process {before}. Start another process and activate() first")


class _Driver:
    """What Liger asks Triton's device driver for: the number of vector cores, and a timer (of autotuning, not used)."""

    def __init__(self, vector_cores: int) -> None:
        self.vector_cores = vector_cores
        self.utils = self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"num_vectorcore": self.vector_cores}

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda *args, **kwargs: [0.0]

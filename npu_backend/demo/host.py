"""Where the demo runs. The choice comes before torch is imported, because torch looks for devices when it is."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_backend import virtual_npu
from npu_backend.config import read_environment
from npu_backend.device import Device, detect
from npu_backend.errors import BackendUnavailableError

# What an accelerator's driver leaves in /dev: Ascend, NVIDIA, and NVIDIA under WSL.
_DRIVERS = ("davinci[0-9]*", "nvidia[0-9]*", "dxg")


@dataclass(frozen=True)
class Host:
    """The device, and what the demo cannot show on it ("" where it shows everything).

    `interpreter`: Liger's Ascend kernels run as Python, on CPU tensors.
    """

    device: Device
    not_shown: str = ""
    interpreter: bool = False

    @property
    def label(self) -> str:
        """The device in words; a virtual NPU always says so."""
        if not self.interpreter:
            return str(self.device)
        from npu_backend import liger_interpreter

        return f"cpu, {liger_interpreter.LABEL}"


def prepare(*, use_liger: bool = False) -> Host:
    """Choose: a real NPU, else CUDA, else a virtual NPU, else the CPU (where Liger's kernels can still be interpreted).

    NPU_BACKEND_DEVICE and an already imported torch are respected.

    Raises:
        BackendUnavailableError: a device asked for by name is not here.
        ConfigError: an NPU_BACKEND_* variable means nothing.
    """
    why_not_virtual = ""
    if _may_become_virtual() and not use_liger:
        try:
            virtual_npu.activate()
        except BackendUnavailableError as error:
            if read_environment().device == "npu":
                raise
            why_not_virtual = str(error)
    if use_liger and _may_become_virtual():
        from npu_backend import liger_interpreter

        liger_interpreter.activate()  # before transformers imports triton
        return Host(detect(), "speed, memory and what the vendor's compiler does with the kernels", interpreter=True)
    found = detect()
    if found.virtual:
        return Host(found, "an NPU's numerics, speed and memory: the arithmetic is the CPU's")
    if found.type == "npu" or (found.type == "cuda" and use_liger):
        return Host(found)
    if found.type == "cuda":
        return Host(found, "the operators of verl_npu, which need an NPU (--use-liger has kernels for CUDA)")
    because = why_not_virtual or found.reason
    return Host(found, f"the patched operators: there is no NPU here, nor a virtual one ({because})")


def _may_become_virtual() -> bool:
    """Whether this host shows no sign of an accelerator and leaves the choice to us."""
    asked = read_environment().device
    if asked in ("cpu", "cuda") or "torch" in sys.modules or sys.platform != "linux":
        return False
    return not any(True for pattern in _DRIVERS for _ in Path("/dev").glob(pattern))


class PeakMemory:
    """Peak memory of a step: of the device's allocator, or of the whole process on a CPU."""

    def __init__(self, device: Device) -> None:
        import torch

        self._statistics: Any = {"npu": getattr(torch, "npu", None), "cuda": torch.cuda}.get(device.type)

    @property
    def what(self) -> str:
        """What is measured, for the head of a table."""
        return "process peak MiB" if self._statistics is None else "peak MiB"

    def reset(self) -> None:
        """Start a new step."""
        if self._statistics is not None:
            self._statistics.reset_peak_memory_stats()

    def mib(self) -> float:
        """Peak since the last reset, in MiB; since the start of the process on a CPU."""
        if self._statistics is not None:
            return float(self._statistics.max_memory_allocated()) / 2**20
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

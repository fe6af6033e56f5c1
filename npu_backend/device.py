"""Which accelerator this process has: NPU first, then CUDA, then the CPU, with the reason."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass

from npu_backend.config import read_environment
from npu_backend.errors import BackendUnavailableError

# LlamaFactory#7986: transformers asks older pairs for CUDA ("Torch not compiled with CUDA enabled").
OLDEST_TORCH_NPU = (2, 5, 1)


@dataclass(frozen=True)
class Device:
    """`type` is npu, cuda or cpu; `name` is the chip's name; `reason` says why this one."""

    type: str
    reason: str
    name: str = ""
    virtual: bool = False

    def __str__(self) -> str:
        from npu_backend import virtual_npu

        label = f"{self.type} ({self.name})" if self.name else self.type
        return f"{label}, {virtual_npu.LABEL}" if self.virtual else label


def detect() -> Device:
    """Find the device, or confirm the one that NPU_BACKEND_DEVICE asks for.

    Raises:
        BackendUnavailableError: the device asked for by name is not here.
    """
    asked = read_environment().device
    if asked == "cpu":
        return Device("cpu", "NPU_BACKEND_DEVICE=cpu")
    npu = _npu() if asked in (None, "npu") else Device("cpu", "not asked for")
    if npu.type == "npu":
        return npu
    if asked == "npu":
        raise BackendUnavailableError(
            f"NPU_BACKEND_DEVICE=npu, but no NPU can be used: {npu.reason}. Install the torch_npu that matches this "
            "torch and mount the driver (`npu-backend doctor` says what is wrong), or unset NPU_BACKEND_DEVICE"
        )
    cuda = _cuda()
    if cuda.type == "cuda":
        return cuda
    if asked == "cuda":
        raise BackendUnavailableError(
            f"NPU_BACKEND_DEVICE=cuda, but no CUDA device can be used: {cuda.reason}. Unset it, or install a CUDA build"
        )
    return Device("cpu", f"{npu.reason}; {cuda.reason}")


def detect_unless_disabled() -> Device:
    """As `detect`; under NPU_BACKEND_DISABLE=1, which wins over everything, no device is missed."""
    try:
        return detect()
    except BackendUnavailableError as error:
        if not read_environment().disable:
            raise
        return Device("cpu", str(error))


def _npu() -> Device:
    """The NPU, or a CPU whose reason says why there is none. `torch.npu` exists only once torch_npu is imported."""
    if importlib.util.find_spec("torch_npu") is None:
        return Device("cpu", "torch_npu is not installed")
    try:
        torch_npu = importlib.import_module("torch_npu")
    except Exception as error:  # torch_npu raises OSError, RuntimeError, ImportError: whatever the driver's loader said
        return Device("cpu", f"torch_npu cannot be imported: {type(error).__name__}: {error}")

    version = str(getattr(torch_npu, "__version__", ""))
    if _version(version) < OLDEST_TORCH_NPU:
        oldest = ".".join(map(str, OLDEST_TORCH_NPU))
        raise BackendUnavailableError(
            f"torch_npu {version} is too old: torch and torch_npu >= {oldest} are needed; with older ones transformers "
            "looks for CUDA. Install a matching pair"
        )
    try:
        if not torch_npu.npu.is_available():
            return Device("cpu", "torch_npu finds no device (driver mounted? ASCEND_RT_VISIBLE_DEVICES?)")
        name = str(torch_npu.npu.get_device_name(0))
    except Exception as error:  # the driver's loader again, this time at the first call
        return Device("cpu", f"torch_npu cannot reach a device: {type(error).__name__}: {error}")
    from npu_backend import virtual_npu

    return Device("npu", "torch.npu.is_available()", name=name, virtual=virtual_npu.is_active())


def _cuda() -> Device:
    """CUDA, unless a shim only pretends: transfer_to_npu makes torch.cuda.is_available() true on an Ascend host."""
    if importlib.util.find_spec("torch") is None:
        return Device("cpu", "torch is not installed")
    import torch

    if not torch.cuda.is_available():
        return Device("cpu", "torch.cuda.is_available() is False")
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return Device("cpu", "torch.cuda.is_available() is True, but this torch was built without CUDA: a shim answers")
    return Device("cuda", "torch.cuda.is_available()", name=str(torch.cuda.get_device_name(0)))


def _version(text: str) -> tuple[int, ...]:
    """The release numbers of a PEP 440 version; local and development suffixes do not count."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(text).release
    except InvalidVersion:
        return OLDEST_TORCH_NPU


@functools.cache
def versions() -> dict[str, str]:
    """Installed versions of what matters here, for reports; read from metadata, nothing is imported."""
    found = {}
    for name in ("torch", "torch-npu", "transformers", "liger-kernel", "triton", "triton-ascend", "verl"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

"""Checks of what changes how a process starts: our own variables, shims that fake CUDA, torch's autoloading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from npu_backend.doctor import host as hosts
from npu_backend.doctor.checks.packages import pip
from npu_backend.doctor.facts import Facts
from npu_backend.doctor.packages import base
from npu_backend.doctor.report import Finding
from npu_backend.errors import ConfigError

_SHIM = "transfer_to_npu"


def settings(facts: Facts) -> Iterator[Finding]:
    """NPU_BACKEND_* variables that do not exist, or whose values mean nothing."""
    if isinstance(facts.settings, ConfigError):
        yield Finding("settings", "error", str(facts.settings), "correct or unset it: the first use raises this error")


def cuda_shims(facts: Facts) -> Iterator[Finding]:
    """Shims that fake CUDA on an NPU host, and a CUDA build of torch beside torch-npu: the NVIDIA path is chosen."""
    for folder in map(Path, facts.host.path):
        names = [name for name in hosts.entries(folder) if name.endswith(".pth")]
        for name in (*names, "sitecustomize.py", "usercustomize.py"):
            if _SHIM in hosts.read(folder / name):
                yield Finding(
                    "cuda_shims",
                    "warning",
                    f"{folder / name} imports {_SHIM} into every Python: torch.cuda.is_available() is then True on an "
                    "NPU, and libraries that trust it take their NVIDIA path",
                    f"take {_SHIM} out of {folder / name}; import it only in scripts that are ported with it "
                    "(npu-backend itself asks for the NPU first, and for torch.version.cuda)",
                    "https://github.com/flagos-ai/FlagTree/issues/1022",
                )
    if not facts.ascend or "torch" not in facts.modules:
        return
    text = hosts.read(Path(facts.modules["torch"][0]) / "version.py")
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    if cuda:
        version = base(facts.versions.get("torch", ""))
        yield Finding(
            "cuda_shims",
            "warning",
            f"this torch is built for CUDA {cuda[1]}, on a host with {facts.ascend}",
            pip(facts, f"install --no-deps --force-reinstall torch=={version} --index-url ")
            + "https://download.pytorch.org/whl/cpu",
        )


def autoload(facts: Facts) -> Iterator[Finding]:
    """torch.npu that does not exist until torch_npu is imported, so that `hasattr(torch, "npu")` finds the CPU."""
    value = facts.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if value != "0" or not (facts.ascend or facts.virtual):
        return
    yield Finding(
        "autoload",
        "warning",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch does not import torch_npu by itself, and code that asks "
        "hasattr(torch, 'npu') takes the CPU",
        "unset TORCH_DEVICE_BACKEND_AUTOLOAD\nor import torch_npu right after torch in the training script",
        "https://github.com/linkedin/Liger-Kernel/issues/955",
    )

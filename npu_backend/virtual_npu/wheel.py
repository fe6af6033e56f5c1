"""Find the installed torch and a torch_npu that fits it, from their metadata: neither is imported."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from npu_backend.config import cache_folder
from npu_backend.errors import BackendUnavailableError

# A build for the CPU: torch_npu shares no process with CUDA. The release under which the tests run.
TORCH = "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"


def torch_npu_folder() -> Path | None:
    """The folder to put on sys.path for torch_npu, or None when it is already importable.

    Raises:
        BackendUnavailableError: torch is absent, torch_npu is absent (the message gives the command that fetches the
            one for this torch), or the two do not fit each other.
    """
    torch = _version("torch")
    if torch is None:
        raise BackendUnavailableError(f"the virtual NPU needs torch, which {sys.executable} does not have: {TORCH}")
    wanted = Version(torch).base_version
    folder = cached_torch_npu(wanted)
    installed = _find("torch_npu")
    cached = _find("torch_npu", folder)
    distribution = installed or cached
    fetch = (
        f"{sys.executable} -m pip install --no-deps --target {folder} torch-npu=={wanted}\n"
        f"If pip finds none, there is no torch_npu for torch {wanted} (yet): {TORCH}"
    )
    if distribution is None:
        raise BackendUnavailableError(
            f"the virtual NPU runs the real torch_npu, which is not installed; fetch it with\n  {fetch}"
        )
    _check_pair(torch, distribution, fetch)
    return None if installed else folder


def cached_torch_npu(version: str) -> Path:
    """Where a torch_npu of this version for this Python is kept; its extension fits one Python only."""
    return cache_folder() / f"torch_npu-{version}-cp{sys.version_info.major}{sys.version_info.minor}"


def has_torch() -> bool:
    """Whether this Python has torch, without importing it."""
    return _version("torch") is not None


def _check_pair(torch: str, distribution: importlib.metadata.Distribution, fetch: str) -> None:
    for text in distribution.requires or []:
        requirement = Requirement(text)
        if requirement.name != "torch":
            continue
        # Some releases ask for `torch==2.10.0+cpu`, the build they were made with; any build of that release will do.
        releases = SpecifierSet(re.sub(r"\+[a-zA-Z0-9.]+", "", str(requirement.specifier)))
        if not releases.contains(Version(torch).public, prereleases=True):
            raise BackendUnavailableError(
                f"torch_npu {distribution.version} needs torch{releases}, but torch {torch} is installed; "
                f"remove that torch_npu and fetch the one for this torch with\n  {fetch}"
            )


def _version(name: str) -> str | None:
    distribution = _find(name)
    return distribution.version if distribution else None


def _find(name: str, folder: Path | None = None) -> importlib.metadata.Distribution | None:
    """The distribution `name` on sys.path, or in one folder only."""
    path = sys.path if folder is None else [str(folder)]
    return next(iter(importlib.metadata.distributions(name=name, path=path)), None)

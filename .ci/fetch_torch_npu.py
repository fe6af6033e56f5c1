"""Fetch the torch_npu of this Python's torch into the cache folder where npu_backend.virtual_npu looks for it.

    python .ci/fetch_torch_npu.py [further arguments of pip install]

It is kept out of every environment: torch would load it on import, and a machine without an NPU driver would then fail.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from npu_backend.errors import BackendUnavailableError
from npu_backend.virtual_npu.wheel import cached_torch_npu, torch_npu_folder


def main(*pip_arguments: str) -> int:
    """Return pip's exit status; 0 where torch_npu is there already, or has no wheel for this machine."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        print(f"torch_npu has no wheel for {platform.system()} {platform.machine()}: no virtual NPU here")
        return 0
    try:
        torch_npu_folder()
        return 0
    except BackendUnavailableError as error:
        print(error, flush=True)
    version = importlib.metadata.version("torch").partition("+")[0]
    folder = cached_torch_npu(version)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))  # renamed when whole
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(draft), f"torch-npu=={version}"]
    status = subprocess.call([*command, *pip_arguments])
    if status == 0 and not folder.exists():
        draft.chmod(0o755)
        draft.rename(folder)
        torch_npu_folder()  # raises if it is not found there after all
    shutil.rmtree(draft, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""What the closed last stage of the vendor's compiler receives, for kernels of this repository.

`modules` starts a process of its own, because triton-ascend is called `triton` like the one of the tests; the file run
as a program is that process.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from npu_backend.ascend import toolchain, vendor
from npu_backend.errors import BackendUnavailableError
from npu_backend.head.ascend_launches import KernelLaunch
from npu_backend.soc import find_soc

HEAD_KERNELS = "npu_backend.head.ascend_kernels"
_RELEASE = toolchain.COMPILERS[0]  # not a host's own: that one has the closed last stage
_ROOT = Path(__file__).resolve().parents[2]


def missing_toolchain() -> str:
    """Why nothing can be compiled here; "" if it can."""
    try:
        toolchain.find(compiler=_RELEASE)
    except BackendUnavailableError as error:
        return str(error).splitlines()[0]
    return ""


def modules(launches: Sequence[KernelLaunch], soc: str, source: str = HEAD_KERNELS) -> list[str]:
    """The texts, in the order of the launches. `source` is the module that defines the kernels."""
    environment = toolchain.find(compiler=_RELEASE).environment()
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(_ROOT), str(_ROOT / "tests")])
    request = {"soc": soc, "source": source, "launches": [asdict(launch) for launch in launches]}
    done = subprocess.run(
        [sys.executable, "-m", "hivm_emulator.modules"],
        input=json.dumps(request), env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the compiler's process failed:\n{done.stderr[-3000:]}")
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _main() -> None:
    from npu_backend.ascend import front_end

    request = json.load(sys.stdin)
    soc = find_soc(request["soc"])
    source = importlib.import_module(request["source"])
    with ThreadPoolExecutor(1) as pool:  # while one is in the vendor's compiler, the next is in the front end
        waiting = []
        for launch in request["launches"]:
            described = front_end.Launch(
                launch["name"], getattr(source, launch["kernel"]), launch["signature"], launch["constants"],
                tuple(launch["grid"]),
            )  # fmt: skip
            waiting.append(pool.submit(_text, launch["name"], *front_end.lower(described, soc)))
        print(json.dumps([text.result() for text in waiting]))


def _text(name: str, command: list[str], linalg: str) -> str:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        source, module = folder / "kernel.ttadapter.mlir", folder / "module.mlir"
        source.write_text(linalg, encoding="utf-8")
        environment = {
            **os.environ,
            "PATH": f"{vendor.stand_in_folder()}{os.pathsep}{os.environ['PATH']}",
            "HIVMC_MODULE": str(module),
        }
        command = [command[0], str(source), *command[2:-1], str(folder / "kernel")]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace")
        if not module.exists():
            raise RuntimeError(f"{name} does not compile:\n{done.stdout}{done.stderr}"[-3000:])
        return module.read_text(encoding="utf-8")


if __name__ == "__main__":
    _main()

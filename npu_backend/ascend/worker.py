"""The other side of `check`: a Python whose triton is triton-ascend, for one chip.

Reads one request as JSON from stdin; writes JSON lines to stdout: {"total": kernels}, then {"row": ...} for each kernel
that has been compiled, {"note": ...} and {"recompiles": ...} where there is something to say. What the vendor's
packages print goes to stderr. Front end in this thread, compilers side by side; verdicts are kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_backend.ascend import front_end, vendor
from npu_backend.ascend.front_end import Launch
from npu_backend.ascend.verdict import Verdict
from npu_backend.config import cache_folder
from npu_backend.errors import NPUBackendError
from npu_backend.soc import SOCS, Soc

Tell = Callable[[Mapping[str, Any]], None]
TRITON_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_DECIDING = ("front_end.py", "vendor.py", "verdict.py")  # another version of these may say something else


@dataclass
class _Kernel:
    """One thing to compile, and who launches it."""

    launch: Launch
    dtype: str
    operator: str
    models: set[str] = field(default_factory=set)
    lengths: set[int] = field(default_factory=set)
    programs: int = 0


def main() -> int:
    """Serve one request."""
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()

    def tell(message: Mapping[str, Any]) -> None:
        with lock:
            out.write(json.dumps(message) + "\n")
            out.flush()

    soc = SOCS[request["soc"]]
    find = _liger_kernels if request["liger"] else _head_kernels
    kernels = find(request, soc, tell)
    tell({"total": len(kernels)})
    _compile_all(kernels, soc, request["compiler"], tell)
    return 0


def _head_kernels(request: Mapping[str, Any], soc: Soc, tell: Tell) -> dict[str, _Kernel]:
    from npu_backend.head import ascend_kernels
    from npu_backend.head.ascend_launches import kernel_launches

    kernels: dict[str, _Kernel] = {}
    for dtype, model in itertools.product(request["dtypes"], request["models"]):
        sizes = model["vocab_size"], model["hidden_size"], TRITON_NAMES[dtype]
        for one in kernel_launches(soc, *sizes, bias=model["bias"], softcap=model["softcap"]):
            kernel = getattr(ascend_kernels, one.kernel)
            launch = Launch(one.name, kernel, one.signature, one.constants, one.grid)
            _add(kernels, launch, dtype, "ppo_head", model["name"])
    return kernels


def _liger_kernels(request: Mapping[str, Any], soc: Soc, tell: Tell) -> dict[str, _Kernel]:
    """Kernels at the shortest and the longest sequence; those in between only count as recompilations."""
    from npu_backend.ascend import liger_launches

    foreign = liger_launches.prepare(soc, as_installed=request["liger"] == "as-installed")
    if foreign:
        tell({"note": {"model": "", "text": foreign, "finding": True}})
    lengths = sorted(set(request["lengths"]))
    kernels: dict[str, _Kernel] = {}
    for dtype in request["dtypes"]:
        for model in request["models"]:
            try:
                found, notes = liger_launches.record(model["config"], soc, dtype, lengths)
            except Exception as error:  # whatever a model's own code raises
                said = str(error) if isinstance(error, NPUBackendError) else f"{type(error).__name__}: {error}"
                tell({"note": {"model": model["name"], "text": f"nothing recorded: {said}", "finding": True}})
                continue
            for text in notes:
                tell({"note": {"model": model["name"], "text": text, "finding": False}})
            for row in liger_launches.recompilations(found):
                tell({"recompiles": {"model": model["name"], "dtype": dtype, **row}})
            for length in {lengths[0], lengths[-1]}:
                for launch in found[length]:
                    _add(kernels, launch, dtype, liger_launches.operator_of(launch), model["name"], length)
    return kernels


def _add(
    kernels: dict[str, _Kernel], launch: Launch, dtype: str, operator: str, model: str, length: int | None = None
) -> None:
    kernel = kernels.setdefault(f"{dtype} {launch.key()}", _Kernel(launch, dtype, operator))
    kernel.models.add(model)
    kernel.lengths.update([] if length is None else [length])
    programs = 1
    for size in launch.grid:
        programs *= size
    kernel.programs = max(kernel.programs, programs)


def _compile_all(kernels: Mapping[str, _Kernel], soc: Soc, compiler: str, tell: Tell) -> None:
    environment = {**os.environ, "PATH": f"{vendor.stand_in_folder()}{os.pathsep}{os.environ['PATH']}"}
    checker = hashlib.sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in _DECIDING)).hexdigest()

    def finish(kernel: _Kernel, verdict: Verdict) -> None:
        tell({"row": _row(kernel, soc, verdict)})

    def compile_one(kernel: _Kernel, file: Path, command: list[str], linalg: str) -> None:
        verdict = vendor.compile_repeatedly(command, linalg, environment)
        _keep(file, verdict)
        finish(kernel, verdict)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        waiting = []
        for key, kernel in kernels.items():
            digest = hashlib.sha256(f"{checker} {compiler} {soc} {key}".encode()).hexdigest()
            file = cache_folder() / "compile-check" / f"{digest[:32]}.json"
            if file.exists():
                finish(kernel, Verdict(**json.loads(file.read_text(encoding="utf-8"))))
                continue
            try:
                command, linalg = front_end.lower(kernel.launch, soc)
            except front_end.Refused as error:
                finish(kernel, Verdict("unsupported", str(error)))
                continue
            waiting.append(pool.submit(compile_one, kernel, file, command, linalg))
        for done in waiting:
            done.result()


def _keep(file: Path, verdict: Verdict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as draft:
        json.dump(verdict.to_dict(), draft)
    os.replace(draft.name, file)


def _row(kernel: _Kernel, soc: Soc, verdict: Verdict) -> dict[str, Any]:
    launch = kernel.launch
    if kernel.programs > front_end.MOST_PROGRAMS and verdict.status == "ok":
        refusal = f"a grid of {kernel.programs} programs; triton-ascend launches at most {front_end.MOST_PROGRAMS}"
        verdict = Verdict("unsupported", refusal)
    return {
        "soc": soc.name,
        "dtype": kernel.dtype,
        "operator": kernel.operator,
        "kernel": launch.name,
        "constants": {name: str(value) for name, value in sorted(launch.constants.items())},
        "programs": kernel.programs,
        "models": sorted(kernel.models),
        "lengths": sorted(kernel.lengths),
        "verdict": verdict.to_dict(),
    }


if __name__ == "__main__":
    sys.exit(main())

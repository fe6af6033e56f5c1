"""Import everything that an image promises, and see that it is the version that its constraints file pins.

    python smoke.py constraints.txt

Imports happen in one process, as in training, in the order in which a trainer imports them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

# Distribution -> what a program imports. `import torch` loads torch_npu itself.
MODULES = {
    "numpy": "numpy",
    "torch": "torch",
    "torch-npu": "torch_npu",
    "triton-ascend": "triton",
    "transformers": "transformers",
    "liger-kernel": "liger_kernel.transformers",
    "vllm": "vllm",
    "vllm-ascend": "vllm_ascend",
    "verl": "verl",
}
OPTIONAL = ("liger-kernel",)  # pinned for every variant of a row, installed in one


def main(constraints: str) -> int:
    """Import what is pinned, print a line each, and return how many are wrong."""
    lines = [line for line in Path(constraints).read_text(encoding="utf-8").splitlines() if "==" in line]
    pins = dict(line.split("==", 1) for line in lines if not line.startswith("#"))
    wrong = 0
    for distribution, module in MODULES.items():
        if distribution not in pins or (distribution in OPTIONAL and not installed(distribution)):
            continue
        try:
            importlib.import_module(module)
            version = importlib.metadata.version(distribution).partition("+")[0]
            verdict = "ok" if version == pins[distribution] else f"WRONG, pinned is {pins[distribution]}"
        except Exception as error:
            version, verdict = "", f"WRONG, it cannot be imported: {type(error).__name__}: {error}"
        wrong += verdict != "ok"
        print(f"import {module:26} {version:16} {verdict}")
    import npu_backend

    report = npu_backend.plan_patches({"use_liger": installed("liger-kernel")})
    print(f"npu_backend {npu_backend.__version__}: {len(report.rows)} operators planned for {report.device}")
    return wrong


def installed(distribution: str) -> bool:
    """Whether this Python has the distribution, without importing it."""
    return next(iter(importlib.metadata.distributions(name=distribution)), None) is not None


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)

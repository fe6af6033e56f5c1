"""The pip lines that add what this host lacks, and move nothing that it has (`doctor --install-plan`).

Every command has --no-deps and one exact version: pip would otherwise move torch, or put upstream triton over
triton-ascend. What is installed is not touched, whatever its version; the checks say what is wrong with it.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from npu_backend import __version__
from npu_backend.doctor import host as hosts
from npu_backend.doctor.checks.devices import family
from npu_backend.doctor.checks.packages import install, pip
from npu_backend.doctor.facts import Facts, python_version
from npu_backend.doctor.matrix import Row, rows, same
from npu_backend.doctor.packages import base
from npu_backend.patches.liger import TRITON_ASCEND

# What verl's import and its FSDP engine need besides torch and transformers, within what verl 0.9 asks for.
_BESIDE_VERL = (
    'accelerate codetiming datasets einops fastapi "hydra-core>=1.3,<2" pandas peft pillow ray tensordict==0.10.0 '
    "uvicorn"
)


def install_plan(facts: Facts) -> list[str]:
    """Commands, and comments that say what is left out and why; a shell can run it as it is."""
    have = facts.versions
    held = ("torch", "torch-npu", "triton", "triton-ascend")
    kept = ", ".join(f"{name} {have[name]}" for name in held if name in have) or "nothing"
    lines = [f"# npu-backend {__version__}, Python {python_version()}; stays as it is: {kept}"]
    if "torch" not in have:
        lines.append("# torch is missing: start from an image or a row of `npu-backend doctor --matrix`")
    if facts.ascend:
        lines += _torch_npu(facts) + _triton_ascend(facts)
    if "transformers" not in have:
        lines.append("# transformers is missing; it asks for no torch, so its own dependencies may come along:")
        lines.append("#   " + pip(facts, "install " + _ours("transformers")))
    if "liger-kernel" not in have:
        lines += ["# optional, for use_liger and impl_backend liger", _install(facts, _ours("liger-kernel"))]
    if not facts.ascend and "triton" not in facts.modules:
        lines.append("# Liger needs a triton too. On CUDA torch brings it; for an NPU:")
        lines.append(f"#   {install(facts, 'triton-ascend', TRITON_ASCEND)}")
    if "verl" not in have:
        lines.append("# optional: verl, after the transformers it was tested with and what it imports (docs/verl.md):")
        lines.append("#   " + pip(facts, f"install {_ours('transformers')} {_BESIDE_VERL}"))
        lines.append(_install(facts, _ours("verl")))
    if "npu-backend" not in facts.packages:
        lines.append(_install(facts, _ourselves(facts)))
    return [*lines, "# then: npu-backend doctor --probe"]


def _ours(name: str) -> str:
    """The newest release of `name` that this package itself was tested with, as pip takes it."""
    return next(
        f"{name}=={row.versions[name]}"
        for row in rows()
        if row.tested_by.startswith("npu-backend") and name in row.versions
    )


def _install(facts: Facts, what: str) -> str:
    return pip(facts, f"install --no-deps {what}")


def _ourselves(facts: Facts) -> str:
    """This checkout, where doctor runs from one; else this release."""
    for folder in facts.modules.get("npu_backend", ())[:1]:
        if hosts.exists(Path(folder).parent / "pyproject.toml"):
            return shlex.quote(str(Path(folder).parent))
    return f"npu-backend=={__version__}"


def _torch_npu(facts: Facts) -> list[str]:
    torch = facts.versions.get("torch", "")
    if "torch-npu" in facts.packages or not torch:
        return []
    row = _row(facts, "torch-npu", torch=base(torch))
    if row is None:
        return [f"# torch-npu is missing, and no tested row has torch {torch}: see `npu-backend doctor --matrix`"]
    return [_install(facts, f"torch-npu=={row.versions['torch-npu']}")]


def _triton_ascend(facts: Facts) -> list[str]:
    if "triton-ascend" in facts.packages:
        return []
    if family(facts.chip).startswith("310"):
        return [f"# triton-ascend is left out: it does not compile for {facts.chip}"]
    others = [name for name in ("triton", "flagtree", "pytorch-triton") if name in facts.packages]
    if others:
        return [
            f"# triton-ascend is left out: it would be written over {' and '.join(others)}, which is here; if nothing "
            "on this host needs that, `npu-backend doctor` prints the order that replaces it"
        ]
    row = _row(facts, "triton-ascend")
    return [install(facts, "triton-ascend", row.versions["triton-ascend"] if row else TRITON_ASCEND)]


def _row(facts: Facts, wanted: str, torch: str = "") -> Row | None:
    """The newest tested row that states `wanted`: for this torch, if one is asked for, and for this CANN, if any is."""
    fitting = [row for row in rows() if wanted in row.versions and (not torch or row.versions.get("torch") == torch)]
    cann = facts.versions.get("cann", "")
    return next((row for row in fitting if same(cann, row.versions.get("cann", ""))), next(iter(fitting), None))

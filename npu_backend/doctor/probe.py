"""Checks that have to run something: import torch_npu, and run a Triton kernel, each in a process with a time limit."""

from __future__ import annotations

from collections.abc import Iterator

from npu_backend.doctor.checks.cann import one_toolkit
from npu_backend.doctor.checks.devices import driver
from npu_backend.doctor.checks.packages import repair
from npu_backend.doctor.checks.versions import torch_pair
from npu_backend.doctor.facts import Facts
from npu_backend.doctor.report import Finding

_SECONDS = 180.0  # the first import of torch_npu on a cold disk, and the first compilation of a kernel, take long
_IMPORT = (
    "import torch, torch_npu; n = torch.npu.device_count(); "
    "print('devices:', n, torch.npu.get_device_name(0) if n else '')"
)
# What a loader's or driver's message says -> the fix
_FIXES = {
    "libascend_hal": f"mount the driver; see the check {driver.__name__}",
    "libhccl": f"source CANN's set_env.sh; see the check {one_toolkit.__name__}",
    "libascendcl": f"source CANN's set_env.sh; see the check {one_toolkit.__name__}",
    "undefined symbol": f"install torch and torch-npu of one number; see the check {torch_pair.__name__}",
    "active drivers": "put triton-ascend back over triton:",
    "No module named": "install what is missing; `npu-backend doctor --install-plan` prints the lines",
}


def torch_npu_import(facts: Facts) -> Iterator[Finding]:
    """torch_npu that cannot be imported, or that finds no device."""
    if not facts.ascend and not facts.virtual:
        return
    output = facts.host.execute([facts.host.python, "-c", _IMPORT], _SECONDS)
    if output.status != 0:
        yield _failed("torch_npu_import", "torch_npu cannot be used", output.text, facts)
    elif "devices: 0" in output.text:
        yield Finding(
            "torch_npu_import",
            "error",
            "torch_npu can be imported, but finds no device",
            "see the checks driver and visible_devices; `npu-smi info` must list the device in this container",
        )


def triton_kernel(facts: Facts) -> Iterator[Finding]:
    """A Triton kernel of one line that does not run on the NPU."""
    if not facts.ascend or facts.triton_backends is None:
        return
    output = facts.host.execute([facts.host.python, "-m", "npu_backend.doctor.triton_kernel"], _SECONDS)
    if output.status != 0:
        yield _failed("triton_kernel", "Triton cannot run a kernel on this host", output.text, facts)


ALL = (torch_npu_import, triton_kernel)


def _failed(check: str, what: str, text: str, facts: Facts) -> Finding:
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    fix = next((fix for sign, fix in _FIXES.items() if sign in text), "run it by hand, and look up the last line")
    if fix.endswith(":"):
        fix += "\n" + repair(facts, [copies[0] for name, copies in facts.packages.items() if name == "triton"], "")
    return Finding(check, "error", f"{what}: {lines[-1][:500]}", fix)

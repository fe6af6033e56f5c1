"""The checks: each a function of the facts that yields findings. To add one, write it and name it in `ALL`.

The first line of a check's docstring is its line in docs/doctor.md. A check that fails itself becomes a finding of its
own, so no broken host can stop the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from npu_backend.doctor.checks import cann, devices, packages, shims, versions
from npu_backend.doctor.facts import Facts
from npu_backend.doctor.report import Finding

Check = Callable[[Facts], Iterator[Finding]]

ALL: tuple[Check, ...] = (
    shims.settings,
    packages.triton_owner,
    packages.triton_backend,
    packages.missing_files,
    packages.two_copies,
    versions.torch_pair,
    versions.requirements,
    versions.liger_triton,
    versions.known_bad,
    versions.matrix,
    cann.one_toolkit,
    devices.driver,
    devices.visible_devices,
    devices.image,
    shims.cuda_shims,
    shims.autoload,
)
# What a container gets when it is started: the driver and the devices are mounted then.
OF_A_CONTAINER: tuple[Check, ...] = (devices.driver, devices.visible_devices)


def run(check: Check, facts: Facts) -> list[Finding]:
    """What a check finds, or that it failed."""
    found: list[Finding] = []
    try:
        for finding in check(facts):
            found.append(finding)  # noqa: PERF402  what was found before a failure counts
    except Exception as error:
        message = f"the check itself failed: {type(error).__name__}: {error}"
        found.append(Finding(check.__name__, "warning", message, "report it with this line; every other check has run"))
    return found

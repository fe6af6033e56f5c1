"""`npu-backend doctor`: what is wrong with this host, and the fix of each fault.

To examine a host loads no torch, torch_npu, triton or transformers.

host.py        files, variables, sys.path and commands: the only access to a host, replaced in tests
facts.py       what doctor knows about it;  packages.py: installed distributions and whose a file is
checks/        one function per kind of fault: facts -> findings
matrix.py      matrix.csv and known_bad.csv, versions tested together and bad ones, with their sources
probe.py       what has to be run to be known, in processes of its own (`--probe`)
plan.py        the pip lines that add what is missing and move nothing (`--install-plan`)
report.py      the findings as text and JSON;  document.py: the generated parts of docs/doctor.md
"""

from __future__ import annotations

from npu_backend.doctor import checks, probe
from npu_backend.doctor.facts import Facts
from npu_backend.doctor.host import Host
from npu_backend.doctor.report import SEVERITIES, DoctorReport, Finding, describe

__all__ = ["DoctorReport", "Facts", "Finding", "Host", "examine"]


def examine(host: Host | None = None, *, probes: bool = False, image: bool = False) -> DoctorReport:
    """Run every check on a host. Never raises: what fails is a finding.

    Args:
        host: what to examine; this host when None.
        probes: also import torch_npu and run a Triton kernel, in processes of their own with time limits.
        image: the host is an image that is being built: leave out what only a running container can have.
    """
    facts = Facts(host or Host())
    left_out = checks.OF_A_CONTAINER if image else ()
    run = [check for check in (*checks.ALL, *(probe.ALL if probes else ())) if check not in left_out]
    findings = [finding for check in run for finding in checks.run(check, facts)]
    return DoctorReport(
        facts=describe(facts),
        findings=tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))),
        checks=tuple(check.__name__ for check in run),
        not_run=(
            *(f"{check.__name__} (--image)" for check in left_out),
            *(f"{check.__name__} (--probe)" for check in probe.ALL if not probes),
        ),
    )

"""Say what is wrong with this host, and the fix of each fault: packages, versions, CANN, driver, devices, variables.

    npu-backend doctor
    npu-backend doctor --probe            # also import torch_npu and run a Triton kernel, in processes of their own
    npu-backend doctor --image            # of an image that is being built: without its driver and devices
    npu-backend doctor --matrix           # the versions tested together, and those known to be bad
    npu-backend doctor --install-plan     # the pip lines that add what is missing and move nothing

Nothing is changed, and neither torch, torch_npu, triton nor transformers is imported. The exit status is 1 when there
is an error or a warning.
"""

from __future__ import annotations

import argparse
import io
import json
import sys

from npu_backend.cli import _shared
from npu_backend.errors import BackendUnavailableError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `npu-backend doctor`."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--probe", action="store_true", help="also run what has to be run to be known (up to minutes)")
    what.add_argument("--image", action="store_true", help="leave out the driver and devices: nothing is mounted yet")
    what.add_argument("--matrix", action="store_true", help="print the version matrix, and examine nothing")
    what.add_argument("--install-plan", action="store_true", help="print pip lines for this host")
    _shared.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print what was asked for.

    Raises:
        BackendUnavailableError: the one package that doctor itself needs is missing or broken.
    """
    try:
        import packaging.requirements
        import packaging.version  # noqa: F401
    except ImportError as error:
        raise BackendUnavailableError(
            f"doctor compares versions with `packaging`, which cannot be imported: {error}; install it (it has no "
            f"dependencies): {sys.executable} -m pip install --no-deps --force-reinstall packaging"
        ) from error
    from npu_backend import doctor
    from npu_backend.doctor import document, plan

    if isinstance(sys.stdout, io.TextIOWrapper):  # names of folders need not be text, nor printable here
        sys.stdout.reconfigure(errors="backslashreplace")
    if args.matrix:
        print(json.dumps(document.matrix_dict(), indent=2) if args.json else document.matrix_text())
        return 0
    if args.install_plan:
        lines = plan.install_plan(doctor.Facts(doctor.Host()))
        print(json.dumps({"lines": lines}, indent=2) if args.json else "\n".join(lines))
        return 0
    report = doctor.examine(probes=args.probe, image=args.image)
    _shared.emit(report, as_json=args.json)
    return 0 if report.ok else 1

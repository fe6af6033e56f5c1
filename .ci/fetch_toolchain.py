"""Fetch the vendor's compiler, two releases of it, into the cache folder where `npu-backend compile-check` finds it.

    python .ci/fetch_toolchain.py [further arguments of pip install]

The tests of the compile check are skipped, and say so, where it is not: triton-ascend 3.2.0 has no wheel for Python
3.12, and not every package index has ascendnpu-ir.
"""

from __future__ import annotations

import platform
import sys

from npu_backend.ascend import toolchain
from npu_backend.errors import BackendUnavailableError

RELEASES = ("1.2.0", "1.0.0")  # the newest, and one under which Liger's kernels are known not to fit


def main(*pip_arguments: str) -> int:
    """Fetch both, or say why not; the exit status is 0 either way."""
    if sys.version_info >= (3, 12) or platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        version = platform.python_version()
        print(f"no wheel of triton-ascend for {platform.system()} {platform.machine()}, Python {version}: not fetched")
        return 0
    try:
        for release in RELEASES:
            toolchain.install(release, pip_arguments)
    except BackendUnavailableError as error:
        print(f"{error}\nthe tests of the compile check will be skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

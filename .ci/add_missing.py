"""Install those requirements of a file whose module this Python cannot find; what is there stays as it is.

    python .ci/add_missing.py requirements/no-deps.txt --no-deps [further arguments of pip install]

pip alone would replace the host's transformers by the pinned one, and put upstream triton over triton-ascend.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path


def main(path: str, *pip_arguments: str) -> int:
    """Return pip's exit status; 0 when nothing is missing."""
    lines = [line for line in Path(path).read_text().splitlines() if line and not line.startswith("#")]
    missing = [line for line in lines if importlib.util.find_spec(module_of(line)) is None]
    if not missing:
        return 0
    return subprocess.call([sys.executable, "-m", "pip", "install", *pip_arguments, *missing])


def module_of(requirement: str) -> str:
    """`liger-kernel==0.8.5` is imported as `liger_kernel`, and so are all others here."""
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0].replace("-", "_")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

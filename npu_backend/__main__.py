"""`python -m npu_backend` is the `npu-backend` command."""

from __future__ import annotations

import sys

from npu_backend.cli import main

if __name__ == "__main__":
    sys.exit(main())

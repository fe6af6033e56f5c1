"""For files of tests that `make test-other TORCH_SPEC=` runs where no torch is installed."""

from __future__ import annotations

import importlib.util

import pytest

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

"""The vendor's compiler for the tests that need it; skipped where it was not fetched (.ci/fetch_toolchain.py)."""

from __future__ import annotations

import pytest

from npu_backend.ascend import toolchain
from npu_backend.errors import BackendUnavailableError


def _find(release: str) -> toolchain.Toolchain:
    try:
        return toolchain.find(compiler=release)
    except BackendUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def compiler() -> toolchain.Toolchain:
    """The newest release of PyPI."""
    return _find("1.2.0")


@pytest.fixture(scope="session")
def old_compiler() -> toolchain.Toolchain:
    """The first release."""
    return _find("1.0.0")
